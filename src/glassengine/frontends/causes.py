"""Reads the causes of a TorchDynamo compilation from the guards that failed, and the places of graph breaks.

A guard is an assumption of compiled code, checked before each call. Dynamo reports as text which one failed for each
earlier compilation of the same code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import CodeType

from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters, graph_break_reasons, guard_failures
from torch._guards import CompileContext, TracingContext

from glassengine.executable.compilation import FIRST, Occasion
from glassengine.executable.counters import registry
from glassengine.results.backends import Cause

RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
"""Names that Dynamo gives to what follows a graph break: function, line."""

_SPELLED_OUT = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_SCALAR_TYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Bool": "bool",
    "BFloat16": "bfloat16",
}
_seen: dict[CodeType, int] = {}


def occasion(root: str) -> Occasion:
    """Return why the back-end is called now; for use within a compilation of Dynamo.

    Args:
        root: The expression on which all modules hang, left out of what causes say, as in names of inputs; or "".
    """
    context, tracing = CompileContext.try_get(), TracingContext.try_get()
    if context is None or tracing is None or not tracing.traced_code:
        return Occasion(((("", FIRST)),))
    code = tracing.traced_code[0]
    failures = guard_failures.get(code, [])
    # Dynamo adds one for every earlier compilation of this code; a reset of Dynamo forgets them all.
    new = failures[_seen.get(code, 0) :] if _seen.get(code, 0) <= len(failures) else failures
    _seen[code] = len(failures)
    within = re.compile(rf"(?<![\w.]){re.escape(root)}\.(?=[A-Za-z_])") if root else None
    causes = tuple(
        (number, Cause(cause.kind, within.sub("", cause.text)) if within else cause)
        for number, cause in map(read_guard, new)
    )
    return Occasion(causes or (("", _without_guard(code)),), str(context.compile_id))


def _without_guard(code: CodeType) -> Cause:
    if found := RESUMED.match(code.co_name):
        return Cause("graph break", f"{found[1]} goes on after {_break_at(code.co_filename, int(found[2]))}")
    if _debug_get_cache_entry_list(code):
        return Cause("unknown", "earlier code did not fit, and TorchDynamo does not say why")
    return FIRST


def _break_at(file: str, line: int) -> str:
    for broken in reversed(graph_break_reasons):
        frame = broken.user_stack[-1] if broken.user_stack else None
        if frame is not None and frame.filename == file and frame.lineno == line:
            return f"a graph break at {file}:{line}: {_headline(broken.reason)}"
    return f"a graph break at {file}:{line}"


def read_guard(text: str) -> tuple[str, Cause]:
    """Return (number of the compilation that did not fit, why) from Dynamo's text, like "0/1: k == 2  # y = x * k"."""
    first = text.strip().partition("\n")[0]
    found = re.match(r"(\S*\d+/\d+): (.*)", first)
    number, guard = (found[1], found[2]) if found else ("", first)
    guard = _SPELLED_OUT.sub(r".\1", re.split(r"\s{2,}# ", guard)[0]).strip()
    for pattern, make in _PATTERNS:
        if match := re.fullmatch(pattern, guard):
            return number, make(match)
    return number, Cause("guard", f"this no longer holds: {guard}")


def _value(match: re.Match[str]) -> Cause:
    name, value = match["name"], match["value"]
    kind = "attribute" if "." in name else "argument"
    if name.startswith("G["):
        kind, name = "global", re.sub(r"^G\['(\w+)'\]", r"\1", name)
    if name.endswith(".training"):
        kind = "training"
    if value in ("True", "False"):
        return Cause(kind, f"{name} was {value} and is {value != 'True'}")
    return Cause(kind, f"{name} is no longer {value}")


def _requires_grad(match: re.Match[str]) -> Cause:
    was = match["was"] == "1"
    return Cause("requires_grad", f"requires_grad of {match['name']} was {was} and is {not was}")


def _dtype(match: re.Match[str]) -> Cause:
    was, is_now = (_SCALAR_TYPES.get(match[key], match[key]) for key in ("was", "now"))
    return Cause("dtype", f"the dtype of {match['name']} was {was} and is {is_now}")


def _state(match: re.Match[str]) -> Cause:
    what = match["what"].strip()
    for prefix, kind in (("grad_mode", "grad mode"), ("autocast", "autocast"), ("default_dtype", "default dtype")):
        if what.startswith(prefix):
            return Cause(kind, f"{what if kind == 'autocast' else kind} changed")
    return Cause("global state", f"{what} changed")


def _keys(match: re.Match[str]) -> Cause:
    """Read which implementations torch chooses; the first is of the device, autograd's go in inference mode."""
    was, now = (match[side].split(", ") for side in ("was", "now"))
    if was[0] != now[0]:
        return Cause("device", f"the device of {match['name']} was {was[0].lower()} and is {now[0].lower()}")
    differing = [key for key in (*was, *now) if (key in was) != (key in now)]
    if differing and all(key.startswith(("Autograd", "ADInplaceOrView")) for key in differing):
        return Cause("grad mode", f"inference mode of {match['name']} changed")
    return Cause("global state", f"the way that torch handles {match['name']} changed: {', '.join(differing)}")


def _changed(kind: str, text: str) -> Callable[[re.Match[str]], Cause]:
    return lambda match: Cause(kind, text.format(**match.groupdict()))


_TENSOR = r"tensor '(?P<name>.+)' "
_WAS = r"\. expected (?P<was>.+), actual (?P<now>.+?)(?:\. Guard failed on a parameter.*)?"
_PATTERNS: tuple[tuple[str, Callable[[re.Match[str]], Cause]], ...] = (
    (
        _TENSOR + r"size mismatch at index (?P<dim>\d+)" + _WAS,
        _changed("size", "the size of {name} in dimension {dim} was {was} and is {now}"),
    ),
    (
        _TENSOR + r"stride mismatch at index (?P<dim>\d+)" + _WAS,
        _changed("stride", "the stride of {name} in dimension {dim} was {was} and is {now}"),
    ),
    (_TENSOR + "rank mismatch" + _WAS, _changed("rank", "the number of dimensions of {name} was {was} and is {now}")),
    (_TENSOR + "dtype mismatch" + _WAS, _dtype),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=(?P<was>[01]).*", _requires_grad),
    (_TENSOR + "device(?: index)? mismatch" + _WAS, _changed("device", "the device of {name} was {was} and is {now}")),
    (
        _TENSOR
        + r"dispatch key set mismatch\. expected DispatchKeySet\((?P<was>.*)\), actual DispatchKeySet\((?P<now>.*)\)",
        _keys,
    ),
    (r"not ___dict_contains\((?P<key>'.*'), (?P<name>.+)\)", _changed("argument", "{name} has {key} now")),
    (r"___dict_contains\((?P<key>'.*'), (?P<name>.+)\)", _changed("argument", "{name} has no {key} any more")),
    (r"GLOBAL_STATE changed: (?P<what>.*)", _state),
    (r"BACKEND_MATCH failure.*", _changed("back-end", "it was compiled with another back-end or other options")),
    (r"(?P<guard>.*\.(?:size|stride|storage_offset)\(.*)", _changed("size", "this no longer holds: {guard}")),
    (r"len\((?P<name>.+)\) [!=]= (?P<was>\d+)", _changed("length", "the length of {name} is no longer {was}")),
    (r"(?P<name>.+) is (?P<value>None)", _value),
    (r"(?P<name>.+) is not None", _changed("argument", "{name} is now None")),
    (r"(?P<guard>.+ is (?:not )?[A-Za-z_].*)", _changed("aliasing", "this no longer holds: {guard}")),
    (r"Duplicate tensors? found.*", _changed("aliasing", "two arguments are now the same tensor")),
    (
        r"___check_type_id\((?P<name>[^,]+),.*type=<class '(?P<was>[^']+)'>.*",
        _changed("type", "the type of {name} is no longer {was}"),
    ),
    (
        r"expected type of '(?P<name>.+)' to be a tensor type, .*but found (?:<class ')?(?P<now>[^'>]*).*",
        _changed("type", "the type of {name} is now {now}"),
    ),
    (r"___check_obj_id\((?P<name>[^,]+),.*", _changed("object", "{name} is another object now")),
    (r"(?P<name>[^()=<>]+) == (?P<value>.+)", _value),
)


def _headline(reason: str) -> str:
    return reason.strip().partition("\n")[0]


def graph_breaks() -> Mapping[str, int]:
    """Return counters of the graph breaks of this process: all of them, and by reason.

    Code that Dynamo gives up on, which runs eagerly from then on, is counted as well.
    """
    # Dynamo counts a break under one of these, or under both.
    broken, unsupported = counters["graph_break"], counters["unimplemented"]
    counts: Counter[str] = Counter()
    for reason in broken.keys() | unsupported.keys():
        count = max(broken[reason], unsupported[reason])
        counts.update({"GraphBreak": count, f"GraphBreak::{_headline(reason)}": count})
    return counts


registry.add_source(graph_breaks)

"""Stored programs, read without running code.

`torch.export.load` unpickles weights, constants and example inputs where the archive asks for it. It finds operators by
dotted names, and takes any callable on the way there; it imports what the description of nested arguments names as an
enumeration or a factory; and it writes names into the source of a function, which it executes. What is let through is
listed here, by position.
"""

from __future__ import annotations

import ast
import builtins
import enum
import io
import json
import keyword
import logging
import math
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace
from torch.export import ExportedProgram

from glassengine.errors import CorruptError, GlassError
from glassengine.reading.documents import objects_within, parsed
from glassengine.reading.files import open_regular
from glassengine.reading.tensors import check_unfolded, read_torch

MAX_BYTES = 1 << 30
"""Most bytes of a stored program when unpacked; it holds no weights."""

MAX_JSON_BYTES = 256 << 20
MAX_ITEMS = 8_000_000
"""Values in the description of a graph: some hundred a node, and as many bytes of memory each."""


class _Weight(msgspec.Struct):
    path_name: str
    use_pickle: bool


class _Weights(msgspec.Struct):
    config: dict[str, _Weight]


_MODEL, _EXAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = {
    "data/weights/model_weights_config.json": re.compile(r"weight_\d+"),
    "data/constants/model_constants_config.json": re.compile(r"tensor_\d+"),
}
_OTHERS = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_(format|version)|\.data/(version|serialization_id)"
    r"|\.format_version|\.storage_alignment|byteorder|version"
)


def inert_archive(path: Path, *, has_weights: bool = False) -> io.BytesIO:
    """Return a program archive for `torch.export.load`, refused where it holds more than a graph, names and tensors.

    The result is rewritten from the checked entries: torch has a zip reader of its own, and two
    readers can see different files in one archive (entries of one name, headers that contradict each other).

    Args:
        path: The file.
        has_weights: Whether it is a user's, with weights; guards, which are code, are then left out.

    Its entries must not be compressed (torch never does), so that it cannot unpack to more than its own size.

    Raises:
        CorruptError: It is not an archive, too large, or reading it could run code.
    """
    try:
        with (
            open_regular(path, inside=None if has_weights else path.parent) as opened,
            zipfile.ZipFile(opened) as archive,
        ):
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise _refusal(path, "compressed entries")
            if not has_weights and sum(info.file_size for info in archive.infolist()) > MAX_BYTES:
                raise _refusal(path, f"more than {MAX_BYTES:,} bytes")
            files: dict[str, bytes] = {}
            for info in archive.infolist():
                name = info.filename.partition("/")[2]
                if name not in (_MODEL, _EXAMPLES, *_CONFIGS) and not _OTHERS.fullmatch(name):
                    raise _refusal(path, f"an entry {name!r}")
                if name in files:
                    raise _refusal(path, f"two entries {name!r}")
                if name in (_MODEL, *_CONFIGS) and info.file_size > MAX_JSON_BYTES:
                    raise _refusal(path, f"{name} of {info.file_size:,} bytes")
                files[name] = archive.read(info)
        for name, stored in _CONFIGS.items():
            for weight, entry in parsed(files[name], _Weights, f"{path}:{name}").config.items():
                if entry.use_pickle or not stored.fullmatch(entry.path_name):
                    raise _refusal(path, f"a pickle for {weight!r}")
        check_unfolded(read_torch(io.BytesIO(files[_EXAMPLES]), name=f"{path}:{_EXAMPLES}"), str(path))
        limits: dict[str, Any] = {"items": MAX_ITEMS, "nonfinite": True, "what": "the graph"}
        model = parsed(files[_MODEL], dict[str, Any], f"{path}:{_MODEL}", **limits)
        if has_weights and model.pop("guards_code", None):
            files[_MODEL] = json.dumps({**model, "guards_code": []}).encode()
    except GlassError:
        raise
    except Exception as error:
        raise CorruptError(f"{path.name} cannot be read", got=f"{type(error).__name__}: {error}") from error
    for problem in problems(model):
        raise _refusal(path, problem)
    return _rewritten(files)


def load_archive(archive: io.BytesIO) -> ExportedProgram:
    """Return the program in what `inert_archive` gave, or raise what torch says of it.

    torch logs the reason, with a traceback, and raises that one should look there.
    """
    reasons: list[str] = []

    def kept(record: logging.LogRecord) -> bool:
        reasons.append(str(record.exc_info[1]) if record.exc_info else record.getMessage())
        return False

    logger = logging.getLogger("torch.export")
    logger.addFilter(kept)
    try:
        return torch.export.load(archive)
    except RuntimeError as error:
        if not reasons:
            raise
        raise RuntimeError(reasons[-1]) from error
    finally:
        logger.removeFilter(kept)


def _rewritten(files: Mapping[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(f"program/{name}", content)
    buffer.seek(0)
    return buffer


def _refusal(path: Path, found: str) -> CorruptError:
    return CorruptError(
        f"{path.name} is not a stored program",
        got=found,
        expected="a graph, names and tensors, as torch.export.save and glass build write",
    )


_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?", re.ASCII)
_NUMBERS = re.compile(
    r"torch\.sym_\w+|math\.\w+|_operator\.(getitem|add|mul|sub|truediv|floordiv|mod|pow|neg|pos|abs|ge|le|gt|lt|eq|ne|and_"
    r"|or_|xor|not_|inv|invert|lshift|rshift)",
    re.ASCII,
)
# Operators that are given other operators, graphs and tensors, and do nothing else than call them on each other.
_HIGHER_ORDER = re.compile(
    r"_export_tracepoint|associative_scan|auto_functionalized(_v2)?|autograd_function_apply|cond|flex_attention(_backward)?"
    r"|foreach_map|graphsafe_run_with_rng_state|hints_wrapper|invoke_quant(_packed)?|invoke_subgraph|local_map_hop"
    r"|map(_impl)?|out_dtype|run_and_save_rng_state|run_const_graph|run_dtensor_rng_op|run_with_rng_state|scan"
    r"|strict_mode|tag_activation_checkpoint|while_loop(_stack_output)?|with_effects"
    r"|wrap(_activation_checkpoint|_with_autocast|_with_set_grad_enabled)?"
)
# They open files by name, or write to the terminal.
_REACHING_OUT = frozenset({"aten::from_file", "aten::save", "aten::_print", "aten::warn", "debugprims::load_tensor"})
# What compilers and runtimes call between themselves: they take places in memory, sizes, or packed weights as they are
# told, also those outside of a tensor. No exporter writes them.
_TRUSTING = re.compile(
    r"inductor|static_runtime|symm_mem|profiler|debugprims|debug_mode_ops|mkl|mkldnn_prepacked|_native|_test|c10d"
)
_UNCHECKED = re.compile(r"aten::_sparse_\w*_unsafe")
# Torch's own operators that take text take an equation, a mode or a message, with the exceptions above. Those of other
# libraries may take the name of a file.
_OF_TORCH = re.compile(
    r"aten|prims?|_?quantized|quantized_decomposed|onednn|mkldnn(_prepacked)?|sparse|inductor_prims|rngprims|export"
    r"|_c10d_functional(_autograd)?|_dtensor"
)
_NAMES = re.compile(
    r"[A-Z][A-Za-z]*|[suz]+f?\d+|floor|ceiling|positive|nonnegative|integer|real|precision|True|False|None|and|or|not|evaluate"
)
_VALUE = re.compile(r"([A-Za-z_]\w*)?", re.ASCII)
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),.<>=!&|~]*")
# A name of a weight is written between quotes.
_QUOTED = re.compile(r"[^\"'\\\x00-\x1f\x7f-\x9f]*")
_WEIGHTS = ("parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "fqn")
_MAX_EXPONENT = 64
_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool")


def problems(model: Any) -> Iterator[str]:
    """Yield what in the description of a graph is looked up, imported or evaluated, and is not what it should be."""
    for value in objects_within(model):
        yield from _problems_of(value)


def _problems_of(value: dict[str, Any]) -> Iterator[str]:
    if "target" in value and "inputs" in value:
        yield from _operator_problems(str(value["target"]), value["inputs"])
    if "as_operator" in value:
        yield from _operator_problems(str(value["as_operator"]), None)
    if "expr_str" in value and not is_expression(str(value["expr_str"])):
        yield f"a size {value['expr_str'][:80]!r}"
    for key in ("name", "as_name"):
        # Torch writes names into the source of a function, which it executes.
        if isinstance(value.get(key), str) and not _VALUE.fullmatch(value[key]):
            yield f"a value called {value[key][:80]!r}"
    for name in value.get("forward_arg_names") or ():
        if not _is_argument(name):
            yield f"an argument called {str(name)[:80]!r}"
    for key in _WEIGHTS:
        if isinstance(value.get(key), str) and not _QUOTED.fullmatch(value[key]):
            yield f"a weight called {value[key][:80]!r}"
    for key in ("in_spec", "out_spec"):
        if isinstance(value.get(key), str) and value[key]:
            yield from _tree_problems(value[key])
    if value.get("guards_code"):
        yield "guards, which are code"


def _operator_problems(target: str, inputs: Any) -> Iterator[str]:
    if _NUMBERS.fullmatch(target):
        return
    match = _OPERATOR.fullmatch(target)
    if match is None or not _is_harmless(*match.groups()):
        yield f"an operator {target[:80]!r}"
    elif match[1] != "higher_order" and _OF_TORCH.fullmatch(match[1]) is None:
        for text in _texts(inputs):
            if not text.isidentifier():
                yield f"an operator of a library, {target[:80]!r}, that is given the text {text[:80]!r}"


def _is_harmless(library: str, name: str, overload: str | None) -> bool:
    """Whether this is the name of an operator that reaches nothing, or of nothing, which torch refuses."""
    if f"{library}::{name}" in _REACHING_OUT or _UNCHECKED.fullmatch(f"{library}::{name}"):
        return False
    if _TRUSTING.fullmatch(library):
        return False
    if library == "higher_order":
        return overload is None and _HIGHER_ORDER.fullmatch(name) is not None
    namespace = getattr(torch.ops, library)
    if not isinstance(namespace, _OpNamespace):  # a method: `load_library`
        return False
    packet = getattr(namespace, name, None)
    if packet is None:
        return True
    return isinstance(packet, OpOverloadPacket) and isinstance(getattr(packet, overload or "", None), OpOverload)


def _texts(inputs: Any) -> Iterator[str]:
    """Yield the texts among the arguments of an operator."""
    for value in objects_within(inputs):
        for text in (value.get("as_string"), *(value.get("as_strings") or ())):
            if isinstance(text, str):
                yield text


def _is_argument(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _tree_problems(text: str) -> Iterator[str]:
    """Yield what in the description of nested arguments is imported, or is no name of a keyword."""
    try:
        _, top = json.loads(text)
        waiting: list[Any] = [top]
        while waiting:
            spec = waiting.pop()
            waiting += spec["children_spec"]
            yield from _context_problems(spec["context"])
        children = top["children_spec"]
        if len(children) == 2 and children[1]["type"] == "builtins.dict":
            names = children[1]["context"]
            for name in json.loads(names) if isinstance(names, str) else names or ():
                if not _is_argument(name):
                    yield f"an argument called {str(name)[:80]!r}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield f"nested arguments {text[:80]!r}: {type(error).__name__}"


def _context_problems(context: Any) -> Iterator[str]:
    waiting = [context]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and value[:1] in ("[", "{", '"'):
            try:
                waiting.append(json.loads(value))
            except ValueError:
                continue  # the name of something
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            if "__enum__" in value and not _is_enumeration(value):
                yield f"a key {value.get('fqn')!r} that is imported"
            if "default_factory_module" in value and not _is_factory(value):
                yield f"a factory {value.get('default_factory_name')!r} that is imported"


def _is_enumeration(value: dict[str, Any]) -> bool:
    """Whether a key is a member of an enumeration that is there: nothing is imported for it, and nothing called."""
    module, _, path = str(value.get("fqn")).partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return isinstance(found, enum.EnumMeta) and value.get("name") in found.__members__


def _is_factory(value: dict[str, Any]) -> bool:
    name = value.get("default_factory_name")
    return value.get("default_factory_module") == builtins.__name__ and name in _FACTORIES


def is_expression(text: str) -> bool:
    """Whether `text` is arithmetic on sizes: no strings but symbols and numbers, no attributes, no other names."""
    unquoted = re.sub(r"'([suz]+f?\d+)'", r"\1", text)
    unquoted = re.sub(r"'-?\d+(\.\d+)?(e[+-]?\d+)?'", "0", unquoted)
    return (
        _EXPRESSION.fullmatch(unquoted) is not None
        and re.search(r"\.\s*[A-Za-z_]|__", unquoted) is None
        and all(_NAMES.fullmatch(name) for name in re.findall(r"[A-Za-z_]\w*", unquoted))
        and _ends_soon(unquoted)
    )


def _ends_soon(text: str) -> bool:
    """Whether powers stay small: 9**9**9 has 370 million digits, all of which are computed."""
    if "**" not in text and "Pow" not in text:
        return True
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    product = 1
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            exponent: ast.expr = node.right
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "Pow" in node.func.id:
            exponent = node.args[-1] if node.args else node
        else:
            continue
        values = [part.value for part in ast.walk(exponent) if isinstance(part, ast.Constant)]
        numbers = [abs(value) for value in values if isinstance(value, int | float)]
        if len(numbers) < len(values) or max(numbers, default=math.inf) > _MAX_EXPONENT or _is_nested(exponent):
            return False
        product *= math.ceil(max(numbers)) or 1
    return product <= _MAX_EXPONENT


def _is_nested(exponent: ast.expr) -> bool:
    """Whether an exponent is more than a number, which may stand in the call of a type."""
    parts = ast.walk(exponent)
    return any(isinstance(part, ast.BinOp) or getattr(part, "id", "").startswith("Pow") for part in parts)

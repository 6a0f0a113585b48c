"""Files that are programs already: ONNX models, and `.pt2` files of `torch.export.save`. Nothing is executed.

The graph of `torch.fx` beside it (see `translate`) is what the values are judged with; what a back-end builds is the
ONNX graph itself, with debug outputs added to it under their own names.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, SymBoolArgument, SymFloatArgument, SymIntArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import CorruptError, GlassError, UnknownNameError, UsageError, first_line, logger
from glassengine.program.export.export import named_program
from glassengine.program.onnx.file import OnnxFile, is_onnx, read_onnx
from glassengine.program.onnx.session import OnnxModel
from glassengine.program.onnx.translated import UNKNOWN_SIZE, TranslatedFile, ValueType, metadata_of, translate_file
from glassengine.program.representation.archive import inert_archive, load_archive
from glassengine.program.representation.naming import Paths, is_tensor_node, op_name, source_line
from glassengine.program.representation.program import FIXED_INPUTS, OnnxGraph, Port, Program
from glassengine.program.representation.signature import named_inputs, quiet, user_inputs
from glassengine.program.user_code.calls import RAISED
from glassengine.reading.files import shown
from glassengine.sites import Site, SiteTable, op_site
from glassengine.taps import deliver, is_heard

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class _Arguments:
    """How keyword arguments become those of the stored forward."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]

    @classmethod
    def of(cls, exported: ExportedProgram) -> _Arguments:
        signature = exported.module_call_graph[0].signature
        assert signature is not None
        args, kwargs = signature.in_spec.children()
        names = list(signature.forward_arg_names or [])
        if len(names) < args.num_children:
            names = [f"arg_{index}" for index in range(args.num_children)]
        return cls(tuple(names[: args.num_children]), tuple(kwargs.context or ()))

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.positional, args, strict=True)), **kwargs}

    def split(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        missing = [name for name in (*self.positional, *self.keywords) if name not in given]
        if missing:
            raise UsageError("inputs are missing", got=", ".join(given), expected=", ".join(missing))
        return tuple(given[name] for name in self.positional), {name: given[name] for name in self.keywords}


class StoredModule(nn.Module):
    """A stored program as a module: the graph as it was stored, its op sites observable as taps."""

    def __init__(self, exported: ExportedProgram, program: Program) -> None:
        super().__init__()
        # No submodule: its own names and hooks are not the user's, and it has no modes.
        self._stored = (exported.module(),)
        self.given = _given(exported)
        self._arguments = _Arguments.of(exported)
        self._fixed: dict[str, Any] = dict(program.metadata[FIXED_INPUTS])
        self._sites = _sites_of_stored(exported, program)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights under the names that they have in the program."""
        return self._stored[0].state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names that they have in the program."""
        return self._stored[0].named_parameters(*args, **kwargs)

    def values(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Run the stored graph node by node and return its tensors by op site."""
        tensors: dict[str, torch.Tensor] = {}
        self._run(inputs, tensors)
        return tensors

    def forward(self, **inputs: Any) -> Any:
        """Run the stored graph."""
        if not is_heard():
            args, kwargs = self._arguments.split({**self._fixed, **inputs})
            return self._stored[0](*args, **kwargs)
        tensors: dict[str, torch.Tensor] = {}
        result = self._run(inputs, tensors)
        for site, tensor in tensors.items():
            deliver(site, tensor)
        return result

    def _run(self, inputs: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        args, kwargs = self._arguments.split({**self._fixed, **inputs})
        return _Observing(self._stored[0], self._sites, tensors).run(*args, *kwargs.values())


class _Observing(torch.fx.Interpreter):
    def __init__(self, module: Any, sites: Mapping[str, str], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(module)
        self._sites = sites
        self._found = tensors

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self._sites and isinstance(value, torch.Tensor):
            self._found[self._sites[n.name]] = value.clone()  # what follows may write into it
        return value


def read_exported(path: Path) -> tuple[StoredModule, Program]:
    """Read a `.pt2` file; nothing in it is executed.

    Raises:
        UsageError: It takes something else than tensors and constants, or calls ops that are not registered here.
        CorruptError: It is damaged, or holds more than a program.
    """
    archive = inert_archive(path, has_weights=True)
    try:
        with quiet():
            exported = load_archive(archive)
    except Exception as error:
        raise CorruptError(
            f"{path.name} cannot be read",
            got=f"{type(error).__name__}: {first_line(error)}",
            expected="a program of this version of torch, whose ops are registered in this process",
        ) from error
    arguments = _Arguments.of(exported)
    given = _given(exported)
    with torch.no_grad(), quiet():
        functional = exported.run_decompositions({})
    plain = (bool, int, float, str, type(None))
    fixed = {name: value for name, value in (given or {}).items() if isinstance(value, plain)}
    inputs = list(_input_names(functional, arguments))
    modules = _modules(functional.graph)
    program = named_program(functional, modules, input_names=inputs, metadata={FIXED_INPUTS: fixed})
    return StoredModule(exported, program), program


def _given(exported: ExportedProgram) -> dict[str, Any] | None:
    """Return the inputs that a program was exported with, as keyword arguments; None where they are not in the file."""
    if exported.example_inputs is None:
        return None
    return _Arguments.of(exported).named(*exported.example_inputs)


def _input_names(exported: ExportedProgram, arguments: _Arguments) -> Iterator[str]:
    """Yield what the engine calls each tensor that is given at run time: "x", "pair[0]", "options.scale"."""
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    places = [torch.tensor(place) for place in range(signature.in_spec.num_leaves)]
    tree = arguments.named(*pytree.tree_unflatten(places, signature.in_spec))
    names = {int(place): name for name, place in named_inputs(tree).items()}
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    tensors = set(user_inputs(exported))
    for place, spec in enumerate(specs):
        if isinstance(spec.arg, (SymIntArgument, SymFloatArgument, SymBoolArgument)):
            raise UsageError("the program takes a number that may change", got=names[place], expected="tensors")
        if spec.arg.name in tensors:
            yield names[place]


def _modules(graph: torch.fx.Graph) -> nn.Module:
    """Return modules without content under every path of a graph's module stacks."""
    root = nn.Module()
    for node in graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            module = root
            for part in path.split(".") if path and "(" not in path else ():
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
    return root


def _sites_of_stored(exported: ExportedProgram, program: Program) -> dict[str, str]:
    """Return node of the stored graph -> site in the functional one, which may call its nodes otherwise.

    The ops of a module call are those of the functional graph where there are as many of a name: one that was
    decomposed has another name.
    """

    def by_place(graph: torch.fx.Graph) -> dict[tuple[Any, ...], list[Node]]:
        paths = Paths(_modules(graph), "", graph)
        table: dict[tuple[Any, ...], list[Node]] = {}
        for node in graph.nodes:
            if is_tensor_node(node):
                table.setdefault((*paths.of(node.meta.get("nn_module_stack")), op_name(node)), []).append(node)
        return table

    sites = {site.node: site.name for site in program.sites if site.kind == "op"}
    functional = by_place(program.graph)
    site_of: dict[str, str] = {}
    for place, nodes in by_place(exported.graph).items():
        others = functional.get(place, [])
        if len(others) == len(nodes):
            site_of |= {node.name: sites[other.name] for node, other in zip(nodes, others, strict=True)}
    return site_of


NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of a node's metadata, as PyTorch's exporter writes it."""


def onnx_program(file: OnnxFile, *, metadata: dict[str, Any] | None = None) -> Program:
    """Return the program of an ONNX file.

    Raises:
        UsageError: The graph is not valid, or takes or returns something that is not a tensor.
    """
    found = translate_file(file)
    ports = []
    for name in found.inputs:
        kind = found.types[name]
        ports.append(Port(name, found.values[name].name, _dtype_name(kind), kind.shape or ()))
    return Program(
        found.exported,
        _sites(file.path.name, found),
        "module",
        tuple(ports),
        {name: node.name for name, node in found.results.items()},
        {},
        None,
        dict(metadata or {}),
        OnnxGraph(file, {node.name: name for name, node in found.values.items()}),
    )


def onnx_model(file: OnnxFile, program: Program) -> OnnxModel:
    """Return the file as a module whose taps are the sites of its program."""
    observed = [site.name for site in program.sites if site.kind == "op"]
    return OnnxModel(file, observed, [port.name for port in program.inputs])


def _sites(file: str, found: TranslatedFile) -> SiteTable:
    """Return the sites: inputs, then every value that is a tensor of a known type, results under two names."""
    prints: dict[str, str] = {name: _hash(f"input {name}") for name in found.values}
    value_of = {node: name for name, node in found.values.items()}
    node_names = Counter(proto.name for _, proto in found.protos.values())
    occurrences: Counter[tuple[str, str]] = Counter()
    returned = set(found.results.values())
    sites = []
    for name in found.inputs:
        sites.append(_site(f".:in.{name}", "module", found.values[name], "input", found.types[name], prints[name]))
    num_unknown = 0
    for node, (index, proto) in found.protos.items():
        name = value_of[node]
        prints[name] = _fingerprint(proto, list(proto.output).index(name), prints)
        kind = found.types.get(name)
        if kind is None or kind.dtype is None:
            num_unknown += 1
            continue
        aliases = [node.name] if node.name != name else []
        if proto.name and node_names[proto.name] == 1 and proto.name != name:
            aliases.append(proto.name)
        scope = _scope(proto)
        if scope is not None:
            aliases.append(op_site(scope, proto.op_type, occurrences[scope, proto.op_type]))
            occurrences[scope, proto.op_type] += 1
        source = source_line(node) or _in_file(file, index, proto)
        sites.append(_site(name, "op", node, proto.op_type, kind, prints[name], source, tuple(aliases)))
        if node in returned:
            sites.append(_site(f".:out.{name}", "module", node, proto.op_type, kind, prints[name], source))
    if num_unknown:
        logger.warning("%d values of %s are not tensors of a known type, and have no sites", num_unknown, file)
    return SiteTable(sites)


def _site(
    name: str,
    kind: str,
    node: Node,
    op: str,
    value: ValueType,
    fingerprint: str,
    source: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Site:
    shape = value.shape if value.shape is not None else (UNKNOWN_SIZE,)
    return Site(name, kind, node.name, op, _dtype_name(value), shape, {}, source, fingerprint, aliases)


def _dtype_name(kind: ValueType) -> str:
    return str(kind.dtype).removeprefix("torch.")


def _in_file(file: str, index: int, proto: onnx.NodeProto) -> str:
    """Return a line as of source code: the file, the number of the node, and the node."""
    call = f"{proto.op_type}({', '.join(proto.input)})"
    return f"{file}:{index}: {proto.name} = {call}" if proto.name else f"{file}:{index}: {call}"


def _fingerprint(proto: onnx.NodeProto, index: int, prints: dict[str, str]) -> str:
    attributes = sorted((entry.name, entry.SerializeToString(deterministic=True)) for entry in proto.attribute)
    read = [prints.get(name, name) for name in proto.input]
    return _hash(repr((proto.domain, proto.op_type, index, attributes, read)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scope(proto: onnx.NodeProto) -> str | None:
    """Return the module path that PyTorch's exporter noted, whose last part is the op."""
    text = metadata_of(proto, NAME_SCOPES)
    try:
        scopes = ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not isinstance(scopes, list) or len(scopes) < 2 or not all(isinstance(part, str) for part in scopes):
        return None
    return scopes[-2] or "."


ENDINGS = (".onnx", ".pt2")


def is_stored(spec: Any) -> bool:
    """Whether `spec` names a file that is a program."""
    return isinstance(spec, (str, Path)) and Path(spec).suffix.lower() in ENDINGS


def read_stored(
    path: Path, *, dtype: str = "auto", attn_implementation: str | None = None
) -> tuple[nn.Module, Program]:
    """Read a file that is a program.

    Args:
        path: The file.
        dtype: "auto", or that of its weights: nothing is cast.
        attn_implementation: None: nothing is chosen any more.

    Returns:
        A module that runs what the file says, and the program, whose metadata say what it is.

    Raises:
        UsageError: There is no such file, it is of another kind, or it cannot be as it was asked for.
        CorruptError: It is damaged, or reading it could do harm.
        BackendError: A package to read it with is missing.
    """
    path = path.expanduser()
    if not path.is_file():
        here = [str(p) for p in path.parent.glob("*") if is_stored(p)] if path.parent.is_dir() else []
        raise UnknownNameError("model file", str(path), here, hint="MODEL may be an ONNX file or a .pt2 program")
    module: nn.Module
    try:
        if is_onnx(path):
            file = read_onnx(path)
            program = onnx_program(file)
            module = onnx_model(file, program)
        else:
            module, program = read_exported(path)
    except GlassError:
        raise
    except RAISED as error:
        raise CorruptError(
            f"{path.name} describes no program that can be made",
            got=shown(f"{type(error).__name__}: {first_line(error)}")[:400],
            hint="run with -v for the place; onnx.checker.check_model says more of an ONNX file",
        ) from error
    weights = program.weights().values()
    floating = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
    own = str(floating).removeprefix("torch.")
    if attn_implementation is not None or dtype not in ("auto", own):
        flag = f"--attn-implementation {attn_implementation}" if attn_implementation else f"--dtype {dtype}"
        raise UsageError(
            "dtype and attention of a stored program were chosen when it was made",
            got=f"{flag}, for {path.name} with {own} weights",
            hint="remove the flag, or give the model that the program was made of",
        )
    kind = "onnx.ModelProto" if program.onnx is not None else "torch.export.ExportedProgram"
    program.metadata |= {"model": str(path), "class": kind, "dtype": own, "attn_implementation": None}
    return module, program

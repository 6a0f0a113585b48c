"""Back-end "inductor": AOTInductor, frozen; and the network of a compiled package: its kernels and library calls.

Freezing packs the weights of linear layers and is what makes decoding at batch 1 fast on a CPU; it takes effect only
under `torch.no_grad()`, elsewhere it is silently ignored. Frozen weights live inside the built library. Above
`FREEZE_LIMIT_BYTES` the weights stay outside and are shared with the engine's weights file instead; steps of one token,
which read all of them once, are compiled by themselves there (`one_row`).

Inductor writes beside its code from which nodes of the program each kernel came. Inputs and outputs of a kernel are not
in that table: they are read off the program, as the values that enter and leave the set of its nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa

from glassengine import environment
from glassengine.accelerators import require_device
from glassengine.backends.inductor.rewrites import (
    of_one_token,
    one_token_shapes,
    product_by_rows,
    with_products_by_rows,
)
from glassengine.backends.inductor.settings import flags_in_effect, read_flags, use_private_directory
from glassengine.backends.protocol.attention import node_of, with_grouped_queries, with_plain_attention
from glassengine.backends.protocol.backend import (
    BATCH_INVARIANT,
    Availability,
    Capabilities,
    GraphFunction,
    Layer,
    Network,
    NetworkTensor,
    Run,
    Weights,
    taking_list,
)
from glassengine.backends.protocol.io import device_of, exported_on, read_io, running_on, write_io
from glassengine.errors import BackendError, CorruptError, logger
from glassengine.executable.cache import CompilerCache
from glassengine.program.representation.listing import list_nodes, stage_of
from glassengine.program.representation.program import Program, copied_graph
from glassengine.program.user_code.calls import described
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular
from glassengine.torch_versions import donated, enlarge_caches

_TABLE = "kernel_information.json"
_MAX_TEXT_BYTES = 256 << 20
_OF_THIS_MACHINE = re.compile(r"^// .*\.(wrapper|kernel)\.(cpp|o)\b.*\n", re.MULTILINE)
_NOTE = (
    "Kernels and library calls in the order of the generated code (inductor_wrapper.cpp, inductor_kernel.cpp). Inputs "
    "and outputs are what enters and leaves the nodes of a kernel; one that recomputes a node names it again."
)


def list_kernels(program: Program, package: Path) -> Network:
    """Return the network of a compiled package.

    Raises:
        BackendError: The package does not tell where its kernels came from.
    """
    table, sources = _read(package)
    if table is None:
        raise BackendError("Inductor did not say which nodes its kernels came from", got=f"no {_TABLE} in the package")
    lines = {line.name: line for line in list_nodes(stage_of(program, ""))}
    graph_nodes = {node.name: node for node in program.graph.nodes}
    order = {name: index for index, name in enumerate(graph_nodes)}
    layers: list[Layer] = []
    given: set[str] = set()
    for name, entry in table.items():
        nodes = tuple(sorted({node for node in _nodes(entry) if node in order}, key=order.__getitem__))
        inside = set(nodes)
        entering = {source for node in nodes for source in lines[node].inputs if source not in inside}
        leaving = [n for n in nodes if n not in given and not {user.name for user in graph_nodes[n].users} <= inside]
        given.update(leaving)
        layers.append(
            Layer(
                name=name,
                operation=name.partition(":")[0],
                nodes=nodes,
                inputs=tuple(sorted(entering, key=order.__getitem__)),
                outputs=tuple(NetworkTensor(node, lines[node].dtype, lines[node].shape) for node in leaving),
            )
        )
    in_layers = {node for layer in layers for node in layer.nodes}
    others = [node for node in program.graph.nodes if node.op == "call_function" and node.name not in in_layers]
    rest = [node.name for node in others if lines[node.name].dtype not in ("NoneType", "int")]
    note = _NOTE + (f" Nodes that Inductor attributes to no kernel: {', '.join(rest)}." if rest else "")
    inputs = tuple(NetworkTensor(port.node, port.dtype, lines[port.node].shape) for port in program.inputs)
    results = tuple(dict.fromkeys(program.output_nodes.values()))
    return Network(tuple(layers), inputs, results, note, sources)


def kernel_nodes(package: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return (name of a kernel's span, nodes of the program that it computes) in the order of execution.

    A package has such spans where it was built with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1.
    """
    table, _ = _read(package)
    return [(name.partition(":")[0], _nodes(entry)) for name, entry in (table or {}).items()]


def _nodes(entry: Mapping[str, list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(node_of, entry["pre_grad_nodes"])))


def _read(package: Path) -> tuple[Mapping[str, Mapping[str, list[str]]] | None, dict[str, str]]:
    """Return Inductor's table of kernels, None where it wrote none, and the generated code by file name."""
    sources: dict[str, str] = {}
    table: Mapping[str, Mapping[str, list[str]]] | None = None
    with open_regular(package, inside=package.parent) as opened, zipfile.ZipFile(opened) as archive:
        for info in archive.infolist():
            if info.filename.endswith((_TABLE, ".cpp")) and info.file_size > _MAX_TEXT_BYTES:
                raise CorruptError("a file of a package is too large", got=f"{info.filename}: {info.file_size:,}")
            if info.filename.endswith(_TABLE):
                table = parsed(archive.read(info), dict[str, dict[str, list[str]]], info.filename, what=_TABLE)
            for kind in ("wrapper", "kernel"):
                if info.filename.endswith(f".{kind}.cpp"):
                    sources[f"inductor_{kind}.cpp"] = _OF_THIS_MACHINE.sub("", archive.read(info).decode())
    return table, sources


FREEZE_LIMIT_BYTES = 2 << 30

_PACKAGE = "model.pt2"
_ONE_TOKEN = "one_token.pt2"  # noqa: S105 (a file)
_MAX_REASON = 300
# Two headers that are compiled beforehand cost the first build of a machine twelve seconds of processor time, and no
# build takes less with them than without: of a package, what takes time is the code that comes behind the headers.
_WITHOUT_HEADERS = {"aot_inductor.precompile_headers": False}


class InductorBackend:
    """Compiles with AOTInductor; needs a C++ compiler to build, none to run."""

    name = "inductor"
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        kv="mutated",
        portable=False,
        devices=("cpu", "cuda"),
        compiles_slowly=True,
        collectives=True,
        batch_invariant=True,
    )

    def available(self) -> Availability:
        """Needs a C++ compiler for building."""
        if environment.cxx_compiler() is None:
            return Availability(False, "no C++ compiler on PATH", "apt install g++, or set CXX")
        return Availability(True)

    def keeps_weights(self, program: Program) -> bool:
        """Small models are frozen, their weights packed into the library."""
        return sum(t.nbytes for t in program.weights().values()) <= FREEZE_LIMIT_BYTES

    def prepare(self) -> None:
        """Import the compiler, and let it find the vector instructions, which takes trials."""
        use_private_directory()
        import_module("torch._inductor.compile_fx")
        pick_vec_isa()

    def build(self, program: Program, directory: Path) -> None:
        """Compile; no_grad, or freezing would be ignored."""
        use_private_directory()
        enlarge_caches()
        options = self._choices(program)

        def compile_package(exported: Any, name: str) -> None:
            with torch.no_grad(), _quiet(), torch._inductor.config.patch(_WITHOUT_HEADERS), flags_in_effect():
                torch._inductor.aoti_compile_and_package(
                    exported, package_path=str(directory / name), inductor_configs=options
                )

        exported, is_on_cpu = exported_on(program, device_of(program)), device_of(program) == "cpu"
        exported = with_grouped_queries(exported) if is_on_cpu else exported
        is_outside = is_on_cpu and not self.keeps_weights(program)
        if program.metadata.get(BATCH_INVARIANT):
            exported = with_plain_attention(exported)
        elif is_outside:
            exported = with_products_by_rows(exported)
        compile_package(exported, _PACKAGE)
        # A profile takes the spans of kernels for those of one package.
        has_spans = self.options(program)["cpp.enable_kernel_profile"]
        shapes = one_token_shapes(program) if is_outside and not has_spans else {}
        if shapes:
            try:
                compile_package(with_grouped_queries(of_one_token(program)), _ONE_TOKEN)
            except Exception as error:  # of the exporter or the compiler; the other executable takes every step
                shapes = {}
                (directory / _ONE_TOKEN).unlink(missing_ok=True)
                what = "steps of one token have no executable of their own, and are slower: %s"
                logger.warning(what, described(error)[:_MAX_REASON])
        write_io(program, directory, one_token=shapes)

    def load(self, directory: Path, weights: Weights | None) -> Run:
        """Load the package; inputs and outputs go through the flat C++ call, no pytree work per step.

        Raises:
            BackendError: It was compiled for a device that is not here.
        """
        use_private_directory()
        order = read_io(directory)
        require_device(order.device, "an engine that inductor built for --device cuda")
        constants: dict[str, torch.Tensor] = {}
        if weights is not None:
            product_by_rows()

        def loaded(name: str) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
            with _quiet():
                package = torch._inductor.aoti_load_package(str(directory / name), run_single_threaded=False)
            if weights is not None:
                own = package.get_constant_fqns()
                constants.update({n: weights[n].to(order.device) for n in own if n not in constants})
                package.load_constants({n: constants[n] for n in own}, check_full_update=True, user_managed=True)
            run_flat: Callable[[list[torch.Tensor]], list[torch.Tensor]] = package.loader.run
            return run_flat

        call = loaded(_PACKAGE)
        short_way = loaded(_ONE_TOKEN) if order.one_token else None
        sizes = [(name, dim, size) for name, fixed in order.one_token.items() for dim, size in fixed.items()]

        def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            # The compiled code assumes the strides of contiguous tensors and does not check them.
            given = [inputs[name].contiguous() for name in order.inputs]
            if short_way is not None and all(inputs[name].shape[dim] == size for name, dim, size in sizes):
                results = short_way(given)
            else:
                results = call(given)
            for name, tensor in zip(order.inputs, given, strict=True):
                if name in order.caches and tensor is not inputs[name]:
                    inputs[name].copy_(tensor)
            return dict(zip(order.outputs, results, strict=True))

        # The library reads these where they are.
        run.constants = constants  # type: ignore[attr-defined]
        return running_on(run, order.device, order.caches)

    def compile_graph(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> GraphFunction:
        """Compile in memory, with the sizes that the trace in progress has as symbols."""
        use_private_directory()
        # Inductor changes what it compiles. Its own copy would copy constants, too, which a trace in progress forbids.
        own = torch.fx.GraphModule(module, copied_graph(module.graph))
        with torch.no_grad(), _quiet(), flags_in_effect():
            artifact = torch._inductor.standalone_compile(
                own, list(example_inputs), dynamic_shapes="from_tracing_context", **donated()
            )
        return taking_list(artifact)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Return those of Inductor: some change strides, as of a concatenation in which only one part is not empty."""
        from torch._inductor.decomposition import select_decomp_table

        table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
        return table

    def graph_cache(self) -> CompilerCache:
        """Return the caches of Inductor itself."""
        # Importing it starts Inductor, which engines that are only run do without.
        from glassengine.backends.inductor.settings import InductorCache

        return InductorCache()

    def options(self, program: Program) -> dict[str, Any]:
        """Return every setting of Inductor that is a plain value, those of this back-end put in."""
        settings = {**torch._inductor.config.get_config_copy(), **self._choices(program)}
        # Paths are of this machine, and change nothing of what is computed.
        return {
            name: value
            for name, value in sorted(settings.items())
            if isinstance(value, (bool, int, float, str, type(None))) and not str(value).startswith("/")
        }

    def network(self, program: Program, directory: Path) -> Network:
        """Return the kernels and library calls in the order of the generated code."""
        found = list_kernels(program, directory / _PACKAGE)
        if not read_io(directory).one_token:
            return found
        note = f"{found.note} Steps of one token of one sequence run an executable of their own, {_ONE_TOKEN}."
        return dataclasses.replace(found, note=note)

    def kernels(self, directory: Path) -> list[tuple[str, tuple[str, ...]]]:
        """Return the kernels in the order of execution, and what each computes."""
        return kernel_nodes(directory / _PACKAGE)

    def _choices(self, program: Program) -> dict[str, Any]:
        # Freezing packs weights for the matrix products of a CPU.
        frozen = self.keeps_weights(program) and device_of(program) == "cpu"
        # Which nodes a kernel came from is written beside the code, and changes nothing of it but comments.
        choices: dict[str, Any] = {"freezing": frozen, "trace.provenance_tracking_level": 1}
        if not self.keeps_weights(program):
            choices["aot_inductor.package_constants_in_so"] = False
        return choices | read_flags().settings


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

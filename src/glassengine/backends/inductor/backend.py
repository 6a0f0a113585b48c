"""Back-end "inductor": AOTInductor, frozen.

Freezing packs the weights of linear layers and is what makes decoding at batch 1 fast on a CPU; it takes effect only
under `torch.no_grad()`, elsewhere it is silently ignored. Frozen weights live inside the built library. Above
`FREEZE_LIMIT_BYTES` the weights stay outside and are shared with the engine's weights file instead; steps of one token,
which read all of them once, are compiled by themselves there (`one_row`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.accelerators import require_device
from glassengine.backends.inductor.grouped_queries import with_grouped_queries, with_plain_attention
from glassengine.backends.inductor.kernels import kernel_nodes, list_kernels
from glassengine.backends.inductor.one_row import of_one_token, one_token_shapes
from glassengine.backends.inductor.settings import flags_in_effect, read_flags, use_private_directory
from glassengine.backends.protocol.backend import (
    BATCH_INVARIANT,
    Availability,
    Capabilities,
    GraphFunction,
    Network,
    Run,
    Weights,
    taking_list,
)
from glassengine.backends.protocol.io import device_of, exported_on, read_io, running_on, write_io
from glassengine.executable.cache.cache import CompilerCache
from glassengine.program.representation.program import Program, copied_graph
from glassengine.program.user_code.calls import described
from glassengine.torch_versions import donated, enlarge_caches

FREEZE_LIMIT_BYTES = 2 << 30

_PACKAGE = "model.pt2"
_ONE_TOKEN = "one_token.pt2"  # noqa: S105 (a file)
_MAX_REASON = 300
# Two headers that are compiled beforehand cost the first build of a machine twelve seconds of processor time, and no
# build takes less with them than without: of a package, what takes time is the code that comes behind the headers.
_WITHOUT_HEADERS = {"aot_inductor.precompile_headers": False}

logger = logging.getLogger("glassengine")


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
        compile_package(with_plain_attention(exported) if program.metadata.get(BATCH_INVARIANT) else exported, _PACKAGE)
        is_outside = is_on_cpu and not self.keeps_weights(program)
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
        from glassengine.backends.inductor.cache import InductorCache

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

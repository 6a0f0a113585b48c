"""Build an engine: load, export once, resolve outputs, compile, write aside, rename, load.

Nothing is compiled before every name and size in the request has been checked, and nothing is left behind when a build
does not end well.

Compiles a program in another process, while this one compiles the same program with debug outputs.

A compiler that takes longer than a process to start uses one processor: two of them take half the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import nn

from glassengine import environment
from glassengine.backends.protocol.backend import Preparing, TakingModels
from glassengine.backends.registry import backends_that, choose_backend, choose_device, find_backend
from glassengine.engine import files
from glassengine.engine.build.artifacts import ArtifactWriter
from glassengine.engine.build.plan import BuildPlan, BuildSettings, plan_build
from glassengine.engine.build.requests import (
    DEFAULT_MAX_SEQ_LEN,
    check_dtype,
    check_sizes,
    check_written,
    require_agreement,
)
from glassengine.engine.build.write import (
    NO_PARTS,
    BuiltParts,
    check_mesh,
    for_compiler,
    mesh_for,
    write_engine,
    write_ranks,
)
from glassengine.engine.recorded_model import directory_to_record
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import load
from glassengine.errors import UsageError, logger
from glassengine.program import LoadedModel, Program, export_programs, load_inputs, load_model, made_up_inputs
from glassengine.program.generation import PLAIN
from glassengine.program.inputs.user_inputs import in_order
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.kinds.image_text import WITHOUT_IMAGES
from glassengine.program.onnx.file import is_onnx
from glassengine.program.parallel.placements import Mesh
from glassengine.program.representation.signature import named_inputs
from glassengine.program.representation.stored import load_program, save_program
from glassengine.progress import Progress, Work, silent
from glassengine.sites import patterns_of
from glassengine.stores.places import RemotePath, place
from glassengine.workers import Died
from glassengine.workers.processes import Processes
from glassengine.writing import remove_tree

Model = str | Path | nn.Module
Inputs = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


class BuildOptions(TypedDict, total=False):
    """What `build` takes whether it builds or plans."""

    backend: str | None
    device: str | None
    quantize: str | None
    dtype: str
    add_output: Sequence[str]
    inputs: Inputs | None
    passes: Sequence[str]
    max_batch_size: int
    max_seq_len: int | None
    overwrite: bool
    attn_implementation: str | None
    trust_remote_code: bool
    revision: str | None
    adapter: str | Path | None
    byte_budget: int | None
    artifacts: str | Path | None
    tensor_parallel: int
    pipeline_parallel: int
    batch_invariant: bool
    progress: Progress


@overload
def build(
    model: Model, output_dir: str | Path | None = ..., *, dry_run: Literal[True], **options: Unpack[BuildOptions]
) -> BuildPlan: ...
@overload
def build(
    model: Model, output_dir: str | Path | None = ..., *, dry_run: Literal[False] = ..., **options: Unpack[BuildOptions]
) -> Engine: ...
def build(
    model: str | Path | nn.Module,
    output_dir: str | Path | None = None,
    *,
    dry_run: bool = False,
    backend: str | None = None,
    device: str | None = None,
    quantize: str | None = None,
    dtype: str = "auto",
    add_output: Sequence[str] = (),
    inputs: Inputs | None = None,
    passes: Sequence[str] = (),
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    overwrite: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    adapter: str | Path | None = None,
    byte_budget: int | None = None,
    artifacts: str | Path | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    batch_invariant: bool = False,
    progress: Progress = silent,
) -> Engine | BuildPlan:
    """Build an engine and load it.

    Args:
        model: Hugging Face directory or id, `file.py:factory`, `package.module:factory`, an ONNX file, a .pt2 program,
            or a module object.
        output_dir: Directory to make; by default `engines/<model name>`, and a temporary directory that lives as long
            as the result for a module object.
        dry_run: Return what would be built, and its bytes, instead of building.
        backend: Name of a back-end; None takes the default, or says which other one it had to take.
        device: "cpu" or "cuda", what the engine is to run on; None takes what the back-end is for.
        quantize: Type to round the matrices to ("Q8_0", "Q4_K"), where the back-end has such: "gguf".
        dtype: "auto" (that of the checkpoint), "float32", "bfloat16", "float16" or "float64".
        add_output: Debug outputs, each `SITE|NODE|GLOB[=ALIAS][:DTYPE]` or `@FILE` with a JSON object of names and
            aliases; those of TRTLLM_ADD_OUTPUT are added. An output keeps its own dtype, or is cast to DTYPE when it is
            read. Every tap of a plain module is an output without being asked for.
        inputs: Keyword arguments to export a plain module with (a dict, one dict per step, or what `--inputs` takes). A
            causal language model needs none; with inputs it is built as a plain module.
        passes: User passes `file.py:function`, in order.
        max_batch_size: Largest batch of a session.
        max_seq_len: Most tokens of a sequence, prompt and generated; None takes what the model's configuration states.
        overwrite: Replace an existing engine.
        attn_implementation: As in transformers.
        trust_remote_code: Allow code that comes with a checkpoint to run.
        revision: Of a hub id.
        adapter: Directory of a LoRA adapter, as peft saves it, to merge.
        byte_budget: Most bytes of debug outputs in one decode step at the largest batch and length; the largest
            outputs are left out first and listed in the manifest with the reason.
        artifacts: Directory to write what the build goes through to, stage by stage; by default what
            DEBUG_ARTIFACTS_DIR names, and nothing without it. Those of an encoder or a vision program lie in
            its folder `encoder`. A dry run writes none.
        tensor_parallel: Ranks that share each layer; each holds its part of the weights.
        pipeline_parallel: Stages, each with layers of its own; as many ranks each as share a layer.
        batch_invariant: Use only kernels whose rows do not depend on the rest of the batch;
            `glassengine.commands.prove_batch_invariant` proves it.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The request cannot be carried out; nothing was written.
        BackendError: The back-end is missing or failed; nothing was left behind.
    """
    add_output, passes = patterns_of(add_output, "add_output"), patterns_of(passes, "passes")
    mesh = mesh_for(tensor_parallel, pipeline_parallel)
    chosen, note = choose_backend(backend, for_onnx=is_onnx(model))
    if batch_invariant and not chosen.capabilities.batch_invariant:
        able = backends_that(lambda one: one.capabilities.batch_invariant)
        raise UsageError(
            f"rows of back-end {chosen.name!r} depend on their number: its libraries have other kernels for few rows",
            got="--batch-invariant",
            expected=[f"--backend {name}" for name in able],
            hint="glass check ENGINE --invariant batch says how much they differ",
        )
    device = choose_device(chosen, device)
    is_object = isinstance(model, nn.Module)
    target = place(output_dir) if output_dir is not None else None if is_object else default_directory(str(model))
    named = artifacts if artifacts is not None else environment.debug_artifacts_dir()
    where = None if named is None else place(named)
    if target is not None and not dry_run:
        files.check_target(target, overwrite=overwrite)
    progress(Work.LOADING.says("loading the model"))
    loaded = load_model(
        model,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        revision=revision,
        weights=not dry_run,
        adapter=adapter,
    )
    if loaded.stored is not None and inputs is not None:
        raise UsageError(
            f"{loaded.spec} is a program already, whose sizes are what they are",
            got="--inputs",
            hint="leave them out; glass run ENGINE --inputs FILE runs it on them",
        )
    steps = load_inputs(inputs, loaded.input_names) if isinstance(inputs, str) else inputs
    if steps is not None:
        steps = in_order(steps, loaded.input_names)
        loaded = loaded.judged_as(PLAIN)
    elif not loaded.generation.generates and loaded.stored is None:
        steps = made_up_inputs(loaded)
        if not is_pretrained(loaded.module):
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in named_inputs(steps[0]).items())
            logger.warning("the inputs are made up: %s; your own: --inputs FILE|FACTORY (inputs=...)", shapes)
    check_dtype(chosen, loaded.dtype)
    limit = check_sizes(loaded, max_batch_size, max_seq_len)
    unlike = {"--add-output": add_output, "--inputs": inputs, "--artifacts": artifacts}
    check_written(chosen, loaded, quantize, limit, {**unlike, "--pass": passes, "--tensor-parallel": mesh})
    if mesh is not None:
        others = [(flag, value) for flag, value in unlike.items() if flag != "--add-output"]
        check_mesh(mesh, loaded, chosen, [*others, ("--dry-run", dry_run)])
    # Reading an engine must not run code: only plain checkpoints are ever loaded again.
    checkpoint = directory_to_record(loaded.directory, revision)
    settings = BuildSettings(
        backend=chosen.name,
        device=device,
        add_output=add_output,
        implicit_outputs=not isinstance(chosen, TakingModels),
        max_batch_size=max_batch_size,
        max_seq_len=limit,
        overwrite=overwrite,
        byte_budget=byte_budget,
        passes=passes,
        model={"spec": loaded.spec, "directory": checkpoint, "revision": revision, **loaded.metadata},
        reloadable=checkpoint is not None and not trust_remote_code and not passes,
        notes=(note,) if note else (),
        quantize=quantize,
        batch_invariant=batch_invariant,
        all_logits=isinstance(chosen, TakingModels),
    )
    if note:
        logger.warning("%s", note)
    if where is not None and target is not None and where.absolute().is_relative_to(target.absolute()):
        raise UsageError(
            "artifacts cannot be inside of the engine", got=str(where), hint="another directory: --artifacts DIR"
        )
    writer = encoder_writer = None
    with contextlib.ExitStack() as writing:
        if where is not None and not dry_run:
            about = {
                "model": loaded.spec,
                "fingerprint": loaded.metadata.get("fingerprint"),
                "kind": loaded.kind,
                "dtype": loaded.dtype,
                "backend": chosen.name,
                "passes": list(passes),
            }
            writer = ArtifactWriter(where, about)
            writing.enter_context(writer)
            if loaded.generation.has_encoder:
                encoder_writer = ArtifactWriter(where / files.ENCODER, {**about, "kind": "module", "passes": []})
                writing.enter_context(encoder_writer)
        progress(Work.EXPORTING.says(f"exporting {loaded.spec}"))
        *encoders, program = export_programs(
            loaded,
            inputs=steps,
            passes=passes,
            on_stage=writer.stage if writer else None,
            on_encoder_stage=encoder_writer.stage if encoder_writer else None,
        )
        encoder = encoders[0] if encoders else None
        if program.generates and (reason := loaded.metadata.get(WITHOUT_IMAGES)):
            note = f"the engine generates from text alone: {reason}"
            logger.warning("%s", note)
            model_facts = {**settings.model, WITHOUT_IMAGES: reason}
            settings = dataclasses.replace(settings, model=model_facts, notes=(*settings.notes, note))
        if dry_run:
            return plan_build(program, target or Path(tempfile.gettempdir()), settings, encoder=encoder)
        if program.generates and encoder is None and loaded.stored is None and not passes:
            require_agreement(loaded, program, settings.max_seq_len)
        made = functools.partial(
            _build,
            program,
            settings=settings,
            model=loaded,
            artifacts=writer,
            encoder=encoder,
            encoder_artifacts=encoder_writer,
            progress=progress,
            mesh=mesh,
        )
        return made(target) if target is not None else _in_temporary(made, type(loaded.module).__name__)


def _in_temporary(made: Callable[[Path], Engine], name: str) -> Engine:
    """Build into a directory that goes when the engine does."""
    temporary = Path(tempfile.mkdtemp(prefix="glassengine-"))
    try:
        engine = made(temporary / name)
    except BaseException:
        remove_tree(temporary)
        raise
    weakref.finalize(engine, remove_tree, temporary)
    return engine


def build_program(
    program: Program,
    directory: str | Path,
    *,
    backend: str | None = None,
    outputs: Sequence[str] = (),
    model: LoadedModel | None = None,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    overwrite: bool = False,
    byte_budget: int | None = None,
    mesh: Mesh | None = None,
    made: BuiltParts = NO_PARTS,
) -> Engine:
    """Build an engine from a program that is already exported, and load it.

    Args:
        program: With weights.
        directory: Directory to make.
        backend: As in `build`.
        outputs: Debug outputs: node names, sites or patterns, each with an optional `=ALIAS`; these and no others.
        model: Where the program came from, for tokenizer and configuration.
        max_batch_size: As in `build`.
        max_seq_len: As in `build`.
        overwrite: Replace an existing engine.
        byte_budget: As in `build`.
        mesh: Ranks that share it; None for one process.
        made: What of it exists already.

    Raises:
        UsageError: As `build`.
        BackendError: As `build`.
    """
    settings = settings_of(
        program,
        backend,
        add_output=outputs,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        overwrite=overwrite,
        byte_budget=byte_budget,
    )
    engine = _build(program, Path(directory), settings, model, mesh=mesh, made=made)
    # Reading it back would take seconds, and the caller holds it anyway.
    engine.program = program
    return engine


def settings_of(
    program: Program, backend: str | None, *, max_seq_len: int | None = None, **asked: Any
) -> BuildSettings:
    """Return the settings of a build from a program."""
    chosen, note = choose_backend(backend, for_onnx=program.onnx is not None)
    check_dtype(chosen, str(program.metadata.get("dtype")))
    return BuildSettings(
        backend=chosen.name,
        device=choose_device(chosen, None),
        max_seq_len=max_seq_len or program.metadata.get("max_position_embeddings") or DEFAULT_MAX_SEQ_LEN,
        model={"spec": str(program.metadata.get("model")), **program.metadata},
        notes=(note,) if note else (),
        **asked,
    )


def default_directory(spec: str) -> Path:
    """Return `engines/<model name>` for a model that was named, not given as an object."""
    path = Path(spec)
    name = path.resolve().name if path.exists() else re.sub(r"[^\w./-]", "-", spec.replace(".py:", "-")).strip("/.")
    return Path("engines") / name


def _build(
    program: Program,
    target: Path,
    settings: BuildSettings,
    model: LoadedModel | None,
    artifacts: ArtifactWriter | None = None,
    *,
    encoder: Program | None = None,
    encoder_artifacts: ArtifactWriter | None = None,
    progress: Progress = silent,
    mesh: Mesh | None = None,
    made: BuiltParts = NO_PARTS,
) -> Engine:
    with files.written_aside(target, overwrite=settings.overwrite) as aside:
        if encoder is not None:
            alone = dataclasses.replace(settings, add_output=(), implicit_outputs=False, passes=(), reloadable=False)
            (aside / files.ENCODER).mkdir()
            name = f"{target.name}/{files.ENCODER}"
            write_engine(encoder, aside / files.ENCODER, name, alone, None, encoder_artifacts, progress=progress)
        if mesh is None:
            has_encoder = encoder is not None
            more: dict[str, Any] = {"has_encoder": has_encoder, "made": made, "progress": progress}
            write_engine(program, aside, target.name, settings, model, artifacts, **more)
        else:
            write_ranks(program, aside, target.name, settings, model, mesh, progress=progress)
        number = aside.stat().st_ino
    if isinstance(target, RemotePath):
        return load(target, trust=True)
    return files.load_unless_replaced(target, number, lambda: load(target, trust=True))


_MOST_BYTES = 1 << 28
"""Of weights: another process has copies of its own, several while it compiles."""


class CompilerBeside:
    """Another process that compiles for a back-end, started before there is a program, and again where it has ended."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._process: tuple[Processes, ThreadPoolExecutor] | None = None
        self.compile(None)

    def compile(self, folder: str | None) -> Future[Died | None]:
        """Begin to compile the program that is stored in a folder; None only prepares for it."""
        request = (folder, self.backend, torch.get_num_threads(), torch.get_float32_matmul_precision())
        if self._process is None:
            self._process = Processes(compile_stored, 1), ThreadPoolExecutor(1, thread_name_prefix="compiler-beside")
        workers, thread = self._process
        return thread.submit(lambda: next(workers.run([request], attempts=1)))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            workers, thread = self._process
            workers.close()
            thread.shutdown()
            self._process = None


def compiler_beside(backend: str | None, model: Model) -> CompilerBeside | None:
    """Start a process that compiles.

    None where it would gain nothing, or where this process is not a command alone: what else it has changed in the
    compiler is not known.

    Raises:
        BackendError: As `build`.
    """
    chosen, _ = choose_backend(backend, for_onnx=is_onnx(model))
    is_worth = chosen.capabilities.compiles_slowly and environment.num_cpus() > 1 and environment.owns_process()
    return CompilerBeside(chosen.name) if is_worth else None


@contextmanager
def compiled_beside(
    program: Program, compiler: CompilerBeside | None, **sizes: Any
) -> Iterator[Callable[[Path], None] | None]:
    """Begin to compile a program without debug outputs; yield what puts the executable into an empty directory.

    None where no other process can compile it.

    Raises:
        BackendError: As `build`.
    """
    if compiler is not None and sum(weight.nbytes for weight in program.weights().values()) > _MOST_BYTES:
        compiler.close()
        compiler = None
    if compiler is None:
        yield None
        return
    built = for_compiler(program, settings_of(program, compiler.backend, **sizes))
    with tempfile.TemporaryDirectory(prefix="glassengine-beside-") as folder, closing(compiler):
        directory = Path(folder)
        save_program(built, directory)
        tensors = {**program.exported.state_dict, **program.exported.constants}
        weights = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        files.save_weights(weights, directory / files.WEIGHTS)
        begun = compiler.compile(folder)

        def put(path: Path) -> None:
            if isinstance(begun.result(), Died):  # of too little memory, say
                find_backend(compiler.backend).build(built, path)
                return
            path.rmdir()
            (directory / files.MAIN).rename(path)

        yield put


def compile_stored(request: tuple[str | None, str, int, str]) -> None:
    """Compile a program that `compiled_beside` has stored; in the other process."""
    folder, name, num_threads, precision = request
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(precision)
    backend = find_backend(name)
    if folder is None:
        if isinstance(backend, Preparing):
            backend.prepare()
        return
    directory = Path(folder)
    program = load_program(directory, files.load_weights(directory / files.WEIGHTS))
    (directory / files.MAIN).mkdir()
    backend.build(program, directory / files.MAIN)

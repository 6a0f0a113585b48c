"""An engine, loaded: the public object that runs."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glassengine import asked, spans
from glassengine.backends.protocol.backend import NamingKernels
from glassengine.backends.registry import find_backend
from glassengine.engine import files
from glassengine.engine.files import check_files
from glassengine.engine.manifest import (
    Manifest,
    read_manifest,
    require_fit,
    require_intact,
    require_trust,
    without_caches,
)
from glassengine.engine.prompts import Chat, Images, Request, TokenIds
from glassengine.engine.run.forward import forward
from glassengine.engine.run.generate import StepCallback, generate
from glassengine.engine.session.images import encode_images
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.record import SessionRecorder
from glassengine.engine.session.session import Session
from glassengine.engine.tokenizing import TextCallback
from glassengine.errors import UsageError
from glassengine.executable.graph import captured_program
from glassengine.executable.run.executable import load_executable
from glassengine.program.kinds.encoder_decoder import SOURCE_MASK
from glassengine.program.kinds.image_text import FEATURES
from glassengine.program.representation.kept_logits import with_kept_logits
from glassengine.program.representation.stored import load_names
from glassengine.reading.copies import here
from glassengine.results import notebook
from glassengine.results.engines import Forward, Generation
from glassengine.sites import SiteTable


class Engine(LoadedEngine):
    """A loaded engine.

    Attributes:
        directory: Where it is.
        manifest: What `engine.json` says.
        executable: Its compiled graph.
        sites: Names of every tensor of its program.
        model: What the user named to take weights from that are not in the engine; None takes the checkpoint that the
            manifest names.
    """

    def _repr_html_(self) -> str:
        """Return what a notebook shows: where it is, what built it from what, and its first tensors."""
        own = self.manifest
        facts = {"directory": self.directory, "back-end": own.backend, "dtype": own.dtype}
        facts |= {"model": own.model.get("spec"), "tensors": f"{len(self.sites):,}"}
        first = list(self.sites)[: notebook.MAX_ROWS]
        rows = [{"site": site.name, "op": site.op, "dtype": site.dtype, "shape": list(site.shape)} for site in first]
        return notebook.card(f"Engine {own.name}", facts, rows, more=len(self.sites) - len(rows))

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each named tensor of its program.

        Raises:
            UsageError: pandas is not installed (extra `notebook`).
        """
        names = ("name", "kind", "op", "dtype", "shape", "source")
        columns = {name: [getattr(site, name) for site in self.sites] for name in names}
        return notebook.needed("pandas").DataFrame(columns)

    @functools.cached_property
    def encoder(self) -> Engine | None:
        """The engine of what runs before the first step, an encoder or the vision program; None without one."""
        if not self.manifest.has_encoder:
            return None
        return open_engine(read_engine(self.directory / files.ENCODER), trust=self._trusted)

    def encode(self, **inputs: Any) -> dict[str, torch.Tensor]:
        """Run what comes before the first step; what it returns is what `session` takes as `constants`.

        Args:
            **inputs: Of the encoder: `input_ids` and `attention_mask`, or `input_features`, and the like. Of a model
                of images and text: `pixel_values` of all images [N, C, H, W], in the order of their tokens.

        Raises:
            UsageError: The engine has no encoder, or an input does not fit.
        """
        if self.encoder is None:
            raise UsageError(f"the engine {self.manifest.name!r} has no encoder", hint="engine.generate(PROMPT)")
        if self.takes_images:
            return {FEATURES: encode_images(self.encoder, **inputs)}
        # The decoder was traced with tensors that lie in one piece, and reads them in every step.
        constants = {name: tensor.contiguous() for name, tensor in self.encoder(**inputs).items()}
        if SOURCE_MASK in self.constant_inputs:
            constants[SOURCE_MASK] = inputs["attention_mask"]
        return constants

    def session(
        self,
        batch_size: int,
        length: int,
        *,
        debug: bool | Sequence[str] = False,
        keep_steps: int = 0,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> Session:
        """Return a session for `batch_size` sequences of at most `length` tokens; see `Session`."""
        return Session(self, batch_size, length, debug=debug, keep_steps=keep_steps, constants=constants)

    def recorder(
        self, path: str | Path, session: Session, rows: Sequence[Sequence[int]], *, overwrite: bool
    ) -> contextlib.AbstractContextManager[StepCallback]:
        """Return what records each step of `session`, whose prompts are `rows`, once it has run.

        Raises:
            UsageError: The recording cannot be written, or exists.
        """
        return SessionRecorder(path, session, rows, overwrite=overwrite)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: TokenIds | None = None,
        prompt_file: str | Path | None = None,
        chat: Chat | None = None,
        images: Images | None = None,
        inputs: str | Mapping[str, Any] | None = None,
        tokenizer: str | Path | None = None,
        max_new_tokens: int | None = None,
        generation_config: Any = None,
        seed: int | None = None,
        prefill_chunk: int | None = None,
        debug: bool | Sequence[str] = False,
        keep_steps: int = 0,
        on_step: StepCallback | None = None,
        on_text: TextCallback | None = None,
        record: str | Path | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> Generation:
        """Generate as `transformers.generate` does with the same settings.

        Args:
            prompts: One text or several.
            input_ids: Token ids instead: a file (.json, .npz, .pt, .safetensors), a tensor, or one list per sequence,
                which may differ in length.
            prompt_file: A file of texts instead: .txt with one a line, or .json or .jsonl of strings or of objects with
                "prompt" or "text".
            chat: Messages instead, each {"role", "content"}: a list, several lists, or a .json or .jsonl file of them;
                they go through the tokenizer's chat template.
            images: Images of the prompts, in the order in which their placeholders stand in them: a file or several,
                or images of Pillow. They and the prompts go through the model's processor.
            inputs: Tensors for the encoder of an encoder-decoder instead (a dict, or what `--inputs` takes with one
                step), with `decoder_input_ids` where decoding begins with more than the start token. For a model of
                images and text `pixel_values`, beside prompts whose image tokens are written out or with `input_ids`.
            tokenizer: Directory of a tokenizer; None takes the engine's own.
            max_new_tokens: Most tokens to generate; None takes the settings below, else 20.
            generation_config: A `transformers.GenerationConfig`, a dict, or a file, laid over generation_config.json of
                the engine, which decides by itself when None (whether to sample, too).
            seed: Of sampling, the same tokens as `torch.manual_seed(seed)` gives transformers; None draws one, which
                the result states. Other random numbers of the process are left alone.
            prefill_chunk: Most tokens of a piece of the prefill; None takes as many as keep the logits of a piece
                within 512 MiB. Either way the prefill is one step to everything that looks at it.
            debug: As in `Session`.
            keep_steps: As in `Session`.
            on_step: Called after each step with the session.
            on_text: Called with each new piece of text; for a single sequence.
            record: Directory in which to record every added output and the logits of every step.
            overwrite: Replace an existing recording.
            **settings: Fields of `transformers.GenerationConfig`, laid over all others: do_sample, temperature, top_k,
                top_p, repetition_penalty, eos_token_id, stop_strings, num_return_sequences, ...

        Raises:
            UsageError: Prompt, tokenizer or settings do not fit the engine, or the recording cannot be written.
            UnknownNameError: No setting has this name.
        """
        request = Request(
            prompts=prompts,
            input_ids=input_ids,
            prompt_file=prompt_file,
            chat=chat,
            images=images,
            inputs=inputs,
            tokenizer=tokenizer,
        )
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        return generate(
            self,
            request,
            encoder=None if self.takes_images else self.encoder,
            encode=self.encode,
            recorder=self.recorder,
            generation_config=generation_config,
            settings=settings,
            seed=seed,
            prefill_chunk=prefill_chunk,
            debug=debug,
            keep_steps=keep_steps,
            on_step=on_step,
            on_text=on_text,
            record=record,
            overwrite=overwrite,
        )

    def forward(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: TokenIds | None = None,
        prompt_file: str | Path | None = None,
        inputs: str | Mapping[str, Any] | None = None,
        tokenizer: str | Path | None = None,
        debug: Sequence[str] = (),
        record: str | Path | None = None,
        overwrite: bool = False,
    ) -> Forward:
        """Run an engine of kind "module" once, from texts or tensors.

        Args:
            prompts: One text or several; they are one batch, padded on the right.
            input_ids: Token ids instead, as for `generate`.
            prompt_file: A file of texts instead, as for `generate`.
            inputs: Keyword arguments instead: a dict, or what `--inputs` takes with one step.
            tokenizer: Directory of a tokenizer; None takes the engine's own.
            debug: Names or patterns of inputs and outputs to return; none returns every result and added output.
            record: Directory in which to record every result and added output.
            overwrite: Replace an existing recording.

        Raises:
            UsageError: What was given does not fit the engine, or the recording cannot be written.
            UnknownNameError: A pattern of `debug` names nothing.
        """
        request = None
        if prompts is not None or input_ids is not None or prompt_file is not None:
            if inputs is not None:
                raise UsageError("text and tensors were both given", hint="--input-text TEXT, or --inputs FILE")
            request = Request(prompts=prompts, input_ids=input_ids, prompt_file=prompt_file, tokenizer=tokenizer)
        return forward(self, request, inputs, debug=debug, record=record, overwrite=overwrite)


class StoredEngine(NamedTuple):
    """An engine on disk, found as it was written."""

    directory: Path
    manifest: Manifest
    names: dict[str, Any]
    ours: bool


def read_engine(directory: str | Path, *, verify: bool = False) -> StoredEngine:
    """Read what an engine says of itself, and check that it is whole and fits this machine.

    Args:
        directory: What `build` made.
        verify: Hash files of every size, not only small ones.

    Raises:
        UsageError: There is no such directory.
        CorruptError: It is damaged, half written, edited, or of a newer schema.
        BackendError: It was built for another processor or other versions; says which.
    """
    path = here(directory)
    asked.engine(str(path))
    manifest, intact, ours = read_manifest(path)
    files.require_own_folders(path)
    backend = find_backend(manifest.backend)
    require_fit(manifest, portable=backend.capabilities.portable)
    names = load_names(path)
    require_intact(manifest, intact, names)
    is_native = backend.capabilities.native_code
    check_files(manifest, path, verify=verify, always=(f"{files.MAIN}/",) if is_native else ())
    return StoredEngine(path, manifest, names, ours)


def open_engine(found: StoredEngine, *, trust: bool = False, model: str | Path | None = None) -> Engine:
    """Load an engine that one process runs; see `load`."""
    path, manifest, names, ours = found
    backend = find_backend(manifest.backend)
    is_native = backend.capabilities.native_code
    if is_native:
        listed = {path / entry.path for entry in manifest.files}
        require_trust(manifest.name, manifest.backend, path / files.MAIN, listed, ours=ours, trust=trust)
    weights = files.load_weights(path / files.WEIGHTS) if manifest.shares_weights else None
    name = f"{manifest.name}/{files.MAIN}"
    executable = load_executable(name, lambda main: backend.load(main, weights), path / files.MAIN)
    keeps_caches = backend.capabilities.kv == "own"
    engine = Engine(path, without_caches(manifest, "float32") if keeps_caches else manifest, executable, names["sites"])
    engine.model, engine._trusted, engine._mapped = model, trust, weights
    # An executable that held its engine would keep it, and its temporary directory, alive.
    owner = weakref.proxy(engine)
    compiled = with_kept_logits if engine.makes_kept_logits else lambda program: program
    executable.graph = lambda: captured_program(compiled(owner.program))
    executable.backend = manifest.backend
    if isinstance(backend, NamingKernels):
        kernels = backend.kernels
        sites = names["sites"]
        spans.name_kernels(executable.name, lambda: _kernel_sites(kernels, path / files.MAIN, sites))
    return engine


def _kernel_sites(
    kernels: Callable[[Path], Iterable[tuple[str, tuple[str, ...]]]], directory: Path, sites: SiteTable
) -> list[tuple[str, str]]:
    """Return (kernel, site of the last node that it computes), for a profile; none where the engine is gone by then."""
    if not directory.exists():
        return []
    order = {node: number for number, node in enumerate(sites.by_node)}
    named = []
    for kernel, nodes in kernels(directory):
        last = max((node for node in nodes if node in order), key=order.__getitem__, default=None)
        named.append((kernel, kernel if last is None else sites.by_node[last][0].name))
    return named

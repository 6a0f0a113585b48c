"""Runs what is checked in different ways: a module that is called once, one that decodes with a cache, an engine.

What rounding does to an engine comes from its own program, interpreted.
"""

from __future__ import annotations

import contextlib
import copy
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from glassengine.capture.calls import tensors_in
from glassengine.capture.observers import run_program
from glassengine.diagnose.invariance.trace import CallTrace, TracedOp, line_of, tensors_of
from glassengine.diagnose.invariance.ways import SPARE, PartMapping, Way, largest_difference, same_bits, same_under
from glassengine.diagnose.noise_floor import otherwise
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import load
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.session import Session
from glassengine.errors import UsageError, first_line
from glassengine.executable.run.executable import Executable
from glassengine.program import load_inputs, made_up_inputs
from glassengine.program.generation import LoadedModel
from glassengine.program.kinds.causal_lm import accepted, cache_argument
from glassengine.results.without_tensors import BatchProof, FirstOperation, What

Results = list[dict[str, Tensor]]
"""For each call its results by name."""
NUM_ROWS = 2 * SPARE
_LENGTHS = (37, 41, 43, 47, 53, 29, 31, 23, 19, 59)
_MOST_COMPILED = 8
_PRIMES = (11, 13, 7, 19, 5)
_LENGTH = 37
_ENGINE_PRIMES = (7, 5, 3)
_FIXED = "the engine runs as it was built"


class InvarianceSubject(ABC):
    """What is run.

    Attributes:
        name: On screen.
        length: Tokens of a row; 1 of what is called once.
        decodes: Whether it generates, so that logits of tokens are compared.
        one_token: Whether every call after the first has one token.
        prime: A number of rows that no weight has as a size.
        refusals: Change -> why it cannot be made.
        least_rows: Fewest rows of a batch.
        in_torch: Whether settings of torch concern it.
        unseen: What to do where no operation is observed.
    """

    name: str
    length: int = 1
    decodes: bool = False
    one_token: bool = False
    prime: int = _PRIMES[0]
    refusals: Mapping[What, str]
    least_rows: int = 1
    in_torch: bool = True
    unseen: str = "no operation was observed"

    def refusal(self, way: Way) -> str | None:
        """Return why rows cannot be run one way; None where they can."""
        return None

    @abstractmethod
    def run(self, way: Way) -> Results:
        """Run rows one way."""

    @abstractmethod
    def noise(self, way: Way, seed: int) -> Results:
        """Return what rounding alone does to the results, as differences: a sample drawn from `seed`."""

    @abstractmethod
    def traced(self, way: Way, *, modules_only: bool, noise: int | None = None) -> tuple[Results, list[TracedOp]]:
        """Run rows, and record every operation; with `noise` as seed each rounds otherwise."""

    def first_compiled(self, way: Way) -> FirstOperation | None:
        """Return the first innermost module that differs when it is compiled alone; None where none was found."""
        return None


class ModuleSubject(InvarianceSubject):
    """A module that is called once.

    Args:
        model: As it was loaded.
        inputs: Keyword arguments of a call; None makes them up.
    """

    def __init__(self, model: LoadedModel, inputs: Mapping[str, Any] | None) -> None:
        self.name, self.module = model.spec, model.module
        sizes = {size for one in self.module.parameters() for size in one.shape}
        self.prime = next((one for one in _PRIMES if not any(size % one == 0 for size in sizes)), _PRIMES[0])
        self._last: nn.Module | None = None
        self.refusals = {}
        self.fresh()
        self._prepare(model, inputs)

    def _prepare(self, model: LoadedModel, inputs: Mapping[str, Any] | None) -> None:
        given = dict(inputs) if inputs is not None else dict(made_up_inputs(model)[0])
        tensors = {name: one for name, one in given.items() if isinstance(one, Tensor) and one.dim()}
        (size, _), *_ = Counter(one.shape[0] for one in tensors.values()).most_common(1) or [(0, 0)]
        if not size:
            raise UsageError("no input of the model has rows", got=", ".join(given), hint="--inputs FILE")
        self._given = given
        self._pool = {name: more_rows(name, one) for name, one in tensors.items() if one.shape[0] == size}
        for what in ("length", "world"):
            self.refusals = {**self.refusals, what: "only a model that decodes with a cache has it"}
        ids, mask = self._pool.get("input_ids"), self._pool.get("attention_mask")
        if ids is None or mask is None or ids.dim() != 2 or ids.shape != mask.shape:
            why = "the model takes no input_ids with an attention_mask"
            self.refusals = {**self.refusals, "padding": why}
        else:
            # Rows of one length: what is padded is known.
            self._pool["attention_mask"] = torch.ones_like(mask)
            self.length = ids.shape[1]

    def run(self, way: Way) -> Results:
        """Run rows one way."""
        module = self._prepared(way)
        with torch.no_grad(), way.settings():
            return [dict(self._results(one)) for _, one in self._calls(module, way, None)]

    def noise(self, way: Way, seed: int) -> Results:
        """Return what rounding alone does to the results, on the same random numbers."""
        way = replace(way, seeded=True)
        with otherwise(seed):
            noisy = self.run(way)
        return differences(noisy, self.run(way))

    def traced(self, way: Way, *, modules_only: bool, noise: int | None = None) -> tuple[Results, list[TracedOp]]:
        """Run rows, and record every operation."""
        module = self._prepared(way)
        trace = CallTrace(module, modules_only=modules_only)
        found: Results = []
        with torch.no_grad(), way.settings():
            self._earlier(module, way)
            with contextlib.nullcontext() if noise is None else otherwise(noise), trace.listening():
                for _, one in self._calls(module, way, trace):
                    found.append({name: tensor.clone() for name, tensor in self._results(one)})
        return found, trace.ops

    def first_compiled(self, way: Way) -> FirstOperation | None:
        """Return the first innermost module that differs when it is compiled alone."""
        module = self.fresh()
        calls: dict[Any, tuple[str, nn.Module, Any, Any]] = {}

        def after(path: str, inner: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            shapes = [tuple(one.shape) for one in (*tensors_of((args, kwargs)), *inner.parameters())]
            kept = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs, result))
            calls.setdefault((type(inner), tuple(shapes)), (path, inner, kept[:2], kept[2]))

        inner = [(path, one) for path, one in module.named_modules() if not list(one.children())]
        with torch.no_grad(), way.settings(), contextlib.ExitStack() as hooks:
            for path, one in inner:
                hooks.enter_context(one.register_forward_hook(partial(after, path), with_kwargs=True))
            for _ in self._calls(module, way, None):
                pass
        for path, one, (args, kwargs), result in list(calls.values())[:_MOST_COMPILED]:
            torch._dynamo.reset()
            with contextlib.suppress(Exception), torch.no_grad(), way.settings():
                found = torch.compile(one, dynamic=False)(*args, **kwargs)
                for x, y in zip(tensors_of(result), tensors_of(found), strict=True):
                    if not same_bits(x, y):
                        size = largest_difference(x, y)
                        return FirstOperation(type(one).__name__, path, line_of(one), 0, True, size)
        return None

    def _prepared(self, way: Way) -> nn.Module:
        """Return the module of a way: a copy that nothing has run on, or the one that was used last."""
        module = self._last if way.is_next and self._last is not None else self.fresh()
        self._last = module
        if way.attention == "eager" and hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation("eager")  # type: ignore[operator]
        if way.compiler is not None:
            torch._dynamo.reset()
            compiled: Any = torch.compile(module, backend=way.compiler, dynamic=False)
            return compiled  # type: ignore[no-any-return]
        return module

    def fresh(self) -> nn.Module:
        """Return a copy with the same parameters.

        Raises:
            UsageError: It cannot be copied.
        """
        try:
            return copy.deepcopy(self.module, {id(one): one for one in self.module.parameters()})
        except Exception as error:  # what a model holds may refuse to be copied in its own ways
            raise UsageError(
                "the model cannot be copied, and what it keeps between calls would pass for rounding",
                got=first_line(error),
                hint="glass check --invariant run -- SCRIPT compares a script with itself",
            ) from error

    def _earlier(self, module: nn.Module, way: Way) -> None:
        if way.earlier == "rows":
            for _ in self._calls(module, Way(rows=(3, 4, 5), cuts=way.cuts), None):
                pass

    def _calls(self, module: nn.Module, way: Way, trace: CallTrace | None) -> Iterator[tuple[int, Any]]:
        if trace is None:
            self._earlier(module, way)
        rows = torch.tensor(way.rows)
        inputs = {**self._given, **{name: one[rows] for name, one in self._pool.items()}}
        if way.left or way.right:
            for name, one in self._pool.items():
                if one.dim() == 2 and one.shape[1] == self.length:
                    filler = way.filler if name == "input_ids" else 0
                    inputs[name] = nn.functional.pad(one[rows], (way.left, way.right), value=filler)
        if trace is not None:
            trace.begin(0, inputs)
        yield 0, module(**pytree.tree_map_only(Tensor, Tensor.clone, inputs))

    def _results(self, result: Any) -> Iterator[tuple[str, Tensor]]:
        yield from tensors_in("output", result)


class CausalSubject(ModuleSubject):
    """A model of transformers that decodes with a cache."""

    decodes = True

    def _prepare(self, model: LoadedModel, inputs: Mapping[str, Any] | None) -> None:
        self.one_token = model.generation.one_token
        config: Any = self.module.config
        text = config.get_text_config(decoder=True)
        sizes = {size for one in self.module.parameters() for size in one.shape}
        if inputs is not None and isinstance(inputs.get("input_ids"), Tensor):
            self._tokens = more_rows("input_ids", inputs["input_ids"].long().reshape(-1, inputs["input_ids"].shape[-1]))
        else:
            limit = int(model.metadata.get("max_position_embeddings", 1 << 20))
            length = next((one for one in _LENGTHS if one not in sizes and one + 24 < limit), 19)
            high = min(int(text.vocab_size), 1 << 16)
            generator = torch.Generator().manual_seed(0)
            self._tokens = torch.randint(min(3, high - 1), high, (NUM_ROWS, length), generator=generator)
        self.length = self._tokens.shape[1]
        if self.length < 4:
            raise UsageError("the prompt is too short", got=f"{self.length} tokens", expected="at least 4")

    def _calls(self, module: nn.Module, way: Way, trace: CallTrace | None) -> Iterator[tuple[int, Any]]:
        if trace is None:
            self._earlier(module, way)
        tokens = nn.functional.pad(self._tokens[list(way.rows)], (way.left, way.right), value=way.filler)
        mask = torch.ones_like(tokens)
        mask[:, : way.left] = 0
        mask[:, tokens.shape[1] - way.right :] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        cache: Any = self._of_prefix(module, way) if way.earlier == "prefix" else None
        start = 0
        for number, size in enumerate(way.cuts):
            end = start + size + (way.left + way.right if number == 0 else 0)
            if number or cache is None:
                inputs = {
                    "input_ids": tokens[:, start:end],
                    "attention_mask": mask[:, :end],
                    "position_ids": places[:, start:end],
                    "use_cache": True,
                }
                if trace is not None:
                    trace.begin(number, inputs)
                user: Any = getattr(module, "_orig_mod", module)
                if number and cache_argument(user) == "cache_params":
                    del inputs["attention_mask"]  # a recurrence has seen everything, as `generate` has it
                given = accepted(user, {**inputs, **({cache_argument(user): cache} if cache is not None else {})})
                result = module(**given)
                cache = getattr(result, cache_argument(user), None)
                yield number, result
            else:
                yield number, self._prefix_result
            start = end

    def _of_prefix(self, module: nn.Module, way: Way) -> Any:
        """Return the cache of the first call, of another request that goes on otherwise; it is cut there."""
        first, rest = way.cuts[0], max(2, sum(way.cuts) - way.cuts[0])
        tokens = self._tokens[list(way.rows)][:, :first]
        other = self._tokens[[row + 1 for row in way.rows]][:, :rest]
        found = module(**accepted(module, {"input_ids": tokens, "use_cache": True}))
        self._prefix_result, cache = found, getattr(found, cache_argument(module))
        mask = torch.ones((len(tokens), first + rest), dtype=torch.int64)
        given = {"input_ids": other, "attention_mask": mask, cache_argument(module): cache, "use_cache": True}
        module(**accepted(module, given))
        cache.crop(-rest)
        return cache

    def _results(self, result: Any) -> Iterator[tuple[str, Tensor]]:
        yield "logits", result.logits


class EngineSubject(InvarianceSubject):
    """An engine of one process.

    Its operations are seen where they are outputs.

    Args:
        engine: Loaded.
        inputs: Keyword arguments of a call, or `input_ids`; None draws tokens for an engine that generates.
    """

    in_torch = False
    unseen = "build it with --add-output '*' to see which operation it is"

    def __init__(self, engine: Engine, inputs: Mapping[str, Any] | None) -> None:
        manifest = engine.manifest
        self.name, self._engine = str(engine.directory), engine
        self.decodes = manifest.generates
        self.refusals: Mapping[What, str] = dict.fromkeys(("compile", "attention", "threads", "world"), _FIXED)
        self.most_rows = int(manifest.max_batch_size or NUM_ROWS)
        self.prime = next((one for one in _ENGINE_PRIMES if one <= self.most_rows), 1)
        if self.decodes:
            self._tokens = self._drawn(inputs)
            self.length = self._tokens.shape[1]
            return
        if inputs is None:
            raise UsageError("the engine needs inputs", got=self.name, hint="--inputs FILE")
        self.refusals = {**self.refusals, **dict.fromkeys(("length", "padding"), "the engine does not generate")}
        self._pool = {name: more_rows(name, one) for name, one in inputs.items() if isinstance(one, Tensor)}
        try:
            self.run(Way())
        except UsageError:  # a size of 1 was never traced
            self.least_rows = 2

    def _drawn(self, inputs: Mapping[str, Any] | None) -> Tensor:
        if inputs is not None and isinstance(inputs.get("input_ids"), Tensor):
            return more_rows("input_ids", inputs["input_ids"].long())
        manifest = self._engine.manifest
        length = min(_LENGTH, int(manifest.max_seq_len or _LENGTH) - 25)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, int(manifest.vocab_size or 0), (NUM_ROWS, length), generator=generator)

    def refusal(self, way: Way) -> str | None:
        """Return why rows cannot be run one way."""
        if len(way.rows) > self.most_rows:
            return f"batches of more than {self.most_rows} rows: the engine was built for no more"
        if way.right:
            return "padding on the right: an engine takes it on the left alone"
        return "the prefix of another request: an engine reuses none" if way.earlier == "prefix" else None

    def run(self, way: Way) -> Results:
        """Run rows one way."""
        return self._run(self._engine, way)[0]

    def noise(self, way: Way, seed: int) -> Results:
        """Return what rounding alone does to the results of the engine's program."""
        program = self._engine.program
        executable = Executable("interpreted", lambda inputs: run_program(program, inputs))
        twin = LoadedEngine(self._engine.directory, self._engine.manifest, executable, self._engine.sites)
        twin.program, twin.added_outputs = program, {}
        with otherwise(seed):
            noisy = self._run(twin, way)[0]
        return differences(noisy, self._run(twin, way)[0])

    def traced(self, way: Way, *, modules_only: bool, noise: int | None = None) -> tuple[Results, list[TracedOp]]:
        """Run rows, and return the outputs that were added, as operations."""
        return self._run(self._engine, way)

    def _run(self, engine: LoadedEngine, way: Way) -> tuple[Results, list[TracedOp]]:
        with way.settings():
            if way.earlier:
                self._run(engine, Way(rows=(3, 4), cuts=way.cuts))
            return self._generated(engine, way) if self.decodes else self._called(engine, way)

    def _called(self, engine: LoadedEngine, way: Way) -> tuple[Results, list[TracedOp]]:
        found = engine(**{name: one[list(way.rows)] for name, one in self._pool.items()})
        results = {name: one.clone() for name, one in found.items() if name not in self._engine.added_outputs}
        return [results], self._ops(engine, 0, found)

    def _generated(self, engine: LoadedEngine, way: Way) -> tuple[Results, list[TracedOp]]:
        tokens = nn.functional.pad(self._tokens[list(way.rows)], (way.left, 0), value=way.filler)
        mask = torch.ones_like(tokens)
        mask[:, : way.left] = 0
        session = Session(engine, len(tokens), tokens.shape[1], debug=sorted(engine.added_outputs) or False)
        first, *rest = way.cuts
        steps = [first + way.left]
        while rest and rest[0] > 1:
            steps.append(rest.pop(0))
        new = sum(steps)
        chunk = steps[0] if len(steps) > 1 else None
        session.prefill(tokens[:, :new], mask[:, :new], chunk=chunk)
        logits = session.read(["logits"])["logits"].clone()
        results: Results = [{"logits": one} for one in torch.split(logits, steps, dim=1)]
        ops = self._ops(engine, 0, session.debug_buffers) if chunk is None else []
        for i in range(len(rest)):
            results.append({"logits": session.decode(tokens[:, new + i]).clone()})
            ops += self._ops(engine, len(results) - 1, session.debug_buffers)
        return results, ops

    def _ops(self, engine: LoadedEngine, call: int, outputs: Mapping[str, Tensor]) -> list[TracedOp]:
        """Return the added outputs of a call, in the order of the program."""
        added = {one.site: one.name for one in engine.added_outputs.values() if one.name in outputs}
        sites = [site for site in engine.sites if site.name in added]
        return [
            TracedOp(call, site.name, site.op, _line(site.source), 0, outputs=[outputs[added[site.name]].clone()])
            for site in sites
        ]


def differences(noisy: Results, plain: Results) -> Results:
    """Return the differences of two runs, in float64."""
    return [
        {name: one.double() - exact[name].double() for name, one in call.items()}
        for call, exact in zip(noisy, plain, strict=True)
    ]


def more_rows(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with as many rows as are needed: those that are given, then the same, rolled."""
    rows = list(tensor)
    is_mask = tensor.dtype is torch.bool or "mask" in name
    for i in range(len(rows), NUM_ROWS):
        own = rows[i % len(tensor)]
        own = own if is_mask or not own.dim() else own.roll(i // len(tensor), -1)
        rows.append(own * (1 + i / NUM_ROWS) if own.is_floating_point() and not is_mask else own)
    return torch.stack(rows[:NUM_ROWS])


def subject_of(model: LoadedModel, inputs: Sequence[Mapping[str, Any]] | None) -> InvarianceSubject:
    """Return a loaded model as what is run."""
    given = inputs[0] if inputs else None
    extra = set(given or ()) - {"input_ids", "attention_mask", "position_ids"}
    is_causal = model.generation.name in ("causal", "recurrent") and not extra
    return (CausalSubject if is_causal else ModuleSubject)(model, given)


def prove_batch_invariant(
    directory: str | Path, inputs: str | Mapping[str, Any] | None = None, *, num_batches: int = 200, seed: int = 0
) -> BatchProof:
    """Compare every row of random batches, in random order, with the row alone, bit for bit."""
    given = load_inputs(inputs)[0] if isinstance(inputs, str) else inputs
    subject = EngineSubject(load(directory), given)
    draw = random.Random(seed)  # noqa: S311 - no secret
    cuts = (subject.length - 2, 1, 1) if subject.decodes else (1,)
    others = tuple(range(SPARE, SPARE + subject.least_rows - 1))
    alone = {row: subject.run(Way(rows=(row, *others), cuts=cuts)) for row in range(SPARE)}
    num_rows = 0
    for number in range(num_batches):
        size = draw.randint(subject.least_rows, min(subject.most_rows, SPARE))
        rows = tuple(draw.sample(range(SPARE), size))
        together = subject.run(Way(rows=rows, cuts=cuts))
        for place, row in enumerate(rows):
            view = PartMapping((1 + len(others), size), ((0,), (place,)))
            if not all(same_under(view, *calls) for calls in zip(alone[row], together, strict=True)):
                return BatchProof(False, number + 1, num_rows, f"row {row} at place {place} of {size}")
            num_rows += 1
    return BatchProof(True, num_batches, num_rows)


def _line(source: str | None) -> str | None:
    """Return file and line of a source, without the code that is there."""
    return None if source is None else source.split(maxsplit=1)[0].rstrip(":")

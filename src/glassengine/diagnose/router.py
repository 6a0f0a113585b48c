"""Routes a check to the handler of its kind of candidate.

The first handler that accepts a request judges it. `candidates.KINDS` says what each kind is, and which options
it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glassengine.candidates import BUILT, ENGINE, MODEL, QUANTIZED, RECORD, SERVED, WRITTEN, Kind, refuse
from glassengine.diagnose.check_ladder import check_built, check_engine, check_model, check_record
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.quantization.check import check_quantized_checkpoint, is_quantized_candidate
from glassengine.diagnose.served.candidates import is_engine, is_written, open_candidate, open_record
from glassengine.diagnose.served.check import check_served, check_written
from glassengine.results import Comparison
from glassengine.serving.protocol import ServedInSession


@dataclass(frozen=True)
class Handler:
    """Judges one kind of candidate.

    Attributes:
        kind: With the options that it refuses.
        accepts: Returns the candidate, opened where that is cheap, or True; None or False if it is of another kind.
        run: Judges it.
    """

    kind: Kind
    accepts: Callable[[CheckRequest], Any]
    run: Callable[[CheckRequest, Any], Comparison]


HANDLERS = (
    Handler(SERVED, open_candidate, check_served),
    Handler(WRITTEN, is_written, check_written),
    Handler(BUILT, lambda request: request.candidate is None, check_built),
    Handler(ENGINE, lambda request: is_engine(request.candidate), check_engine),
    Handler(RECORD, open_record, check_record),
    Handler(
        QUANTIZED,
        lambda request: is_quantized_candidate(request.baseline, request.candidate),
        check_quantized_checkpoint,
    ),
    Handler(MODEL, lambda request: True, check_model),
)
"""In this order: an engine directory of a back-end that writes models is served, and so is a record of one."""


def route(request: CheckRequest) -> Comparison:
    """Judge a request by the handler of its kind of candidate.

    Raises:
        UsageError: The kind refuses an option that was given.
    """
    for handler in HANDLERS:
        opened = handler.accepts(request)
        if opened is None or opened is False:
            continue
        honored = ("--session-options",) if isinstance(opened, ServedInSession) else ()
        refuse(handler.kind, request.flags, request.candidate, honored=honored)
        return handler.run(request, opened)
    raise AssertionError("the last handler accepts every candidate")

"""The state of the stand-in: one base model, training runs, samplers, checkpoints, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from klamp_standin.checkpoints import Checkpoints
from klamp_standin.faults import Fault
from klamp_standin.futures import Result, Worker
from klamp_standin.model import BaseModel, Trained, Weights
from klamp_standin.protocol import Refused

Body = dict[str, Any]
"""The JSON of a request or an answer."""


class Service:
    """The state behind the HTTP server, and what every route needs.

    Args:
        model: the base model.
        tokenizer: decodes for stop strings; None: there are none.
        name: name of the base model.
        tokenizer_id: what the SDK's `get_tokenizer` loads.
        end: ids that end a completion.
        seed: of adapters and draws that come without one.
        folder: where checkpoints are kept; None: in memory only.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        tokenizer_id: str | None,
        end: Sequence[int],
        seed: int,
        folder: Path | None,
    ) -> None:
        self.base, self.tokenizer, self.name, self.tokenizer_id = BaseModel(model), tokenizer, name, tokenizer_id
        self.end, self.seed = list(end), seed
        self.runs: dict[str, Trained] = {}
        self.samplers: dict[str, tuple[Weights | None, str | None]] = {}
        self.checkpoints = Checkpoints(folder)
        self.worker = Worker()
        self.tokens: Counter[str] = Counter()

    def check_name(self, name: str | None) -> None:
        """Refuse the name of any other base model."""
        if name != self.name:
            raise Refused(f"there is no base model {name!r}; the stand-in serves {self.name!r}", status=404)

    def run(self, model_id: str) -> Trained:
        """Find a training run by its id."""
        if model_id not in self.runs:
            raise Refused(f"there is no training run {model_id!r}", status=404)
        return self.runs[model_id]

    def decode(self, ids: list[int]) -> str:
        """Turn ids into text, to look for stop strings."""
        if self.tokenizer is None:
            raise Refused("a stop string needs a tokenizer, and the stand-in was started without one")
        return str(self.tokenizer.decode(ids))

    def promise(
        self,
        request_id: str,
        job: Callable[[], Result],
        faults: Sequence[Fault],
        *,
        lane: str | None = None,
        number: int = 0,
    ) -> Body:
        """Give a job to the worker, and answer with the id of its future."""
        if any(fault.kind == "fail" for fault in faults):
            job = _failing
        late = sum(fault.seconds for fault in faults if fault.kind == "slow")
        self.worker.submit(request_id, job, lane=lane, number=number, late=late)
        return {"request_id": request_id, "model_id": lane}

    def ordered(self, body: Body, job: Callable[[], Result], faults: Sequence[Fault]) -> Body:
        """Give a training run's job to the worker, to be done in the order of the request numbers."""
        lane, number = body["model_id"], body["seq_id"]
        if lane not in self.worker.lanes:
            raise Refused(f"there is no training run {lane!r}", status=404)
        return self.promise(f"{lane}:{number}", job, faults, lane=lane, number=number)


def _failing() -> Result:
    raise RuntimeError("a fault was asked for")

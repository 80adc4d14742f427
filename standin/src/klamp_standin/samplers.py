"""The routes of the stand-in for sampling: sessions, samplers, completions, scores."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from torch import Tensor

from klamp_standin import losses, sampling
from klamp_standin.faults import Fault
from klamp_standin.futures import Result
from klamp_standin.protocol import Refused, encode_samples, prompt_tokens
from klamp_standin.service import Body, Service

_NOT_HERE = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
_NAN = float("nan")


def create_session(service: Service, body: Body) -> Body:
    """Create a session, which all later requests belong to."""
    return {"type": "create_session", "session_id": f"session-{uuid.uuid4().hex[:12]}"}


def create_sampling_session(service: Service, body: Body) -> Body:
    """Create a sampler of the base model or of saved weights."""
    path = body.get("model_path")
    if path is None:
        service.check_name(body.get("base_model"))
    sampler_id = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
    service.samplers[sampler_id] = (None if path is None else service.checkpoints.load(path).weights, path)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


def get_sampler(service: Service, sampler_id: str) -> Body:
    """Say which weights a sampler samples from."""
    if sampler_id not in service.samplers:
        raise Refused(f"there is no sampler {sampler_id!r}", status=404)
    return {"sampler_id": sampler_id, "base_model": service.name, "model_path": service.samplers[sampler_id][1]}


def scores_prompt(body: Body) -> bool:
    """Whether a request is for the prompt's log-probabilities, as `compute_logprobs` sends it."""
    return bool(body.get("prompt_logprobs") or body.get("topk_prompt_logprobs"))


def asample(service: Service, body: Body, faults: Sequence[Fault]) -> Body:
    """Sample completions of a prompt, and on request score the prompt itself."""
    sampler_id = get_sampler(service, body.get("sampling_session_id") or "")["sampler_id"]
    weights, _ = service.samplers[sampler_id]
    tokens, count, number = prompt_tokens(body["prompt"]), int(body.get("num_samples", 1)), int(body.get("seq_id") or 0)
    losses.check_tokens("prompt", tokens, service.base.vocabulary, service.base.longest)
    last = _last(body, tokens)
    if asked := [name for name in _NOT_HERE if body.get(name)]:
        raise Refused(f"the stand-in does not have {', '.join(asked)}")
    top = int(body.get("topk_prompt_logprobs") or 0)
    if count < 1 or top < 0:
        raise Refused(f"num_samples is {count}, topk_prompt_logprobs {top}; at least 1 and 0 are needed")
    room = (service.base.longest or 2**31) - len(tokens)
    params = sampling.SamplingParams.read(
        body["sampling_params"],
        end=service.end,
        seed=(service.seed * 1_000_003 + int(sampler_id.rpartition(":")[2])) * 1_000_003 + number,
        # compute_logprobs asks for one token besides, also where the prompt fills the model.
        longest=max(room, 1) if scores_prompt(body) else room,
    )

    def job() -> Result:
        with service.base.sampler(weights) as model:
            out = sampling.read(model, tokens)
            scores = sampling.prompt_logprobs(out.logits[0], tokens, last) if body.get("prompt_logprobs") else None
            likeliest = sampling.top_prompt_logprobs(out.logits[0], top, last) if top else None
            rows = sampling.sample(model, out, count, params, service.decode) if room else [([0], [0.0], False)]
        service.tokens["prompt"] += len(tokens)
        if not scores_prompt(body):
            service.tokens["sampled"] += sum(len(row) for row, *_ in rows)
        return _answer(rows, scores, likeliest, {fault.kind for fault in faults})

    promise = service.promise(f"{sampler_id}:{number}", job, faults)
    return promise | {"sample_sequence_ids": [f"{sampler_id}:{number}:{i}" for i in range(count)]}


def _last(body: Body, tokens: Sequence[int]) -> int | None:
    last = body.get("prompt_logprobs_last_n")
    if last is not None and not (body.get("prompt_logprobs") and 1 <= last < len(tokens)):
        raise Refused(f"prompt_logprobs_last_n is {last}; it needs prompt_logprobs, and 1 to {len(tokens) - 1}")
    return last


def _answer(
    rows: list[sampling.Sampled], scores: list[float] | None, likeliest: tuple[Tensor, Tensor] | None, faults: set[str]
) -> bytes:
    """The answer to a request, with the faults that were asked for."""
    if "nan" in faults:
        rows = [(row, [*logprobs[:-1], _NAN], ended) for row, logprobs, ended in rows]
    if scores is not None and "none" in faults:
        scores = [*scores[:-1], _NAN]
    if scores is not None and "short" in faults:
        scores = scores[1:]
        likeliest = likeliest and (likeliest[0][1:], likeliest[1][1:])
    return encode_samples(rows, scores, likeliest)

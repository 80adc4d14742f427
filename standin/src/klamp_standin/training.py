"""The routes of the stand-in for training: models, gradients, optimizer steps, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from klamp_standin import losses
from klamp_standin.faults import Fault
from klamp_standin.futures import Lane, Result
from klamp_standin.model import LoraShape, Trained
from klamp_standin.protocol import (
    Refused,
    decode_training,
    encode_training,
    training_seq,
)
from klamp_standin.service import Body, Service


def create_model(service: Service, body: Body, faults: Sequence[Fault]) -> Body:
    """Create a training run with a new adapter."""
    service.check_name(body["base_model"])
    kind = (body.get("optimizer_config") or {}).get("type", "adamw")
    if kind != "adamw":
        raise Refused(f"the stand-in has no optimizer {kind!r}; it has adamw")
    lora = body.get("lora_config") or {}
    shape = LoraShape(**{name: lora.get(name, value) for name, value in asdict(LoraShape()).items()})
    seed = service.seed if lora.get("seed") is None else int(lora["seed"])
    model_id = f"{body['session_id']}:train:{body['model_seq_id']}"

    def job() -> Result:
        service.runs[model_id] = Trained(weights=service.base.fresh(shape, seed))
        return {"type": "create_model", "model_id": model_id}

    service.worker.lanes.setdefault(model_id, Lane(0))
    return service.promise(f"{model_id}:0", job, faults, lane=model_id)


def get_info(service: Service, body: Body) -> Body:
    """Say what a training run consists of."""
    run = service.run(body["model_id"])
    data = {"arch": "causal-lm", "model_name": service.name, "tokenizer_id": service.tokenizer_id}
    found = {"type": "get_info", "model_data": data, "model_id": body["model_id"], "model_name": service.name}
    return found | {"is_lora": True, "lora_rank": run.weights.shape.rank}


def forward_backward(service: Service, raw: bytes, faults: Sequence[Fault]) -> Body:
    """Do a forward pass and, unless only that is asked for, add the gradient of the loss."""
    model_id, number = training_seq(raw)
    service.run(model_id)
    try:
        request = decode_training(raw)
        losses.check(request, service.base.vocabulary, service.base.longest)
    except Refused:
        service.worker.skip(model_id, number)
        raise

    def job() -> Result:
        with torch.set_grad_enabled(not request.forward_only):
            targets = [inputs["target_tokens"] for inputs in request.inputs]
            logprobs = service.base.logprobs(service.run(model_id).weights, request.tokens, targets)
            loss = losses.summed(request.loss_fn, logprobs, request.inputs, request.loss_fn_config)
        if not request.forward_only:
            loss.backward()
        service.tokens["forward" if request.forward_only else "forward_backward"] += sum(map(len, request.tokens))
        if any(fault.kind == "nan" for fault in faults):
            logprobs[0] = torch.cat([logprobs[0].detach()[:-1], torch.full_like(logprobs[0][-1:], torch.nan)])
        return encode_training(logprobs, {"loss:sum": float(loss.detach())})

    return service.promise(f"{model_id}:{number}", job, faults, lane=model_id, number=number)


def optim_step(service: Service, body: Body, faults: Sequence[Fault]) -> Body:
    """Do one AdamW step with the gradients added up so far."""

    def job() -> Result:
        if "adam_params" not in body:
            raise Refused("adam_params are missing; the stand-in has AdamW and no other optimizer")
        return {"metrics": {"grad_norm:mean": service.run(body["model_id"]).step(body["adam_params"])}}

    return service.ordered(body, job, faults)


def save_weights(service: Service, body: Body, faults: Sequence[Fault]) -> Body:
    """Save weights and optimizer."""

    def job() -> Result:
        path = f"tinker://{body['model_id']}/weights/{body.get('path') or body['seq_id']}"
        service.checkpoints.save(path, service.run(body["model_id"]), overwrite=bool(body.get("overwrite")))
        return {"type": "save_weights", "path": path}

    return service.ordered(body, job, faults)


def load_weights(service: Service, body: Body, faults: Sequence[Fault]) -> Body:
    """Load saved weights into a training run; a new one is made where the request names none."""
    saved = service.checkpoints.load(body["path"])
    model_id = body.get("model_id") or f"{body['session_id']}:train:{body['model_seq_id']}"
    number = body.get("seq_id") or 0

    def job() -> Result:
        service.runs[model_id] = saved.restored(with_optimizer=bool(body["optimizer"]))
        return {"type": "load_weights", "path": body["path"], "model_id": model_id}

    service.worker.lanes.setdefault(model_id, Lane(0))
    return service.promise(f"{model_id}:{number}", job, faults, lane=model_id, number=number)


def weights_info(service: Service, body: Body) -> Body:
    """Say what kind of training run a checkpoint came from."""
    shape = asdict(service.checkpoints.load(body["tinker_path"]).weights.shape)
    return {"base_model": service.name, "is_lora": True, "lora_rank": shape.pop("rank"), **shape}


def save_weights_for_sampler(service: Service, body: Body, faults: Sequence[Fault]) -> Body:
    """Save weights to sample from, under a name or for a single sampler."""

    def job() -> Result:
        weights = service.run(body["model_id"]).weights.frozen()
        found: Body = {"type": "save_weights_for_sampler"}
        if body.get("path") is None:
            session = body["model_id"].partition(":train:")[0]
            sampler_id = f"{session}:sample:{body['sampling_session_seq_id']}"
            service.samplers[sampler_id] = (weights, None)
            return found | {"sampling_session_id": sampler_id}
        path = f"tinker://{body['model_id']}/sampler_weights/{body['path']}"
        service.checkpoints.save(path, Trained(weights=weights), overwrite=True)
        return found | {"path": path}

    return service.ordered(body, job, faults)

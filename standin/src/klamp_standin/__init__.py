"""A stand-in for the Tinker service, to test Tinker code offline: real HTTP, a small model, real autograd and AdamW.

    from klamp.tinker.testing import Fault, serve

    with serve() as standin:                                     # or serve(model, tokenizer, faults=[...])
        service = tinker.ServiceClient(base_url=standin.url, api_key=standin.api_key)
        client = service.create_lora_training_client(base_model=standin.base_model, rank=8)
        ...
        standin.requests["asample"], standin.tokens["sampled"]   # what it was asked
        standin.weights()                                        # LoRA tensors of the newest run, .grad included
        standin.inject(Fault(kind="nan", route="forward_backward"))
        standin.die()

It serves the SDK from 0.25 to 0.38 and is strict where the hosted service is lax: a datum with a missing or extra key,
another dtype or another length is refused with HTTP 400. `serve` and `Fault` say the rest.
"""

from klamp_standin.faults import Fault
from klamp_standin.run import Standin, serve, tiny_model

__all__ = ["Fault", "Standin", "serve", "tiny_model"]

"""A user's mistakes: pyright has to find one in every line that says so, and in no other."""

from torch import Tensor

from klamp import Batch, KLConfig, KLTerm, LossConfig, build_objective, grpo_loss, kl_estimate, linear_logprobs

KLConfig(beta="0.1")  # wrong
KLConfig(kl_coef="0.1")  # wrong
KLConfig(betta=0.1)  # wrong
KLConfig(kl_estimator="k9")  # wrong
KLTerm(value="k9")  # wrong
build_objective(KLConfig(), LossConfig())  # wrong


def of_tensors(x: Tensor, mask: Tensor) -> None:
    kl_estimate(x, x, "k1")  # wrong
    kl_estimate(x, x, estimator="k9")  # wrong
    Batch(policy_logprobs=x, mask=mask)  # wrong
    grpo_loss(x, build_objective(KLConfig(), LossConfig(), max_length=8))  # wrong
    logprobs: Tensor = linear_logprobs(x, x, x, return_entropy=True)  # wrong
    pair: tuple[Tensor, Tensor] = linear_logprobs(x, x, x)  # wrong
    print(logprobs, pair)

"""klamp's metrics where a person looks for them: in the log that TRL hands to every tracker, the completions table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hosts.trl.hosts import dataset, generated, klamp_trainer, model, saved, stock_trainer

from klamp.doctor.metrics import METRICS

OPTIONS: dict[str, Any] = {
    "beta": 0.2,
    "kl_clip_method": "hard",
    "kl_clip_threshold": 0.01,
    "kl_max_log_ratio": 5.0,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 2,
    "trainer": {"eval_dataset": dataset().select(range(4))},
}
EXPECTED = {
    *("beta", "beta/price", "kl/after_clip", "kl/before_clip", "kl/budget", "kl/exact", "kl/k1", "kl/k3"),
    *("kl/k3_sequence", "kl/log_ratio_clamped", "kl/log_ratio_max", "kl/log_ratio_p99", "kl/over_budget"),
    *("kl/reference_length", "length/mean", "length/repeated", "policy/logp_mean", "ref/logp_mean"),
}


def test_every_name_that_klamp_adds_to_trls_log_is_in_the_table(tmp_path: Path) -> None:
    """Those that a stock run of the same kind does not have, whatever is switched on."""
    more = {"kl_off_policy": "token", "kl_max_weight": 2.0}
    options = {name: value for name, value in OPTIONS.items() if not name.startswith("kl_")}
    base = saved(model(), tmp_path / "base")  # TRL loads its own reference from there
    stock = stock_trainer(base, tmp_path, **options)
    ours = klamp_trainer(base, tmp_path, **OPTIONS, **more)
    for trainer in (stock, ours):
        trainer.train()
    added, own = ({name for row in t.state.log_history for name in row} for t in (ours, stock))
    names = {name.removeprefix("eval_") for name in added - own}
    assert names <= METRICS.keys()
    assert names >= EXPECTED | {"kl/weights_truncated", "kl/k3_max"}
    assert added >= EXPECTED | {f"eval_{name}" for name in EXPECTED}
    assert all(isinstance(row.get(name, 0.0), float) for row in ours.state.log_history for name in added - own)


def test_the_numbers_are_those_of_the_whole_step_however_it_is_split(tmp_path: Path) -> None:
    """Two micro-batches of 4 and one of 8: the same means, percentile and positions."""
    rows = []
    for size, steps in ((4, 2), (8, 1)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "learning_rate": 0.0}
        trainer = klamp_trainer(
            model(), tmp_path, beta=0.2, max_steps=1, trainer={"ref_model": model(seed=1)}, kl_monitor=True, **options
        )
        torch.manual_seed(1)
        trainer.train()
        rows.append(trainer.state.log_history[0])
    names = EXPECTED & rows[0].keys()
    assert {name: rows[1].get(name) for name in names} == pytest.approx({name: rows[0].get(name) for name in names})
    assert rows[0]["kl/k3"] > 0.1
    assert rows[0]["kl/log_ratio_p99"] < rows[0]["kl/log_ratio_max"] or rows[0]["num_tokens"] < 100


@pytest.mark.parametrize("scale", ["batch", "group"])
def test_the_spread_is_what_the_advantages_were_divided_by(tmp_path: Path, scale: str) -> None:
    """The deviation of all rewards of the step, or the mean of those of its groups."""
    rewards = torch.tensor([0.0, 1.0, 5.0, 9.0])
    reward: Any = {"reward_funcs": lambda completions, **_: rewards.tolist()}
    trainer = klamp_trainer(model(), tmp_path, beta=0.2, kl_estimator="k3", scale_rewards=scale, trainer=reward)
    advantages = generated(trainer)["advantages"]
    spread, centred = trainer._klamp.rollout.spread, torch.tensor([-0.5, 0.5, -2.0, 2.0])
    expected = {"batch": 4.113, "group": (0.7071 + 2.8284) / 2}[scale]
    assert spread == pytest.approx(expected, abs=1e-3)
    if scale == "batch":
        torch.testing.assert_close(advantages * spread, centred, rtol=1e-3, atol=1e-3)

"""Two real processes over gloo: the stock class's losses on each, and one gate, one beta, one set of metrics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.gate]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "CUDA_VISIBLE_DEVICES": "",
        "FOLDER": str(folder),
    }
    command = [sys.executable, *launch, "-m", "tests.hosts.trl.children"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_untouched_every_process_has_the_losses_of_the_stock_class(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        stock, ours = found[name]["losses"]
        assert ours == stock and found[name]["apart"] == 0
    assert ranks[0][name]["losses"] != ranks[1][name]["losses"]


@pytest.mark.parametrize("name", ["dapo", "grpo", "quiet", "adapter"])
def test_fast_scoring_has_the_losses_metrics_and_weights_of_stock(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        fast = found[f"{name}, fast"]
        assert fast["in force"].startswith("completions are scored by klamp: each ")
        stock, ours = fast["losses"]
        assert ours == pytest.approx(stock, abs=1e-5)
        assert fast["apart"] <= 1e-5
        for row, other in zip(*fast["rows"], strict=True):
            timed = {key for key in row if "time" in key or "per_second" in key}
            kept = {key: value for key, value in row.items() if key not in timed and value is not None}
            # Each update carries the rounding of those before it on.
            assert {key: other[key] for key in kept} == pytest.approx(kept, abs=1e-5, rel=1e-4, nan_ok=True)


def test_a_group_on_two_processes_is_gated_as_one(ranks: list[dict[str, Any]]) -> None:
    assert all(len(batch) == 2 for found in ranks for batch in found["gates"])  # half of four completions
    for here, there in zip(ranks[0]["gates"], ranks[1]["gates"], strict=True):
        # Each is the mean k3 of the three others, so that the own one is the sum of all four gates less three times it;
        # over the completions of one process alone some of these would be negative.
        gates = [*here, *there]
        assert all(sum(gates) - 3 * gate >= -1e-6 for gate in gates)
    assert len(set(gates)) == 4 and min(gates) > 0


def test_length_scale_metrics_and_beta_are_those_of_all_processes(ranks: list[dict[str, Any]]) -> None:
    sizes = [size for found in ranks for size in found["sizes"][0]]
    for found in ranks:
        assert found["lengths"][0] == [pytest.approx(sum(sizes) / len(sizes))] * 2
        assert found["lengths"][1] == found["lengths"][0]
        assert found["scales"] == ranks[0]["scales"]
        for one, other in found["scales"]:  # all tokens over those that carry the KL, of all processes
            assert one == other > 1
    assert ranks[0]["rows"] == ranks[1]["rows"]
    assert ranks[0]["beta"] == ranks[1]["beta"]
    assert len({row[0] for row in ranks[0]["rows"]}) > 1


def test_untouched_distillation_has_the_numbers_of_the_stock_class(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["untouched"] == found["stock"]


@pytest.mark.parametrize("name", ["exact", "topk"])
def test_both_processes_distil_to_the_same_weights_and_metrics(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][name] == ranks[1][name]
    for row in ranks[0][name]["rows"]:
        assert row["loss"] == pytest.approx(row["teacher/kl"], abs=1e-4), "the mean over the tokens of both"


def test_the_exact_kl_gives_trls_own_loss_and_weights(ranks: list[dict[str, Any]]) -> None:
    own, stock = ranks[0]["exact"], ranks[0]["stock"]
    for row, other in zip(own["rows"], stock["rows"], strict=True):
        assert {key: row[key] for key in other} == pytest.approx(other, abs=1e-4)
    assert own["weights"] == pytest.approx(stock["weights"], abs=1e-5)

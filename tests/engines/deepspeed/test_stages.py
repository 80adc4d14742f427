"""klamp's KL in TRL on two processes under DeepSpeed: the losses, KLs and betas of plain data parallelism."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engines.deepspeed.training import CASES, STAGES, STEPS
from tests.engines.programs import ROOT, said_by
from tests.hosts.trl.hosts import model, noisy, saved

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def ran(kind: str, folder: Path) -> list[dict[str, Any]]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launch, "-m", "tests.engines.deepspeed.training", kind, str(folder)]
    said_by(command, ENVIRONMENT | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"})
    return [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("stages")
    saved(model(), folder / "base")
    saved(noisy(model(), size=0.2, seed=9), folder / "teacher")
    return {kind: ran(kind, folder) for kind in STAGES}


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_a_stage_has_the_numbers_of_plain_data_parallelism(found: Any, kind: str, case: str) -> None:
    if case not in found[kind][0]:
        assert kind == "zero3" and case in ("exact", "fast", "a head")
        return
    for there, here in zip(found["ddp"], found[kind], strict=True):
        plain, sharded = there[case], here[case]
        assert (plain["engine"], sharded["engine"]) == ("DistributedDataParallel", "DeepSpeedEngine")
        assert sharded["reference"] == plain["reference"]
        assert len(sharded["rows"]) == len(plain["rows"]) == STEPS["max_steps"]
        for row, wanted in zip(sharded["rows"], plain["rows"], strict=True):
            assert row == {name: pytest.approx(wanted[name], abs=2e-6) for name in row}


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_where_the_policy_began(found: Any, kind: str, case: str) -> None:
    for rank in found[kind]:
        if case in rank:
            kls = [row["kl/k3"] for row in rank[case]["rows"]]
            assert kls[0] == pytest.approx(0, abs=1e-9)
            assert kls[-1] > 1e-3, "the policy moves, and the reference does not"


def test_which_case_kept_its_reference_how(found: Any) -> None:
    for case, text in {"in memory": "in memory", "attached": "in memory", "adapter": "adapter off"}.items():
        assert text in found["zero3"][0][case]["reference"]


def test_the_exact_kl_is_refused_where_no_process_has_the_whole_head(found: Any) -> None:
    for case in ("exact refused", "a head refused"):
        assert "the output head is spread over processes" in found["zero3"][0][case]
    for case in ("taught", "a head"):
        assert all(row["teacher/kl"] > 0.1 for row in found["zero2"][0][case]["rows"])
    for row in found["zero2"][0]["exact"]["rows"][1:]:
        assert row["kl/exact"] > 0


def test_fast_scoring_has_the_numbers_of_trls_own(found: Any) -> None:
    for kind in ("ddp", "zero2"):
        for rank in found[kind]:
            assert any("scored by klamp: each distinct prompt once" in note for note in rank["fast"]["notes"])
            for row, wanted in zip(rank["fast"]["rows"], rank["slow"]["rows"], strict=True):
                # `kl` and `entropy` are TRL's means over micro-batches, which are klamp's here.
                same = {
                    name: pytest.approx(wanted[name], abs=1e-5, rel=1e-5) for name in wanted.keys() - {"kl", "entropy"}
                }
                assert {name: row[name] for name in same} == same
                assert row["entropy"] == pytest.approx(wanted["entropy"], rel=0.05)
    assert any("FSDP or ZeRO-3 splits the weights" in note for note in found["zero3"][0]["fast"]["notes"])

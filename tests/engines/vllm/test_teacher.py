"""A real vLLM server teaches a student that TRL trains, whose completions a real vLLM writes too."""

from pathlib import Path

import pytest
from tests.engines.vllm.servers import vllm_server
from tests.engines.vllm.test_training import SAME, ran
from tests.training.conftest import disturb

from klamp.lab.models import load_model, load_tokenizer

OPTIONS = {"teacher_estimator": "topk", "teacher_head": "teacher", "teacher_top_k": 8, "reward": "none", "beta": 0.0}


@pytest.mark.gate
def test_it_has_the_numbers_of_a_local_teacher(default_base_model: Path, tmp_path: Path) -> None:
    model = load_model(str(default_base_model))
    disturb(model, size=0.03)
    folder = tmp_path / "teacher"
    model.save_pretrained(folder)
    load_tokenizer(str(default_base_model)).save_pretrained(folder)
    options = {**OPTIONS, "sampler": "vllm", "kl_off_policy": "none", "learning_rate": 2e-4}
    here = ran(teacher_model=folder, **options)
    with vllm_server(folder, tmp_path / "server.log", "--max-model-len", "64") as url:
        away = ran(teacher_url=url, **options)
    names = ("teacher/kl", "teacher/k1", "teacher/student_mass", "train/loss", "train/grad_norm")
    (first, *_), (wanted_first, *_) = away["rows"], here["rows"]
    assert [first[name] for name in names] == pytest.approx([wanted_first[name] for name in names], rel=1e-4, abs=1e-5)
    for row, wanted in zip(away["rows"], here["rows"], strict=True):
        assert [row[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-3, abs=1e-4)
    assert here["rows"][0]["teacher/kl"] > 0.01
    assert max(away["differences"]) < SAME, "vLLM follows the student"

"""`klamp train --prepare`: what a run is divided into, and commands that accelerate, TRL and klamp itself take."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml
from transformers import Qwen2Config

from klamp.cli import main
from klamp.cli.arguments import parse_train
from klamp.lab.engines.verl import verl_overrides
from klamp.lab.models import shape_of
from klamp.lab.tasks.arithmetic import arithmetic_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SEVEN = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
TOPK = ("--teacher_estimator", "topk", "--teacher_head", "teacher")
Prepare: TypeAlias = Callable[..., str]
ROWS = [{"question": f"{n} + 1?", "answer": f"so it is #### {n + 1}"} for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration of 7B (without weights), and a copy of a data set of the hub."""
    config = Qwen2Config(**SEVEN, num_key_value_heads=4, vocab_size=152_064, tie_word_embeddings=False)  # type: ignore[arg-type]
    config.save_pretrained(tmp_path / "seven")
    arithmetic_tokenizer().save_pretrained(str(tmp_path / "seven"))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in ROWS)
        (tmp_path / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(backend: str) -> list[str]:
    """The example of a backend, with model and data of the folder in the place of the hub's."""
    file = Path(f"{backend}.yaml")
    given = yaml.safe_load((ROOT / "examples" / f"gsm8k-{backend}.yaml").read_text(encoding="utf-8"))
    local = {"model": "seven", "task": "hub:data::train", "eval_split": "hub:data::test"}
    file.write_text(yaml.safe_dump(given | local), encoding="utf-8")
    return ["--config", str(file)]


@pytest.fixture
def prepared(folder: Path, capsys: pytest.CaptureFixture[str]) -> Prepare:
    """What `klamp train --prepare` prints for the example of a backend, with more words behind it."""

    def call(backend: str, *more: str) -> str:
        assert main(["train", *words(backend), "--prepare", *more]) == 0
        return capsys.readouterr().out

    return call


def commands(text: str) -> list[str]:
    block = text.partition("next, where the GPUs are\n\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


def test_trl(folder: Path, prepared: Prepare) -> None:
    from accelerate.commands.launch import launch_command_parser
    from trl.scripts.vllm_serve import make_parser

    text = prepared("trl")
    for said in ("7.6 billion parameters", "gradient checkpointing on", "4 GPUs to train, 4 for vLLM"):
        assert said in text
    install, server, launch, look, _ = commands(text)
    assert "trl[vllm]" in install and "vLLM 0.22 to 0.31" in install
    assert server.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 trl vllm-serve --model ") and server.endswith(" &")
    assert look == "klamp report runs/gsm8k-trl"
    (given,) = make_parser().parse_args_and_config(shlex.split(server.rstrip(" &"))[3:])
    assert (given.tensor_parallel_size, given.data_parallel_size, given.host, given.port) == (4, 1, "127.0.0.1", 8001)
    assert launch.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 ")
    told = launch_command_parser().parse_args(shlex.split(launch)[3:])
    assert told.num_processes == 4 and told.use_deepspeed and told.zero_stage == 2 and told.mixed_precision == "bf16"
    assert told.module and told.training_script == "klamp.cli" and told.training_script_args[0] == "train"
    config = parse_train(told.training_script_args[1:])[0]
    parts = config.optim.gradient_accumulation_steps
    assert 128 * 8 // 4 // parts == 2 and config.model.gradient_checkpointing and config.model.dtype == "float32"
    assert config.rollout.sampler_url == "http://127.0.0.1:8001"
    assert not (folder / "runs").exists(), "nothing is written"


def test_verl(folder: Path, prepared: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    text = prepared("verl")
    for said in ("4 of 128 completions at once", "divided over 8 GPUs", "reference offloaded", "0.6 of the memory"):
        assert said in text
    install, start, look, _ = commands(text)
    assert "verl[vllm]" in install and "vLLM 0.24.0" in install
    assert start == "klamp train --config verl.yaml" and look == "klamp report runs/gsm8k-verl"
    config = parse_train(shlex.split(start)[2:])[0]
    told = dict(word.split("=", 1) for word in verl_overrides(config, folder / "run", shape_of("seven")))
    assert told["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == "4"
    assert told["actor_rollout_ref.model.enable_gradient_checkpointing"] == "True"
    assert told["actor_rollout_ref.rollout.gpu_memory_utilization"] == "0.6"
    assert told["actor_rollout_ref.ref.fsdp_config.param_offload"] == "True"
    assert main(["train", *words("verl"), "--dry_run"]) == 0
    assert "ppo_micro_batch_size_per_gpu=4" in capsys.readouterr().out


def test_one_gpu_of_trl_samples_beside_training(prepared: Prepare) -> None:
    _, start, *_ = commands(prepared("trl", "--gpus", "1"))
    assert start.startswith("klamp train --config trl.yaml --gpus 1 ") and start.endswith("--sampler vllm")


def test_heads_that_do_not_divide_are_not_divided(folder: Path, prepared: Prepare) -> None:
    file = folder / "seven" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 14, "num_key_value_heads": 2}))
    server = commands(prepared("trl"))[1]
    assert "CUDA_VISIBLE_DEVICES=6,7 " in server, "vLLM refuses several copies of a dense model"
    assert "--tensor_parallel_size 2 --data_parallel_size 1" in server


def test_the_sum_of_memory_is_shown_and_a_teacher_counts(prepared: Prepare) -> None:
    alone = " ".join(prepared("trl").split())
    assert "of 80 GB less 41.9 (weights, gradients, Adam), 15.2 (frozen models), 8 (spare), 14.9 are left" in alone
    text = " ".join(prepared("trl", "--teacher_model", "seven").split())
    assert "30.5 (frozen models)" in text
    assert "likely out of memory" in text and "verl, which divides all weights" in text
    text = prepared("trl", "--teacher_url", "http://127.0.0.1:8001")
    assert "a server of its own" in text and "likely out of memory" not in text
    text = " ".join(prepared("verl", "--teacher_model", "seven").split())
    assert "1 more than these 8 GPUs for the teacher" in text
    assert "teacher" not in alone + prepared("verl")


def test_32b_by_verl_on_eight_gpus_does_not_fit_and_sixteen_do(folder: Path, prepared: Prepare) -> None:
    """Case: 65.5 GB of weights, gradients and moments, and what is gathered and sleeps beside, of 80."""
    large = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    config = Qwen2Config(**large, num_key_value_heads=8, vocab_size=152_064, tie_word_embeddings=False)  # type: ignore[arg-type]
    config.save_pretrained(folder / "seven")
    text = " ".join(prepared("verl").split())
    assert "of 80 GB less 65.5 (weights, gradients, Adam), 11.3 (what FSDP gathers), 2 (vLLM asleep" in text
    assert "this is likely out of memory: take 16 GPUs in all (gpus, machines), an adapter (lora_r)" in text
    assert "new weights for vLLM: 38 GB of a GPU at the peak" in text
    assert "524.2 GB of each machine's own memory" in text
    text = " ".join(prepared("verl", "--machines", "2").split())
    assert "divided over 16 GPUs" in text and "out of memory" not in text and "tight" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), ["vllm serve MODEL --port 8000 --dtype bfloat16", "--max-logprobs 20"]),
        (("--teacher_name", "seven"), ["/seven --served-model-name seven --port 8000"]),
        ((*TOPK, "--teacher_top_k", "40"), ["--max-logprobs 40 &"]),
        (TOPK, ["--max-logprobs 64"]),
    ],
)
def test_the_command_that_starts_a_teachers_server(prepared: Prepare, given: tuple[str, ...], said: list[str]) -> None:
    text = prepared("trl", "--teacher_url", "http://127.0.0.1:8000", *given)
    assert all(each in " ".join(text.split()) for each in said)
    start, *_ = commands(text)[1:]
    longest = int(re.findall(r"--max_model_len (\d+)", text)[0])
    assert f"--max-model-len {longest + 1} " in start, "it generates one token more"
    assert "--port 8001" in commands(text)[2] and "--sampler_url http://127.0.0.1:8001" in commands(text)[3]
    assert len(commands(prepared("trl"))) == 5, "no server where there is none"


def test_an_adapter_that_lies_in_verls_shards_is_not_evaluated(prepared: Prepare) -> None:
    assert "klamp evaluate" in prepared("trl", "--lora_r", "8")
    assert "klamp evaluate" not in prepared("verl", "--lora_r", "8")


@pytest.mark.parametrize("backend", ["trl", "verl"])
def test_a_shell_takes_what_is_printed(folder: Path, prepared: Prepare, backend: str) -> None:
    """Every line is one simple command to bash, in a folder whose name has a space and a quote."""
    odd = folder / "it's mine"
    (folder / "seven").rename(odd)
    url = ("--teacher_url", "http://127.0.0.1:8000", "--teacher_name", odd.name) if backend == "trl" else ()
    lines = commands(prepared(backend, "--model", odd.name, "--output_dir", "a run", *url))
    checked = subprocess.run(["bash", "-n", "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert [shlex.split(line, comments=True)[-1] for line in lines[-2:]] == ["a run", "a run"]
    quoted = [line for line in lines if "mine" in line]
    assert quoted and all(any("it's mine" in word for word in shlex.split(line, comments=True)) for line in quoted)


def test_klamps_own_loop_is_not_launched_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--prepare"]) == 2
    assert "set backend to trl or verl" in capsys.readouterr().err


def test_wrong_data_is_said_before_the_machine_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words("trl"), "--prepare", "--prompt_column", "problem"]) == 1
    assert "has no column 'problem'" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["trl", "verl"])
def test_the_page_has_the_printed_commands(folder: Path, prepared: Prepare, backend: str) -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").replace("\\\n", " ")
    told = {_plain(line) for line in page.splitlines()}
    for line in commands(prepared(backend))[1:-2]:
        ours = line.replace(str(folder / "seven"), "Qwen/Qwen2.5-7B-Instruct")
        assert _plain(ours.replace(f"{backend}.yaml", f"examples/gsm8k-{backend}.yaml")) in told


def _plain(line: str) -> str:
    """A command without its comment, and without the length of prompts, which the data decide."""
    return " ".join(re.sub(r"--max_model_len \d+", "", line.partition("   #")[0]).split())


def test_slurm_starts_what_klamp_takes(folder: Path) -> None:
    file = ROOT / "examples" / "slurm" / "verl.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    start = file.read_text(encoding="utf-8").strip().splitlines()[-1].removeprefix(".venv-verl/bin/klamp train ")
    told = start.replace('"$1"', words("verl")[1]).replace('"${#machines[@]}"', "2").replace('"$head:$port"', "n1:6379")
    config = parse_train(shlex.split(told.replace(' "${@:2}"', "")))[0]
    assert (config.run.machines, config.run.gpus, config.run.ray_address) == (2, 8, "n1:6379")

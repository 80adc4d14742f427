#!/usr/bin/env python3
"""The golden numbers: freeze them again (`write`), or compare sampled runs of two commits (`compare OLD [NEW]`).

    PYTHONPATH=src:. .venv/bin/python scripts/golden.py write [KIND ...]      tests/golden/*.json
    PYTHONPATH=src:. .venv/bin/python scripts/golden.py compare OLD [NEW]     exit status 1 on a difference

`write` keeps the cases of a file and computes their numbers again. `compare` trains tiny models with `klamp train` of
either commit (NEW: HEAD) on this machine, one thread each, and compares every number of the metrics files but speeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("grpo_loss", "tinker", "verl", "unsloth", "trl", "ends", "verify", "alarms")


def rounded(x: Any) -> Any:
    """Numbers with 12 significant digits, wherever they stand."""
    if isinstance(x, dict):
        return {name: rounded(each) for name, each in x.items()}
    if isinstance(x, list):
        return [rounded(each) for each in x]
    return float(f"{x:.12g}") if isinstance(x, float) else x


def write(kinds: list[str]) -> None:
    """Freeze the numbers of these kinds; without one, of all."""
    from tests.golden import adapter
    from tests.golden.worlds import FOLDER

    def text(x: Any) -> str:
        return json.dumps(rounded(x), separators=(",", ":"))

    for kind in kinds or KINDS:
        file = FOLDER / f"{kind}.json"
        known: Any = json.loads(file.read_text("utf-8"))
        if kind == "verify":
            known = adapter.proofs()
        elif kind == "alarms":
            runs = {record: adapter.alarms(record) for record in adapter.recorded_runs()}
            known |= {"known": sorted(adapter.known_alarms()), "runs": runs}
        else:
            known = [case | {"is": getattr(adapter, kind)(case)} for case in known]
        pairs = isinstance(known, dict)
        lines = [f'"{name}":{text(x)}' for name, x in known.items()] if pairs else [text(x) for x in known]
        start, stop = "{}" if pairs else "[]"
        file.write_text(start + "\n" + ",\n".join(lines) + "\n" + stop + "\n", encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {len(lines)} entries")


TINY: dict[str, Any] = {"model": "MODEL", "reward": "golden_reward:digits", "beta": 0.05, "seed": 3}
TINY |= {"max_steps": 4, "save_every": 4, "eval_every": 0, "warmup_steps": 1, "lr_scheduler_type": "constant"}
TINY |= {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 6, "learning_rate": 5e-3}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "teacher": {"teacher_model": "TEACHER", "teacher_coef": 0.2},
    "teacher, topk": {"teacher_model": "TEACHER", "teacher_estimator": "topk", "teacher_top_k": 4},
    "LoRA": {"lora_r": 4},
    "EMA": {"reference": "ema", "reference_decay": 0.8},
    "clip": {"kl_clip_method": "hard", "kl_clip_threshold": 0.01, "kl_reference_length": 4},
    "controller": {"target_kl": 0.05},
    "KL in the reward": {"kl_placement": "reward", "kl_estimator": "k1", "kl_horizon": "sequence"},
    "two iterations": {"num_iterations": 2, "kl_off_policy": "token"},
    "resume": {"max_steps": 3, "save_every": 3},
}
"""Name -> what differs from TINY; `resume` goes on to step 6."""
REWARD = "def digits(completion, **_):\n    return sum(x.isdigit() for x in completion) / 6\n"
SPEEDS = ("speed/", "memory/")


def make_models(folder: Path) -> None:
    """Two models with drawn weights and one token per character, and the reward."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = "0123456789+-= abcdefghijklmnopqrstuvwxyz"
    names = {name: index for index, name in enumerate(("<pad>", "<eos>", *letters))}
    made = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    sizes = {"vocab_size": len(names), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    for name in ("MODEL", "TEACHER"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=1, pad_token_id=0, bos_token_id=None))
        generator = random.Random(name)
        for label, weights in model.named_parameters():
            flat = weights.data.view(-1)
            flat.copy_(flat.new_tensor([("norm" in label) + generator.uniform(-0.4, 0.4) for _ in flat]))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "golden_reward.py").write_text(REWARD, encoding="utf-8")


PROGRAM = """
import json, sys
from klamp.cli import main
for arguments in json.loads(sys.argv[1]):
    if main(["train", *arguments]):
        sys.exit(f"klamp train {' '.join(arguments)} failed")
"""


def started(source: Path, folder: Path, side: str) -> subprocess.Popen[bytes]:
    """A process that trains every run with the code in `source`, into folders whose names begin with `side`."""
    calls = list[list[str]]()
    for index, (name, options) in enumerate(RUNS.items()):
        config, output = folder / f"{side}{index}.yaml", str(folder / f"{side}{index}")
        known = {**TINY, **options, "output_dir": output}
        known |= {key: str(folder / x) for key, x in known.items() if x in ("MODEL", "TEACHER")}
        config.write_text(json.dumps(known), encoding="utf-8")  # JSON is YAML
        calls += [["--config", str(config)]]
        calls += [["--resume", output, "--max_steps", "6"]] if name == "resume" else []
    environment = {"PYTHONPATH": f"{source / 'src'}{os.pathsep}{folder}", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | environment | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(calls)]
    return subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL)


def differing(folder: Path, index: int) -> tuple[int, list[str]]:
    """How many numbers of a run were compared, and those that differ; a name that one side lacks is a difference."""
    files = [folder / f"{side}{index}" / "metrics.jsonl" for side in ("old", "new")]
    old, new = ([json.loads(line) for line in file.read_text("utf-8").splitlines()] for file in files)
    found, count = ["another number of rows"] * (len(old) != len(new)), 0
    for sides in zip(old, new, strict=False):
        for metric in sorted(name for name in sides[0] | sides[1] if not name.startswith(SPEEDS)):
            a, b = (json.dumps(side.get(metric)) for side in sides)
            found += [f"step {sides[0].get('step')} {metric}: {a} -> {b}"] * (a != b)
            count += 1
    return count, found


def compare(old: str, new: str) -> int:
    """Print how the runs of two commits differ; 1 where they do."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as last:
        folder, processes = Path(name), list[subprocess.Popen[bytes]]()
        make_models(folder)
        for side, commit in (("old", old), ("new", new)):
            tree = str(folder / f"tree-{side}")
            subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
            last.callback(subprocess.run, ["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)
            processes.append(started(Path(tree), folder, side))
            last.callback(processes[-1].kill)
        statuses = [process.wait() for process in processes]
        failed = any(statuses)
        for index, run in enumerate(() if failed else RUNS):
            count, found = differing(folder, index)
            failed |= bool(found)
            print(f"{run:20} {count:5} numbers  {len(found) or 'none'} differ", *found[:8], sep="\n    ")
    return int(failed)


def main() -> int:
    """Freeze or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("kinds", nargs="*")
    comparison = commands.add_parser("compare")
    comparison.add_argument("old")
    comparison.add_argument("new", nargs="?", default="HEAD")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.old, options.new)
    write(options.kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

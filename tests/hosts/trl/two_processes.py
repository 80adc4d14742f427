"""A module as a program of two processes over gloo, and what each of them found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def found_by_ranks(module: str, folder: Path) -> list[dict[str, Any]]:
    """Run a module that writes `rankN.json` into FOLDER; what each process wrote."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "CUDA_VISIBLE_DEVICES": "",
        "FOLDER": str(folder),
    }
    command = [sys.executable, *launch, "-m", module]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]

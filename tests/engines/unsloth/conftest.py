"""Unsloth patches TRL and transformers for the whole process, so it comes before anything of them is imported.

Without a GPU it is talked into patching TRL all the same, and a plain tiny model takes the place of one of its own.
With one, only test_gpu.py runs, on Unsloth as it is.
"""

import torch

from benchmarks.unsloth_cpu import patch

GPU = torch.cuda.is_available()
patch(gpu=GPU)
collect_ignore_glob = ["test_[!g]*.py"] if GPU else []

"""Unsloth patches TRL before anything imports it. Without a GPU a plain tiny model takes the place of its own."""

import torch

from benchmarks.unsloth_cpu import patch

GPU = torch.cuda.is_available()
patch(gpu=GPU)
collect_ignore_glob = ["test_[!g]*.py"] if GPU else []

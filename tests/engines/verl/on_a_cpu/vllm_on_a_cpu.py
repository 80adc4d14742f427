"""vLLM on a CPU whose weights can be replaced; vLLM calls it in each of its processes. For tests only."""

from __future__ import annotations


def keep_weights() -> None:
    """Keep vLLM from packing weights for oneDNN: it drops the originals, and new ones could not be loaded."""
    import vllm._custom_ops as operations

    operations._supports_onednn = False

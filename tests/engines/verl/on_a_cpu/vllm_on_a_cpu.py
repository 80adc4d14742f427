"""vLLM on a CPU whose weights can be replaced; vLLM calls it in each of its processes. For tests only."""


def keep_weights() -> None:
    """Keep vLLM from packing weights, on any processor: it drops the originals, and new ones could not be loaded."""
    from klamp.hosts.common.sampler_weights import pack_nothing

    pack_nothing()

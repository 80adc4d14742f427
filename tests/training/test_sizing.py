"""How a step is divided over GPUs: what a large model needs, what a small one is spared, that the reasons are true."""

import re
from pathlib import Path

import pytest
from tests.training.conftest import stored, tiny_llama

from klamp.lab.models import shape_of
from klamp.lab.sizing import GB, Load, Shape, reasons, sizes_of

SMALL = Shape(494_032_768, 24, 896, 151_936, 14)  # Qwen2.5-0.5B
SEVEN = Shape(7_615_616_512, 28, 3584, 152_064, 28)  # Qwen2.5-7B
LARGE32 = Shape(32_763_876_352, 64, 5120, 152_064, 40)  # Qwen2.5-32B
LARGE = Shape(72_706_203_648, 80, 8192, 152_064, 64)  # Qwen2.5-72B


def load(shape: Shape = SEVEN, **changes) -> Load:
    """128 x 8 completions of 512 + 1,024 tokens on eight GPUs of 80 GB, which train and sample in turn."""
    given = {"gpus": 8, "together": 8, "memory": 80.0, "tokens": 1536, "share": 128, "frozen": shape.parameters}
    return Load(**{"shape": shape, "adapter": False, "apart": False, **given, **changes})


def test_a_model_of_7b_has_room_on_eight_gpus() -> None:
    sizes = sizes_of(load())
    assert sizes.checkpointing and sizes.fits and not sizes.offload
    assert sizes.micro == 4, "the whole share of 128 would take 420 GB"
    assert (sizes.engine_share, sizes.tensor_parallel) == (0.6, 1)
    assert sizes.state == pytest.approx(16 * SEVEN.parameters / 8 / GB)


@pytest.mark.parametrize("shape", [SMALL, SEVEN, LARGE], ids=["0.5B", "7B", "72B"])
@pytest.mark.parametrize("memory", [24.0, 80.0])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_whatever_is_said_to_fit_does(shape: Shape, memory: float, adapter: bool, apart: bool) -> None:
    given = load(shape, memory=memory, adapter=adapter, frozen=0 if adapter else shape.parameters, apart=apart)
    sizes = sizes_of(given)
    assert given.share % sizes.micro == 0 and shape.heads % sizes.tensor_parallel == 0
    assert not (apart and sizes.offload), "nothing has to make room"
    state = 0 if sizes.offload else sizes.state
    if sizes.fits:
        assert sizes.micro == 1 or sizes.micro * sizes.completion <= sizes.left / 2
        assert apart or state + sizes.engine_share * memory <= memory
    told = dict(reasons(given, sizes))
    assert ("this is likely out of memory" in told) is not sizes.fits


def test_what_is_too_large_is_said() -> None:
    assert not sizes_of(load(LARGE)).fits
    assert sizes_of(load(LARGE, gpus=32)).fits and sizes_of(load(LARGE, adapter=True, frozen=0)).fits


def test_what_is_tight_is_said_and_that_it_is_not() -> None:
    for gpus, tight, fits in ((8, False, False), (10, True, True), (16, False, True)):
        given = load(LARGE32, gpus=gpus)
        told = dict(reasons(given, sizes_of(given)))
        assert ("this is tight" in told, "this is likely out of memory" in told) == (tight, not fits), gpus


def test_new_weights_reach_an_engine_beside_what_trains() -> None:
    """Its own share, what is not offloaded (an offloaded shard comes back for it), one matrix whole, a buffer."""
    shard, matrix = LARGE32.parameters / 16 / GB, 4 * 152_064 * 5120 / GB
    sizes = sizes_of(load(LARGE32, gpus=16))
    engine = 2 * LARGE32.parameters / sizes.tensor_parallel / GB
    assert sizes.offload and sizes.sync == pytest.approx(engine + 4 * shard + matrix + 2.2)
    assert sizes.machine == pytest.approx(8 * (12 + 4) * shard)
    small = sizes_of(load(SMALL))
    assert small.sync == pytest.approx((2 + 12 / 8) * SMALL.parameters / GB + 4 * 151_936 * 896 / GB + 2.2)
    asleep = sizes_of(load(adapter=True, frozen=0)).machine
    assert asleep == pytest.approx(8 * 2 * SEVEN.parameters / GB), "beside an adapter it keeps its weights there"


def test_the_reasons_have_the_amounts() -> None:
    told = dict(reasons(load(), sizes_of(load())))
    numbers = re.findall(r"[\d,.]*\d", told["4 of 128 completions at once"])
    assert numbers[:7] == ["3.3", "1,536", "80", "15.2", "7.5", "2", "8"] and "3.8 GB" in told["reference offloaded"]
    assert len(dict(reasons(load(apart=True), sizes_of(load(apart=True))))) == 2


def test_the_shape_is_read_from_the_configuration_alone(tmp_path: Path) -> None:
    model = tiny_llama()
    folder = stored(model, tmp_path / "model")
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()
    shape = shape_of(folder)
    assert shape is not None and shape.parameters == sum(each.numel() for each in model.parameters())
    assert shape[1:] == (
        model.config.num_hidden_layers,
        model.config.hidden_size,
        model.config.vocab_size,
        model.config.num_attention_heads,
    )
    assert shape_of("builtin") is None, "it may have to be taught first, and is small"

"""A wait for another process that torch ends is one error of klamp; real processes are in test_lost_processes.py."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError

from klamp.errors import RewardError, TrainerFailed
from klamp.training.processes import explained, timeout_of

BROKEN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer\nand more"


@pytest.mark.parametrize("error", [RuntimeError(BROKEN), DistNetworkError("Broken pipe")])
def test_a_wait_in_vain_says_why_and_what_to_do(config_of, error):
    config = config_of(process_timeout=60.0)
    with pytest.raises(TrainerFailed, match="lost each other") as caught, explained(config):
        raise error
    assert caught.value.got == str(error).partition("\n")[0] and caught.value.__cause__ is error
    assert "process_timeout=60 s" in caught.value.why and "--resume" in caught.value.fix


def test_other_errors_stay_what_they_are(config_of):
    for error in (RuntimeError("out of memory"), RewardError("gloo and so on"), ValueError("gloo")):
        with pytest.raises(type(error), match=str(error)), explained(config_of()):
            raise error


def test_torch_waits_as_long_as_the_run_says(config_of):
    assert timeout_of(config_of(process_timeout=90.5)).total_seconds() == 90.5

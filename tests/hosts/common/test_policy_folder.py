"""A checkpoint of klamp's is named by its folder: the weights are the folder inside it."""

from __future__ import annotations

from pathlib import Path

from klamp.hosts.common.policy_folder import policy_folder


def test_a_checkpoint_stands_for_the_weights_in_it(tmp_path: Path) -> None:
    step = tmp_path / "step-000002"
    (step / "policy").mkdir(parents=True)
    assert policy_folder(str(step)) == str(step / "policy") == policy_folder(str(step / "policy"))


def test_any_other_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "config.json").touch()
    assert policy_folder(str(tmp_path)) == str(tmp_path), "a model that has a folder of that name"
    assert policy_folder("owner/name") == "owner/name"

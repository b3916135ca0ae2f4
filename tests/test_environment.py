"""What differs between a recording and a replay is said in sentences; what can be set alike is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.snapshots.environment import Environment

ELSEWHERE: dict[str, Any] = {
    "torch_version": "2.11.0",
    "machine": "aarch64",
    "capability": "SVE256",
    "threads": 3,
    "devices": ("cuda:0 NVIDIA H100",),
    "deterministic": True,
    "matmul_precision": "high",
    "default_dtype": "float64",
    "flush_denormal": True,
    "mkldnn": False,
}


def test_an_environment_equals_itself() -> None:
    """Nothing differs from the process that an environment was taken from, and it survives its JSON form."""
    here = Environment.here([torch.device("cpu"), torch.device("meta")])
    assert here.differences(Environment.here()) == ()
    assert Environment.from_dict(here.to_dict()) == here


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_field_makes_a_difference(name: str) -> None:
    """A single field that differs gives a single sentence with what was there and what is here."""
    here = dataclasses.replace(Environment.here(), mkldnn=True)
    (sentence,) = dataclasses.replace(here, **{name: ELSEWHERE[name]}).differences(here)
    assert sentence.endswith(".")
    if name == "torch_version":
        assert sentence == f"Recorded with torch 2.11.0, this is torch {torch.__version__}."
    if name == "devices":
        assert sentence == "Recorded on cuda:0 NVIDIA H100, this is the CPU."


def test_settings_are_taken_over_for_a_while() -> None:
    """Inside `applied` the process has the recorded settings, afterwards its own again, also after an error."""
    here = Environment.here()
    changed = {"threads": 1, "deterministic": True, "matmul_precision": "high", "default_dtype": "float64"}
    there = dataclasses.replace(here, flush_denormal=True, **changed)

    def use() -> None:
        with there.applied():
            assert there.differences(Environment.here()) == ()
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert Environment.here() == here


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_field_of_another_type_is_refused(name: str) -> None:
    """Whatever a file says about its environment has the right type, or the error names the field."""
    data = Environment.here().to_dict()
    with pytest.raises(SnapshotError, match=f"environment, {name}"):
        Environment.from_dict({**data, name: {"x": 1}})
    del data[name]
    with pytest.raises(SnapshotError, match="an object with the keys"):
        Environment.from_dict(data)

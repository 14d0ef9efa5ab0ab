"""Every feature, shape and layout against float64, outputs and every gradient, within same-dtype eager's error."""

import pytest
import torch

from flashtri_core import dispatch, flash_attn
from flashtri_core.testing.cases import CASES, PAIRS
from flashtri_core.testing.plugin import lanes


@lanes()
@pytest.mark.parametrize("name", CASES)
def test_case(lane, name, poisoned):
    """Each case alone. Among them rows 24 (V of another width), 32 (backward causal or not as asked), 50 (dK, dV summed over the group),
    68 (ALiBi off-square), 72 (softcap's value and gradient), 77 (dropout's factor in the backward), 100 (each option
    reaches the backward). Uninitialised memory is NaN: rows nobody writes show."""
    lane.check(lane.inputs(CASES[name]))


@lanes()
@pytest.mark.parametrize("name", PAIRS)
def test_pair(lane, name, poisoned):
    """Row 100: every two options meet in one call, and their gradients are those of that call."""
    lane.check(lane.inputs(PAIRS[name]))


def test_poison_reaches_what_a_call_allocates(poisoned, monkeypatch):
    """A kernel that writes nothing leaves NaN in the first call and in a repeated one, so the tests above can fail."""
    monkeypatch.setattr(dispatch, "forward_plan", lambda *arguments: lambda *tensors: None)
    x = torch.zeros(1, 1, 4, 8)
    for _ in range(2):
        assert flash_attn(x, x, x).isnan().all()

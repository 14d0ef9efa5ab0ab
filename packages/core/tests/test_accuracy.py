"""Every feature, shape and layout against float64, outputs and every gradient, within same-dtype eager's error."""

import pytest

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

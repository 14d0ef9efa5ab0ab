"""Random calls against the formulas: sizes, strides, masks and features in any combination."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtri_core.testing import budget, cases
from flashtri_core.testing.cases import AXES, LAYOUTS, Case, inputs
from flashtri_core.testing.plugin import GPU_HALF, INTERPRETER, REFERENCE, lanes

EXAMPLES = {"reference": 60, "interpreter": 8, "gpu_fp16": 12}
SIZES = {"reference": (1, 45), "interpreter": (16, 45), "gpu_fp16": (16, 400)}
layout = st.sampled_from([name for name in LAYOUTS if name != "ones"])


@st.composite
def random_case(draw, least=1, top=45):
    """Any case: dimensions that align to nothing, every axis of features at random.

    ``least`` is the smallest size that is not empty. Against the error of same-dtype eager it must not be tiny: where
    the exact gradient is 0 because a row sees one key, both errors are single roundings and their ratio says nothing.
    """

    def size(most):
        return st.one_of(st.just(0), st.integers(min(least, most), most))

    group, heads_k = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = (group * heads_k, heads_k)
    batch = draw(st.integers(1, 2))
    keywords = {}
    for axis, entries in AXES.items():
        if axis not in ("rows", "layout"):
            keywords |= draw(st.sampled_from(entries))
    rows = draw(st.sampled_from(["dense", "used", "packed"]))
    if rows == "packed":
        keywords["lengths"] = tuple(draw(st.lists(st.tuples(size(top), size(top)), min_size=1, max_size=3)))
        keywords["tail"] = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    nq, nk = draw(st.integers(least, top)), draw(st.integers(least, top))
    if rows == "used":
        keywords["used"] = tuple(draw(size(nk)) for _ in range(batch))
    return Case(
        "random", batch=batch, heads=heads, nq=nq, nk=nk, d=draw(st.integers(min(least, 8), 40)), dv=draw(st.integers(min(least, 8), 40)),
        layouts=draw(st.tuples(layout, layout, layout, layout)), **keywords,
    )  # fmt: skip


@lanes(REFERENCE, INTERPRETER, GPU_HALF)
def test_random_call(lane, poisoned):
    """Row 100 and whatever nobody thought of: outputs and all gradients within budget."""

    @settings(
        max_examples=EXAMPLES[lane.name], deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=random_case(*SIZES[lane.name]), seed=st.integers(0, 1000))
    def property_holds(case, seed):
        lane.check(inputs(case, lane.dtype, lane.device, seed))

    property_holds()


@lanes(REFERENCE)
def test_random_low_precision_call(lane):
    """The chunked path on float16 and bfloat16 tensors, within same-dtype eager's error."""

    @settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        case=random_case(16),
        seed=st.integers(0, 1000),
        dtype=st.sampled_from([torch.half, torch.bfloat16]),
    )
    def property_holds(case, seed, dtype):
        made = inputs(case, dtype, "cpu", seed)
        budget.check(cases.run(made, "reference"), cases.exact(made), cases.exact(made, dtype))

    property_holds()

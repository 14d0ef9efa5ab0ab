"""Every suite as pytest-benchmark tests: `pytest packages/bench/benchmarks --benchmark-enable --flashtri-out FILE`.

Select with `-k`: a suite (`-k grid`), a case (`-k grid-d128-causal-n4096`), a feature (`-k sink`). Without a GPU the
sizes are cut down and the figures mean nothing.
"""

import pytest

from flashtri_bench.cases import SUITES

# One parameter per case: its id is the test's id, and the same as in results.json.
CASES = [pytest.param(case, id=case.id) for suite in SUITES.values() for case in suite]


@pytest.mark.parametrize("case", CASES)
def test_case(case, measured):
    rows = measured(case)
    assert {row["op"] for row in rows if row["impl"] == "flashtri"} == set(case.ops)

import copy

import pytest

from flashtri_bench.compare import compare, describe, geometric_mean


def slow(document, factor, impl="flashtri", case="grid-d64-full-n512"):
    """The same document with one row slower."""
    changed = copy.deepcopy(document)
    for row in changed["rows"]:
        if row["impl"] == impl and row["case"] == case and row["op"] == "fwd":
            for name in ("p20", "p50", "p80"):
                row["time_ms"][name] *= factor
    return changed


def test_the_same_file_has_no_change(good):
    outcome = compare(good, good)
    assert outcome.regressions == outcome.improvements == outcome.gone == []
    assert outcome.agreement == 1.0
    assert "no regression beyond noise" in describe(outcome)


def test_a_regression_is_flagged_and_an_improvement_is_not_one(good):
    (found,) = compare(good, slow(good, 1.10)).regressions
    assert found.name[1:4] == ("grid-d64-full-n512", "fwd", "flashtri")
    assert found.relative == pytest.approx(1.10, rel=0.01)
    assert "REGRESSION: grid-d64-full-n512 fwd flashtri bf16 on Test GPU: +10.0%" in describe(
        compare(good, slow(good, 1.1))
    )
    outcome = compare(good, slow(good, 0.85))
    assert outcome.regressions == []
    assert len(outcome.improvements) == 1


def test_changes_within_noise_do_not_count(good):
    assert compare(good, slow(good, 1.02)).regressions == []
    noisy = slow(good, 1.10)
    for row in noisy["rows"]:
        if "time_ms" in row:
            row["time_ms"]["p80"] = row["time_ms"]["p50"] * 1.2
    assert compare(good, noisy).regressions == []


def test_a_slower_machine_is_not_a_regression(make):
    old, new = make.document(), make.document(factor=1 / 1.2)
    for row in new["rows"]:
        if row["impl"] == "flashtri" and "time_ms" in row:
            assert row["tflops"] < 450
    outcome = compare(old, new)
    assert outcome.regressions == []
    assert outcome.agreement == 1.0


def test_without_peers_there_is_no_ratio_to_them(good):
    alone = copy.deepcopy(good)
    alone["rows"] = [row for row in alone["rows"] if row["impl"] == "flashtri"]
    outcome = compare(good, slow(alone, 1.1))
    assert outcome.agreement is None
    assert "+10.0% (no peers" in describe(outcome) and "ratio to the peers" not in describe(outcome)


def test_a_regression_hidden_by_a_faster_machine_is_found(make):
    assert len(compare(make.document(), slow(make.document(factor=1.2), 1.2)).regressions) == 1


def test_a_row_that_is_gone_is_said(good):
    fewer = copy.deepcopy(good)
    fewer["rows"] = [r for r in good["rows"] if (r["case"], r["impl"]) != ("grid-d64-full-n512", "flashtri")]
    outcome = compare(good, fewer)
    assert {name[1:4] for name in outcome.gone} == {("grid-d64-full-n512", op, "flashtri") for op in ("fwd", "bwd")}
    # A run of another suite says nothing about the grid.
    hosts = copy.deepcopy(good) | {"rows": [r for r in good["rows"] if r["metric"] == "host"]}
    assert compare(good, hosts).gone == []


def test_memory_that_grew_is_said(good):
    more = copy.deepcopy(good)
    for row in more["rows"]:
        if row["metric"] == "memory" and row["impl"] == "flashtri":
            row["memory"]["extra_bytes"] *= 3
    assert compare(good, more).memory == ["memory-n1024 flashtri: 1.0 MB beyond the outputs became 3.1 MB"]
    for row in more["rows"]:
        if row["metric"] == "memory" and row["impl"] == "flashtri":
            row["memory"] |= {"oom": True, "peak_bytes": None, "extra_bytes": None}
    assert compare(good, more).memory == ["memory-n1024 flashtri: runs out of memory now"]


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="got none"):
        geometric_mean([])

import copy
import json

import pytest

from flashtri_bench import results, schema
from flashtri_bench.cases import BY_ID
from flashtri_bench.results import NOT_STARTED, add, dumps, empty, load, merge, normalised, problems, rounded, save


def found(document):
    return list(problems(document))


def test_a_good_document_passes(good):
    assert found(good) == []
    assert found(empty()) == []


def test_the_schema_is_a_schema_and_both_readers_accept_a_good_document(good):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema.load())
    jsonschema.validate(good, schema.load())


def _set(path, value):
    def change(document):
        *parents, last = path
        for part in parents:
            document = document[part]
        document[last] = value

    return change


def _drop(path):
    def change(document):
        *parents, last = path
        for part in parents:
            document = document[part]
        del document[last]

    return change


BREAKS = {
    "version": _set(["schema_version"], 2),
    "version is no boolean": _set(["schema_version"], True),
    "extra field": _set(["rows", 0, "note"], "fast"),
    "extra top level": _set(["notes"], []),
    "missing rows": _drop(["rows"]),
    "missing check": _drop(["rows", 0, "check"]),
    "red check": _set(["rows", 0, "check", "ok"], False),
    "unknown op": _set(["rows", 0, "op"], "forward"),
    "no rounds": _set(["rows", -1, "time_ms"], {"p20": 1, "p50": 1, "p80": 1, "rounds": 0}),
    "zero time": _set(["rows", -1, "time_ms"], {"p20": 0, "p50": 1, "p80": 1, "rounds": 5}),
    "shape as text": _set(["rows", 0, "shape", "batch"], "4"),
    "batch as boolean": _set(["rows", 0, "shape", "batch"], True),
    "window of one": _set(["rows", 0, "features", "window"], [3]),
    "window of three": _set(["rows", 0, "features", "window"], [3, 0, 0]),
    "commit": _set(["runs", 0, "commit"], "main"),
    "id": _set(["runs", 0, "id"], "today"),
    "peer version": _set(["runs", 0, "environment", "peers"], {"fa4": 4}),
    "no reason": _set(["skipped", 0, "reason"], ""),
    "name with a space": _set(["rows", 0, "impl"], "FA 2"),
}


@pytest.mark.parametrize("name", list(BREAKS))
def test_own_reader_and_jsonschema_refuse_alike(good, name):
    BREAKS[name](good)
    assert list(schema.violations(good, schema.load()))
    jsonschema = pytest.importorskip("jsonschema")
    assert not jsonschema.Draft202012Validator(schema.load()).is_valid(good)


def test_the_reader_refuses_keywords_it_does_not_know():
    with pytest.raises(ValueError, match="schema keyword 'maxLength' at \\$ is not supported"):
        list(schema.violations("x", {"maxLength": 3}))


def test_dirty_trees_and_unknown_commits_are_refused(good):
    good["runs"][0]["dirty"] = True
    assert "dirty tree" in found(good)[0]
    good["runs"][0] |= {"dirty": False, "commit": "unknown"}
    assert "commit is unknown" in found(good)[0]


def test_processor_and_smoke_figures_are_refused(good):
    """No row from a machine that is not a GPU is ever shown as a result."""
    good["runs"][0]["environment"]["device"] = "cpu"
    assert "a smoke run on a cpu is no result" in found(good)[0]
    good["runs"][0]["environment"]["device"] = "cuda"
    good["runs"][0]["protocol"]["smoke"] = True
    assert "smoke run" in found(good)[0]


def test_a_red_check_is_refused(good):
    good["rows"][0]["check"]["ok"] = False
    assert any("False is not True" in sentence for sentence in found(good))
    good["rows"][0]["check"] = {"ok": True, "max_err": 2.0, "budget": 1.0, "ratio": 4.0}
    assert any("over its budget" in sentence for sentence in found(good))


def _timed(document):
    return next(r for r in document["rows"] if r["metric"] == "time")


def test_rates_above_the_card_are_refused(make):
    """Public report 137: counting causal work twice gave rates above 100 % of the card's peak."""
    document = normalised(
        {"schema_version": 1, "runs": [make.run], "skipped": [],
         "rows": [make.row("grid-d64-causal-n512", "fwd", "flashtri", rate=900.0)]}
    )  # fmt: skip
    assert any("above what the card's matmul reaches" in sentence for sentence in found(document))


def test_flops_and_rates_are_recomputed(good):
    row = _timed(good)
    row["flops"] *= 2
    assert any(s.split(": ", 1)[1].startswith("flops: got") for s in found(good))
    row["flops"] //= 2
    row["tflops"] *= 1.5
    assert any("flops / p50 is" in s for s in found(good))


def test_a_time_without_a_ceiling_is_refused(good):
    good["runs"][0]["ceilings"] = None
    assert any("no measured ceiling for bf16" in s for s in found(good))


def test_shapes_are_those_of_the_case(good):
    _timed(good)["shape"]["batch"] += 1
    assert any("not those of the case" in s for s in found(good))


def test_a_renamed_case_is_noticed(good):
    _timed(good)["case"] = "grid-d63-full-n512"
    assert any("no such case" in s for s in found(good))


def test_a_row_carries_the_measure_it_names(good):
    row = _timed(good)
    row["metric"] = "host"
    assert any("metric host goes with host_us, found time_ms" in s for s in found(good))


def test_quantiles_are_ordered(good):
    _timed(good)["time_ms"]["p20"] = 1e6
    assert any("quantiles are out of order" in s for s in found(good))


def test_out_of_memory_rows_have_no_peak(good):
    row = next(r for r in good["rows"] if r["metric"] == "memory" and not r["memory"]["oom"])
    row["memory"]["oom"] = True
    assert any("an out-of-memory row has no peak" in s for s in found(good))


def test_every_row_has_its_run_once(good):
    good["rows"][0]["run"] = "20250101T000000Z-abcdefab"
    assert any("is missing" in s for s in found(good))
    good["rows"][0] = copy.deepcopy(good["rows"][1])
    assert any("twice in the file" in s for s in found(good))


def test_unsorted_or_unrounded_files_are_refused(good):
    good["rows"].reverse()
    assert found(good) == ["not sorted and rounded as this package writes it: load and save it once"]


def test_rounding_keeps_four_digits_in_any_structure():
    assert rounded({"a": [1.23456, 123456.0, 1e-7 / 3], "b": 7, "c": True}) == {
        "a": [1.235, 123500.0, 3.333e-08],
        "b": 7,
        "c": True,
    }


def test_a_newer_run_replaces_its_rows_only(make):
    old, run = make.document(), make.run | {"id": "20260202T000000Z-abcdefab", "commit": "abcdefab"}
    new = normalised(
        {"schema_version": 1, "runs": [run], "skipped": [],
         "rows": [make.row("grid-d64-full-n512", "fwd", "flashtri", run, rate=600.0)]}
    )  # fmt: skip
    merged = merge(old, new)
    assert found(merged) == []
    assert len(merged["rows"]) == len(old["rows"])
    changed = [r for r in merged["rows"] if r not in old["rows"]]
    assert [(r["case"], r["impl"], r["run"]) for r in changed] == [("grid-d64-full-n512", "flashtri", run["id"])]
    # Measured again by the newer run: nothing of the old one is left, so its record goes too.
    assert [r["id"] for r in merge(new, make.document(run))["runs"]] == [run["id"]]


def test_figures_of_another_gpu_stay(make):
    other = make.run | {"id": "20260202T000000Z-abcdefab", "commit": "abcdefab"}
    other["environment"] = make.run["environment"] | {"gpu": "Other GPU"}
    old, new = make.document(), make.document(other)
    assert len(merge(old, new)["rows"]) == 2 * len(old["rows"])


def test_a_skip_never_removes_a_figure_and_a_figure_removes_a_skip(make):
    old = make.document()
    skip = {"run": make.run["id"], "suite": "grid", "case": "grid-d64-full-n512", "op": "fwd", "dtype": "bf16"}
    with_skip = add(empty(), [], [skip | {"impl": "fa4", "reason": "not installed"}], make.run)
    assert merge(old, with_skip) == old
    assert all(s["impl"] != "fa4" for s in merge(with_skip, old)["skipped"])


def test_that_time_ran_out_gives_way_to_any_other_reason(make):
    skip = {"run": make.run["id"], "suite": "grid", "case": "grid-d64-full-n512", "op": "fwd", "dtype": "bf16"}
    known, late = (
        add(empty(), [], [skip | {"impl": "fa4", "reason": reason}], make.run) for reason in ("hung", NOT_STARTED)
    )
    assert merge(known, late) == merge(late, known) == known


def test_files_diff_by_row_and_survive_a_round_trip(make, tmp_path):
    path = tmp_path / "deep" / "results.json"
    document = make.document()
    save(document, path)
    assert load(path) == document
    assert json.loads(path.read_text()) == document
    changed = copy.deepcopy(document)
    row = next(r for r in changed["rows"] if r["metric"] == "host")
    row["host_us"]["p50"] += 0.1
    before, after = dumps(document).splitlines(), dumps(changed).splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert not list(path.parent.glob(".results*"))


def test_order_of_arrival_does_not_show(make):
    document = make.document()
    shuffled = document | {"rows": document["rows"][::-1]}
    assert dumps(shuffled) == dumps(document)


def test_loading_names_what_is_wrong(tmp_path, good):
    path = tmp_path / "results.json"
    del good["rows"][0]["check"]
    path.write_text(json.dumps(good))
    with pytest.raises(ValueError, match=r"results.json: \$.rows\[0\]: 'check' is missing"):
        load(path)


def test_share_of_the_limit_takes_the_nearer_ceiling():
    ceilings = {"copy_tb_s": 4.0, "matmul_tflops": {"bf16": 700.0}}
    long, short = BY_ID["grid-d128-full-n16384"], BY_ID["models-prompt-n37"]
    assert results.limit(long, "fwd", "bf16", 1.0, ceilings)["kind"] == "matmul"
    assert results.limit(short, "fwd", "bf16", 1.0, ceilings)["kind"] == "copy"
    ms = results.flops(long, "fwd") / 350.0 * 1e-9
    assert results.limit(long, "fwd", "bf16", ms, ceilings)["fraction"] == pytest.approx(0.5)
    assert results.limit(long, "fwd", "fp16", ms, ceilings) is None
    assert results.limit(long, "fwd", "bf16", ms, None) is None


def test_the_committed_file_may_be_committed():
    from flashtri_bench.runner import committed_path

    assert found(json.loads(committed_path().read_text(encoding="utf-8"))) == []

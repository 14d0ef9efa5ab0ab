import hashlib
import json

import pytest

from flashtri_bench import report, results
from flashtri_bench.cli import main
from flashtri_bench.runner import committed_path


def digest():
    return hashlib.sha256(committed_path().read_bytes()).hexdigest()


def test_smoke_run_on_a_processor_measures_and_leaves_the_committed_file_alone(tmp_path, capsys):
    before, out = digest(), tmp_path / "smoke.json"
    arguments = ["run", "--device", "cpu", "--suite", "grid,host,errors", "--out", str(out)]
    assert main([*arguments, "--cases", "d64-causal-n512,h4-n128,d64-full-normal"]) == 0
    assert digest() == before
    said = capsys.readouterr()
    assert "Smoke run (no GPU here)" in said.err
    document = results.load(out)
    assert {r["suite"] for r in document["rows"]} == {"grid", "host", "errors"}
    assert {r["impl"] for r in document["rows"]} == {"flashtri", "torch-flash", "torch-math", "eager"}
    assert document["runs"][0]["protocol"]["smoke"] is True
    assert document["runs"][0]["environment"]["device"] == "cpu"
    # What a processor measured is shown by no report and accepted by no validator.
    assert main(["validate", str(out)]) == 1
    assert "is no result" in capsys.readouterr().out
    assert main(["merge", str(out), "--into", str(tmp_path / "results.json")]) == 1
    assert not (tmp_path / "results.json").exists()


def test_smoke_run_refuses_the_committed_file(capsys):
    assert main(["run", "--device", "cpu", "--suite", "host", "--out", str(committed_path())]) == 2
    assert "a smoke run leaves" in capsys.readouterr().err


def test_wrong_arguments_are_named(capsys):
    assert main(["run", "--device", "cpu", "--suite", "speed"]) == 2
    assert "suite: got 'speed', supported are all, grid," in capsys.readouterr().err
    assert main(["run", "--device", "cpu", "--suite", "host", "--peers", "fa5"]) == 2
    assert "peers: got fa5" in capsys.readouterr().err
    assert main(["run", "--device", "cpu", "--suite", "grid", "--ops", "fwdd"]) == 2
    assert "ops: got fwdd, the chosen cases have bwd, fwd" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["walk"])


@pytest.mark.parametrize("number", ["-1", "0", "nan", "inf", "three"])
@pytest.mark.parametrize(
    ("command", "option"), [("run", "time-budget"), ("run", "window"), ("compare a b", "threshold")]
)
def test_numbers_are_positive(command, option, number, capsys):
    """With a threshold of NaN no change was a regression."""
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), f"--{option}={number}"])
    assert stopped.value.code == 2 and f"argument --{option}: " in capsys.readouterr().err


def test_a_file_that_is_not_json_is_named(file, capsys):
    file.write_text("{")
    for command in (["validate"], ["report"], ["compare", str(file)], ["merge"]):
        assert main([*command, str(file)]) == 2
        assert f"{file}: not JSON" in capsys.readouterr().err


def test_a_check_needs_a_readme(file, capsys):
    assert main(["report", str(file), "--check"]) == 2
    assert "--readme" in capsys.readouterr().err


@pytest.fixture
def file(good, tmp_path):
    path = tmp_path / "a.json"
    results.save(good, path)
    return path


def test_validate(file, good, capsys):
    assert main(["validate", str(file)]) == 0
    good["runs"][0]["dirty"] = True
    file.write_text(json.dumps(good))
    assert main(["validate", str(file)]) == 1
    assert "dirty tree" in capsys.readouterr().out


def test_compare_fails_on_a_regression(file, good, tmp_path, capsys):
    for row in good["rows"]:
        if row["impl"] == "flashtri" and row["metric"] == "time":
            for name in ("p20", "p50", "p80"):
                row["time_ms"][name] *= 1.2
    slower = tmp_path / "b.json"
    results.save(good, slower)
    assert main(["compare", str(file), str(file)]) == 0
    assert main(["compare", str(file), str(slower)]) == 1
    assert "REGRESSION" in capsys.readouterr().out
    assert main(["compare", str(slower), str(file)]) == 0


def test_report_writes_and_checks_the_readme(file, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"# x\n{report.BEGIN}\n{report.END}\n")
    assert main(["report", str(file), "--readme", str(readme), "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert main(["report", str(file), "--readme", str(readme)]) == 0
    assert main(["report", str(file), "--readme", str(readme), "--check"]) == 0
    readme.write_text(readme.read_text().replace("1.67x", "2.67x"))
    assert main(["report", str(file), "--readme", str(readme), "--check"]) == 1


def test_report_writes_markdown_and_plots(file, tmp_path, capsys):
    assert main(["report", str(file), "--markdown", str(tmp_path / "r.md"), "--plots", str(tmp_path / "plots")]) == 0
    assert (tmp_path / "r.md").read_text().startswith("# Benchmarks")
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 9
    assert main(["report", str(file)]) == 0
    assert "geometric mean" in capsys.readouterr().out


def test_merge_takes_a_good_file(file, tmp_path):
    target = tmp_path / "results.json"
    assert main(["merge", str(file), "--into", str(target)]) == 0
    assert main(["validate", str(target)]) == 0


def test_a_dirty_tree_cannot_write_the_committed_file(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("flashtri_bench.provenance.commit", lambda: ("0123456a", True))
    assert main(["run", "--suite", "host"]) == 2
    assert "committed code only" in capsys.readouterr().err


def test_a_machine_whose_worker_does_not_start_is_said(monkeypatch, capsys):
    from flashtri_bench.runner import Worker

    monkeypatch.setattr(Worker, "command", ["false"])
    assert main(["run", "--device", "cpu", "--suite", "host"]) == 1
    assert "the measuring process does not start: the process died" in capsys.readouterr().err

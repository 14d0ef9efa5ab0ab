import pytest

from flashtri_bench import provenance
from flashtri_bench.schema import load, violations


def test_commit_comes_from_git_or_from_the_environment(monkeypatch):
    monkeypatch.setenv("FLASHTRI_COMMIT", "0123456789abcdef")
    assert provenance.commit() == ("0123456789abcdef", False)
    monkeypatch.setenv("FLASHTRI_DIRTY", "1")
    assert provenance.commit() == ("0123456789abcdef", True)
    monkeypatch.setenv("FLASHTRI_COMMIT", "main")
    with pytest.raises(ValueError, match="FLASHTRI_COMMIT: got 'main'"):
        provenance.commit()


def test_outside_a_checkout_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHTRI_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "PACKAGES", tmp_path)
    assert provenance.commit() == ("unknown", True)


def test_only_sources_make_a_tree_dirty(monkeypatch):
    monkeypatch.delenv("FLASHTRI_COMMIT", raising=False)
    answers = {"ls-files": "x", "rev-parse": "a" * 40, "status": ""}
    asked = []

    def output(*command, cwd=None):
        asked.append(command)
        return answers[command[1]]

    monkeypatch.setattr(provenance, "_output", output)
    assert provenance.commit() == ("a" * 40, False)
    assert asked[-1][-1] == ":(glob)*/src/**"
    answers["status"] = " M packages/core/src/flashtri_core/ops.py"
    assert provenance.commit() == ("a" * 40, True)


def test_a_record_fits_the_schema(monkeypatch):
    monkeypatch.setenv("FLASHTRI_COMMIT", "0123456789abcdef")
    record = provenance.run_record("cpu", True, provenance.environment("cpu"))
    schema = load()
    assert list(violations(record, schema["$defs"]["run"], schema)) == []
    assert record["environment"]["device"] == "cpu"
    assert record["id"].endswith("-01234567")

"""CASES.md says the truth: every test it names is there."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ROWS = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", (HERE / "CASES.md").read_text(), re.MULTILINE)


def test_every_row_names_tests_that_exist():
    assert len(ROWS) == 95
    for row, text in ROWS:
        named = re.findall(r"`([\w/]*\.py)::(\w+)`", text)
        assert named or "nox session" in text, f"row {row} names no test"
        for file, test in named:
            path = ROOT / file if "/" in file else HERE / file
            assert re.search(rf"def {test}\(", path.read_text()), f"row {row}: {file} has no {test}"


def test_tests_of_this_folder_name_their_rows():
    """The docstring of a regression test names the row it guards."""
    silent = []
    for row, text in ROWS:
        for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
            docstring = re.search(rf'def {test}\(.*?\n +"""(.*?)"""', (HERE / file).read_text(), re.DOTALL)
            named = docstring and re.search(rf"\b[Rr]ows?\b[^:]*\b{row}\b", docstring[1])
            if file != "test_packaging.py" and not named:
                silent.append(f"{file}::{test} guards row {row}")
    assert not silent

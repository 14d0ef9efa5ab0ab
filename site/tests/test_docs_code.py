"""Every Python block of the documentation runs, page by page, in order, on a CPU; so does every example of the API pages."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
ROOT = DOCS.parents[1]
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """Python blocks written on the page; what is included from source files is tested where it lives."""
    found = [match.group(2) for match in FENCE.finditer(page.read_text())]
    return [block for block in found if "--8<--" not in block]


PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if blocks(page)]
SOURCES = [path for path in sorted(ROOT.glob("packages/*/src/**/*.py")) if ">>> " in path.read_text()]


def test_pages_with_code_are_found() -> None:
    assert len(PAGES) >= 15
    assert len(SOURCES) >= 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(page: Path) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        if "from transformers import" in block:
            pytest.importorskip("transformers", reason="needs transformers")
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_examples_in_docstrings_run(source: Path) -> None:
    name = ".".join(source.relative_to(ROOT).with_suffix("").parts[3:])
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, extraglobs={"torch": torch})
    assert tried > 0
    assert failed == 0


@pytest.mark.interpreter
def test_the_shell_block_runs_the_kernels_under_the_interpreter() -> None:
    """cpu.md shows how to run the real kernels without a GPU."""
    shell = re.search(r"```bash\n(TRITON_INTERPRET=1 .*?)```", (DOCS / "use" / "cpu.md").read_text(), re.DOTALL)
    assert shell
    code = re.search(r"<<'EOF'\n(.*?)EOF", shell.group(1), re.DOTALL)
    assert code
    run = subprocess.run(
        [sys.executable, "-c", code.group(1)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "[1, 1, 48, 16]" in run.stdout

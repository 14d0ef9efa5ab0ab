"""What the pages compute instead of quoting: facts, tables and figures. mkdocs-macros calls ``define_env``."""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "steps"), str(HERE / "tools")]

import bench_page  # noqa: E402
import facts  # noqa: E402
import figures  # noqa: E402
import footprint  # noqa: E402
import messages  # noqa: E402
import support  # noqa: E402

CORE = HERE.parent / "packages" / "core" / "src" / "flashtri_core"


def _docstring(path: Path) -> str:
    """A module's docstring as Markdown: roles become code, ``::`` introduces an indented block, tables become tables."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^(=+ +)=+\n(.*?)\n\1=+$", _simple_table, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"::(?=\n\n {4})", ":", text)


def _simple_table(match: re.Match[str]) -> str:
    """A table of two columns in reStructuredText: a line that leaves the first one empty goes on with the row above."""
    rows: list[list[str]] = []
    for line in match[2].splitlines():
        name, text = line[: len(match[1])].strip(), line[len(match[1]) :].strip()
        if name:
            rows.append([name, text])
        else:
            rows[-1][1] += f" {text}"
    return _table(["name", "what it is"], rows)


def _functions(path: Path, names: tuple[str, ...]) -> str:
    """The source of some functions of a module, decorators included, in the order asked for."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    found = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    missing = set(names) - set(found)
    if missing:
        raise ValueError(f"{path.name} has no function {sorted(missing)[0]}")
    cut = lambda node: "\n".join(
        lines[node.decorator_list[0].lineno - 1 if node.decorator_list else node.lineno - 1 : node.end_lineno]
    )
    return "\n\n\n".join(cut(found[name]) for name in names)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows])


def define_env(env: Any) -> None:
    """Register the macros."""
    document = bench_page.load()
    long = footprint.Shape(1, 1, 8192, 64)

    @env.macro
    def module_doc(name: str) -> str:
        """The docstring of a module of flashtri_core."""
        return _docstring(CORE / name)

    @env.macro
    def feature_doc(name: str) -> str:
        """The docstring of a feature's file: its first sentence leads the page."""
        from flashtri_core.variants import FEATURES

        lead, _, rest = _docstring(Path(FEATURES[name].__file__)).partition("\n\n")
        return f"{lead}\n{{ .lede }}\n\n{rest}"

    @env.macro
    def source(name: str, *functions: str) -> str:
        """Functions of a module of flashtri_core, as they stand; not run by the tests of the pages' own code."""
        return f"``` {{ .python .kernel }}\n{_functions(CORE / name, functions)}\n```"

    @env.macro
    def figure(name: str) -> str:
        """A figure by its function's name in tools/figures.py."""
        if name == "roofline":
            run = bench_page.newest(document)
            return figures.roofline(run and run["ceilings"], run["environment"]["gpu"] if run else "")
        return getattr(figures, name)()

    @env.macro
    def quick_facts() -> str:
        items = "".join(
            f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.facts().items()
        )
        return f'<dl class="ft-facts">{items}</dl>'

    @env.macro
    def contrast() -> str:
        """The home page's two columns, from the arithmetic."""
        ordinary, ours = figures.scale()
        tile = footprint.human(128 * 64 * 2)
        return (
            f'<div class="ft-contrast"><div><h2>Ordinary attention writes</h2>'
            f'<p class="ft-huge" id="contrast-ordinary">{footprint.human(long.score_matrix)}</p>'
            f'<div class="ft-scaled">{ordinary}'
            f"<p>of score matrix to main memory, per head, at {long.seqlen:,} tokens in fp16. Then it reads it back, "
            f"writes as much again, and reads that.</p></div></div>"
            f'<div><h2>These kernels write</h2><p class="ft-huge" id="contrast-ours">0 B</p><div class="ft-scaled">{ours}'
            f"<p>of it. The amber speck is one 128 × 64 tile to the same scale: {tile} that live on chip and are thrown "
            f"away. What survives is L, {footprint.human(4 * long.seqlen)}: one number per row.</p></div></div></div>"
        )

    @env.macro
    def hero_schedule() -> str:
        """The schedule of the home page's animation, out of the exported one."""
        tiles = json.loads((HERE / "docs" / "data" / "tiles.json").read_text())
        data = {
            "programs": tiles["rows"]["causal/64x64/12"],
            "edges": tiles["masks"]["causal"]["kv_edges"],
            "rows": 12,
            "cols": 12,
        }
        return f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script>'

    @env.macro
    def feature_table() -> str:
        names = {"bias": "[additive bias](bias.md)", "mask": "[boolean mask](mask.md)", "sink": "[learnable sink](sink.md)",
                 "causal": "[causal](causal.md)", "window": "[sliding window](window.md)", "softcap": "[softcap](softcap.md)",
                 "alibi": "[ALiBi](alibi.md)", "dropout": "[dropout](dropout.md)", "gqa": "grouped heads",
                 "seqused_k": "`seqused_k`"}  # fmt: skip
        rows = [[names.get(name, name), *answers] for name, *answers in support.features()]
        return _table(["feature", "Triton kernels", "Hopper kernels", "CPU", "auto on Hopper"], rows)

    @env.macro
    def dtype_table() -> str:
        return _table(["dtype", "GPU", "CPU"], [list(row) for row in support.dtypes()])

    @env.macro
    def head_dim_table() -> str:
        head = ["D", *(f"{cap / 10:.1f} ({name})" for cap, name in support.GPUS.items())]
        return _table(head, [[str(dim), *answers] for dim, answers in support.head_dims()])

    @env.macro
    def message_tables() -> str:
        """Every message of the public functions, by section."""
        plain = lambda text: text.replace("<", "&lt;").replace("*", "\\*")
        parts = []
        for section in messages.SECTIONS:
            rows = [[what, plain(message), advice] for what, message, advice in messages.rows(section)]
            table = _table(["what was done", "the message", "what to do"], rows)
            parts.append(f'### {section}\n\n<div class="ft-cases" markdown>\n\n{table}\n\n</div>')
        return "\n\n".join(parts)

    @env.macro
    def bench_state() -> str:
        """Says that nothing was measured, when nothing was; opens the filters otherwise."""
        rows = bool(bench_page.page_data(document)["rows"])
        note = (
            '<div class="ft-empty" id="bench-empty" data-search-exclude><p><strong>Nothing has been measured yet.</strong> '
            "This page fills itself from <code>packages/bench/results.json</code>, which the benchmark suite writes on real "
            "hardware. There are no figures here from a machine that the code was not run on.</p></div>"
        )
        return note.replace(' id="bench-empty"', ' id="bench-empty" hidden') if rows else note

    @env.macro
    def bench_age() -> str:
        """That the kernels have changed since they were measured, where git knows that."""
        stale = any(bench_page.changed_since(run["commit"]) for run in document["runs"])
        return "The kernels have changed since then." if stale else ""

    @env.macro
    def bench_summary() -> str:
        """The README's means over all lengths, where there are any."""
        table = bench_page.summary(document)
        return f"## In one table\n\n{table}" if table else ""

    @env.macro
    def config_table() -> str:
        """The tile sizes that ``choose`` returns per GPU, for a bf16 causal forward and backward."""
        from flashtri_core.problem import Problem
        from flashtri_core.target import SHARED_MEMORY, Target
        from flashtri_core.tuning import choose

        rows = []
        for dim in (64, 128, 256):
            problem = Problem(1, 16, 16, 8192, 8192, dim, dim, support.DTYPES["bf16"], dim**-0.5, causal=True)
            for kernel in ("fwd", "dkdv", "dq"):
                cells = []
                for cap in support.GPUS:
                    c = choose(kernel, problem, Target(cap, SHARED_MEMORY[cap]))
                    cells.append(f"{c.BLOCK_M}×{c.BLOCK_N}, {c.num_warps}, {c.num_stages}")
                rows.append([str(dim), f"`{kernel}`", *cells])
        return _table(["D", "kernel", *(f"{cap / 10:.1f}" for cap in support.GPUS)], rows)

"""results.json, validated, as the benchmark page needs it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashtri_bench import report, results
from flashtri_bench.peers import PEERS

RESULTS = Path(__file__).parents[2] / "packages" / "bench" / "results.json"


def load(path: Path = RESULTS) -> dict[str, Any]:
    """The document.

    Raises:
        ValueError: it breaks the schema or a rule for committing; the site is not built on such figures.
    """
    document = results.load(path)
    for sentence in results.problems(document):
        raise ValueError(f"{path.name}: {sentence}")
    return document


def newest(document: dict[str, Any]) -> dict[str, Any] | None:
    """The latest run that measured the card's ceilings."""
    runs = [run for run in document["runs"] if run["ceilings"] and "bf16" in run["ceilings"]["matmul_tflops"]]
    return max(runs, key=lambda run: run["started_at"], default=None)


def changed_since(commit: str) -> bool:
    """Whether the kernels are other ones than at this commit; False where git does not know it."""
    command = ["git", "diff", "--quiet", commit, "--", ":(glob)packages/core/src/flashtri_core/kernels/**/*.py"]
    with suppress(FileNotFoundError):  # no git
        return subprocess.run(command, cwd=RESULTS.parents[2], capture_output=True).returncode == 1
    return False


def mask_of(features: dict[str, Any]) -> str:
    """What the mask filter calls a row."""
    return "window" if features["window"] else "causal" if features["causal"] else "full"


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """The part of a row that its metric brings."""
    if row["metric"] == "time":
        limit = row.get("limit") or {"fraction": None, "kind": None}
        return {
            "ms": row["time_ms"]["p50"],
            "tflops": row.get("tflops"),
            "limit": limit["fraction"],
            "ceiling": limit["kind"],
        }
    if row["metric"] == "memory":
        memory = row["memory"]
        return {"bytes": memory["extra_bytes"], "oom": memory["oom"], "cap": memory["cap_bytes"]}
    if row["metric"] == "error":
        return {"inputs": row["error"]["inputs"]} | {t: row["error"][t]["rmse"] for t in ("out", "dq", "dk", "dv")}
    if row["metric"] == "host":
        return {"us": row["host_us"]["p50"]}
    return dict(row["first_call_s"])


def page_data(document: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws: runs with their provenance, the implementations' names, one flat row per figure.

    Implementations come in the README's order and bear its names. ``ratio``: how many times as fast this project's
    kernel was at the same thing in the same run.
    """
    rank = {name: i for i, name in enumerate(PEERS)}
    call = lambda row: tuple(row[name] for name in ("run", "case", "op", "dtype"))
    timed = [row for row in document["rows"] if row["metric"] == "time"]
    ours = {call(row): row["time_ms"]["p50"] for row in timed if row["impl"] == report.OURS}
    groups: dict[tuple[str, ...], int] = {}
    rows = []
    for row in document["rows"]:
        flat = {name: row[name] for name in ("run", "suite", "case", "op", "impl", "dtype", "metric")}
        flat |= {"d": row["shape"]["head_dim"], "n": row["shape"]["seqlen_k"], "mask": mask_of(row["features"])}
        flat |= _figures(row)
        if row["metric"] == "time" and row["impl"] != report.OURS and call(row) in ours:
            flat["ratio"] = row["time_ms"]["p50"] / ours[call(row)]
        groups.setdefault((row["metric"], *call(row)), len(groups))
        rows.append(flat)
    rows.sort(key=lambda row: (groups[row["metric"], *call(row)], rank.get(row["impl"], len(rank))))
    runs = [
        {name: run[name] for name in ("id", "started_at", "commit", "command", "environment", "protocol", "ceilings")}
        for run in document["runs"]
    ]
    skipped = [{name: skip[name] for name in ("case", "op", "impl", "reason")} for skip in document["skipped"]]
    present = {row["impl"] for row in (*rows, *skipped)}
    names = {
        name: PEERS[name].label if name in PEERS else name
        for name in sorted(present, key=lambda n: rank.get(n, len(rank)))
    }
    return {"runs": runs, "names": names, "rows": rows, "skipped": skipped}


def summary(document: dict[str, Any]) -> str:
    """The README's table of means, in Markdown; empty without rows of the grid."""
    return "\n\n".join(table.markdown() for table in report.mean_tables(document))

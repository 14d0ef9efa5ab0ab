"""results.json, validated, as the benchmark page needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtri_bench import results

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


def mask_of(features: dict[str, Any]) -> str:
    """What the mask filter calls a row."""
    return "window" if features["window"] else "causal" if features["causal"] else "full"


def page_data(document: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws: runs with their provenance, and one flat row per figure."""
    rows = []
    for row in document["rows"]:
        flat = {name: row[name] for name in ("run", "suite", "case", "op", "impl", "dtype", "metric")}
        flat |= {"d": row["shape"]["head_dim"], "n": row["shape"]["seqlen_k"], "mask": mask_of(row["features"])}
        if row["metric"] == "time":
            flat |= {
                "ms": row["time_ms"]["p50"],
                "tflops": row.get("tflops"),
                "limit": (row.get("limit") or {}).get("fraction"),
            }
        elif row["metric"] == "memory":
            flat |= {
                "bytes": row["memory"]["extra_bytes"],
                "oom": row["memory"]["oom"],
                "cap": row["memory"]["cap_bytes"],
            }
        elif row["metric"] == "error":
            flat |= {"inputs": row["error"]["inputs"]} | {t: row["error"][t]["rmse"] for t in ("out", "dq", "dk", "dv")}
        elif row["metric"] == "host":
            flat |= {"us": row["host_us"]["p50"]}
        else:
            flat |= row["first_call_s"]
        rows.append(flat)
    runs = [
        {name: run[name] for name in ("id", "started_at", "commit", "command", "environment", "protocol", "ceilings")}
        for run in document["runs"]
    ]
    skipped = [{name: skip[name] for name in ("case", "op", "impl", "reason")} for skip in document["skipped"]]
    return {"runs": runs, "rows": rows, "skipped": skipped}

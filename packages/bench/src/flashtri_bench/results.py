"""results.json: made, merged, validated and written here and nowhere else.

A row is identified by (gpu, case, op, impl, dtype). Merging a newer run replaces the rows that it measured again and
leaves the others; runs that no row refers to any more are dropped. Files are sorted and rounded, one row to a line, so
that a diff shows which figure moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import schema
from .cases import BY_ID, Case
from .flops import flops, io_bytes

Document = dict[str, Any]
Row = dict[str, Any]
Key = tuple[str, str, str, str, str]

DIGITS = 4
MEASURES = {"time": "time_ms", "host": "host_us", "memory": "memory", "first_call": "first_call_s", "error": "error"}
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
# A rate this far above the matmul rate of the same run can only be a miscount. The matmul's own rate varies by a few
# percent with heat, and attention of short sequences runs at a higher clock than a long matmul.
ABOVE_CEILING = 1.25
NOT_STARTED = "not started within the time budget"


def empty() -> Document:
    """A document without rows."""
    return {"schema_version": 1, "runs": [], "rows": [], "skipped": []}


def rounded(value: Any) -> Any:
    """Every float to four significant digits, in whatever structure."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value


def describe(case: Case) -> dict[str, Any]:
    """The `shape` and `features` of a case, as rows hold them."""
    return {
        "shape": {
            "batch": case.batch,
            "heads_q": case.heads_q,
            "heads_kv": case.heads_kv,
            "seqlen_q": case.seqlen_q,
            "seqlen_k": case.seqlen_k,
            "head_dim": case.head_dim,
            "head_dim_v": case.head_dim_v,
        },
        "features": {
            "causal": case.causal,
            "window": None if case.window is None else list(case.window),
            "softcap": case.softcap,
            "alibi": case.alibi,
            "sink": case.sink,
            "dropout": case.dropout,
            "bias": case.bias,
            "lengths": None if case.lengths is None else list(case.lengths),
        },
    }


def limit(case: Case, op: str, dtype: str, p50_ms: float, ceilings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Share of the nearer measured ceiling that a time reaches, None without ceilings.

    Args:
        case: What was computed.
        op: Which pass.
        dtype: Element type.
        p50_ms: Median time.
        ceilings: `ceilings` of the run.

    Returns:
        `kind` of the ceiling that binds and the `fraction` reached.
    """
    if ceilings is None or dtype not in ceilings["matmul_tflops"]:
        return None
    matmul_ms = flops(case, op) / ceilings["matmul_tflops"][dtype] * 1e-9
    copy_ms = io_bytes(case, op, ITEMSIZE[dtype]) / ceilings["copy_tb_s"] * 1e-9
    kind, least = ("matmul", matmul_ms) if matmul_ms >= copy_ms else ("copy", copy_ms)
    return {"kind": kind, "fraction": least / p50_ms}


def timed(case: Case, op: str, dtype: str, time_ms: dict[str, Any], ceilings: dict[str, Any] | None) -> dict[str, Any]:
    """The measurement part of a row that bears a time and a rate, computed from the rounded time it shows."""
    time_ms = rounded(time_ms)
    count = flops(case, op)
    return {
        "time_ms": time_ms,
        "flops": count,
        "tflops": count / time_ms["p50"] * 1e-9,
        "limit": limit(case, op, dtype, time_ms["p50"], ceilings),
    }


def gpu_of(document: Document) -> dict[str, str]:
    """Device name by run id."""
    return {run["id"]: run["environment"]["gpu"] for run in document["runs"]}


def key(row: Row, gpus: dict[str, str]) -> Key:
    """What makes a row the same row in a newer run."""
    return gpus[row["run"]], row["case"], row["op"], row["impl"], row["dtype"]


_CASE_ORDER = {name: i for i, name in enumerate(BY_ID)}


def _order(row: Row, gpus: dict[str, str]) -> tuple[Any, ...]:
    gpu, case, op, impl, dtype = key(row, gpus)
    return gpu, row["suite"], row["shape"]["seqlen_q"] if "shape" in row else 0, case, dtype, op, impl


def normalised(document: Document) -> Document:
    """The same document, rounded, sorted, without runs that nothing refers to."""
    gpus = gpu_of(document)
    used = {row["run"] for row in document["rows"]} | {skip["run"] for skip in document["skipped"]}
    return {
        "schema_version": 1,
        "runs": sorted((rounded(r) for r in document["runs"] if r["id"] in used), key=lambda r: str(r["id"])),
        "rows": sorted((rounded(r) for r in document["rows"]), key=lambda r: _order(r, gpus)),
        "skipped": sorted(document["skipped"], key=lambda r: _order(r, gpus)),
    }


def merge(old: Document, new: Document) -> Document:
    """Rows of `new` in place of the same rows of `old`.

    A case that `new` skipped does not remove a figure that `old` holds on the same GPU: not being able to run a peer
    today says nothing about yesterday's figure.

    Args:
        old: The document to update.
        new: The newer document.

    Returns:
        A new normalised document.
    """
    gpus = gpu_of(old) | gpu_of(new)
    rows = {key(r, gpus): r for r in (*old["rows"], *new["rows"])}
    # that time ran out gives way to any other reason, of whichever run
    said = sorted((*old["skipped"], *new["skipped"]), key=lambda s: bool(s["reason"] != NOT_STARTED))
    skips = {key(s, gpus): s for s in said}
    return normalised(
        {
            "schema_version": 1,
            "runs": list({run["id"]: run for run in (*old["runs"], *new["runs"])}.values()),
            "rows": list(rows.values()),
            "skipped": [skip for name, skip in skips.items() if name not in rows],
        }
    )


def problems(document: Any) -> Iterator[str]:
    """Why a document can't be committed.

    Args:
        document: Parsed JSON.

    Yields:
        One sentence for each reason: schema first, then what a schema can't say.
    """
    found = False
    for sentence in schema.violations(document, schema.load()):
        found = True
        yield sentence
    if found:
        return
    runs = {run["id"]: run for run in document["runs"]}
    for run in document["runs"]:
        if run["dirty"]:
            yield f"run {run['id']}: measured on a dirty tree"
        if run["commit"] == "unknown":
            yield f"run {run['id']}: the commit is unknown"
        if run["environment"]["device"] != "cuda" or run["protocol"]["smoke"]:
            yield f"run {run['id']}: a smoke run on a {run['environment']['device']} is no result"
    if len(runs) != len(document["runs"]):
        yield "two runs have the same id"
    for row in (*document["rows"], *document["skipped"]):
        if row["run"] not in runs:
            yield f"{row['case']} {row['op']} {row['impl']}: its run {row['run']} is missing"
            return
    gpus = gpu_of(document)
    seen: set[Key] = set()
    for row in (*document["rows"], *document["skipped"]):
        name = key(row, gpus)
        if name in seen:
            yield f"{' '.join(name)}: twice in the file"
        seen.add(name)
    for row in document["rows"]:
        where = f"{row['case']} {row['op']} {row['impl']} {row['dtype']}"
        yield from (f"{where}: {sentence}" for sentence in _row_problems(row, runs[row["run"]]))
    if document != normalised(document):
        yield "not sorted and rounded as this package writes it: load and save it once"


def _row_problems(row: Row, run: dict[str, Any]) -> Iterator[str]:
    present = {name for name in MEASURES.values() if name in row}
    if present != {MEASURES[row["metric"]]}:
        found = ", ".join(sorted(present)) or "nothing"
        yield f"metric {row['metric']} goes with {MEASURES[row['metric']]}, found {found}"
    if row["check"]["max_err"] > row["check"]["budget"]:
        yield f"error {row['check']['max_err']} is over its budget {row['check']['budget']}"
    for name in ("time_ms", "host_us"):
        spread = row.get(name)
        if spread is not None and not spread["p20"] <= spread["p50"] <= spread["p80"]:
            yield f"{name}: quantiles are out of order"
    if "memory" in row and row["memory"]["oom"] != (row["memory"]["peak_bytes"] is None):
        yield "memory: an out-of-memory row has no peak, every other row has one"
    case = BY_ID.get(row["case"])
    if case is None:
        yield "no such case; it was renamed or removed"
    elif describe(case) != {"shape": row["shape"], "features": row["features"]}:
        yield "shape or features are not those of the case"
    if row["metric"] != "time" or row["op"] == "step":
        return
    if not {"flops", "tflops", "limit"} <= row.keys():
        yield "a time comes with flops, tflops and limit"
        return
    if case is not None and row["flops"] != flops(case, row["op"]):
        yield f"flops: got {row['flops']}, the mask leaves {flops(case, row['op'])}"
    rate = row["flops"] / row["time_ms"]["p50"] * 1e-9
    if abs(rate - row["tflops"]) > 1e-3 * rate:
        yield f"tflops: got {row['tflops']}, flops / p50 is {rounded(rate)}"
    ceiling = (run["ceilings"] or {"matmul_tflops": {}})["matmul_tflops"].get(row["dtype"])
    if ceiling is None:
        yield f"the run has no measured ceiling for {row['dtype']}"
    elif row["tflops"] > ABOVE_CEILING * ceiling:
        yield f"{row['tflops']} TFLOP/s is above what the card's matmul reaches, {ceiling}: a miscount"


def parse(path: Path) -> Document:
    """Read a document that may say anything, as long as it is JSON.

    Raises:
        ValueError: It is not.
    """
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    return document


def load(path: Path) -> Document:
    """Read a document and check its structure; rules for committing are `problems`.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        ValueError: The file is not JSON, or breaks the schema.
    """
    document = parse(path)
    for sentence in schema.violations(document, schema.load()):
        raise ValueError(f"{path}: {sentence}")
    return document


def dumps(document: Document) -> str:
    """The text of results.json: one run, row or skip to a line."""
    document = normalised(document)

    def block(name: str) -> str:
        if not document[name]:
            return f'  "{name}": []'
        lines = ",\n".join("    " + json.dumps(item, ensure_ascii=False) for item in document[name])
        return f'  "{name}": [\n{lines}\n  ]'

    return '{\n  "schema_version": 1,\n' + ",\n".join(map(block, ("runs", "rows", "skipped"))) + "\n}\n"


def save(document: Document, path: Path) -> None:
    """Write a document; a reader never sees half of it.

    Args:
        document: What to write.
        path: Where.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(dumps(document), encoding="utf-8")
    scratch.replace(path)


def rows_of(document: Document, **wanted: Any) -> list[Row]:
    """Rows whose fields have the wanted values."""
    return [row for row in document["rows"] if all(row[name] == value for name, value in wanted.items())]


def add(document: Document, rows: Iterable[Row], skips: Iterable[Row], run: dict[str, Any]) -> Document:
    """A document with a run's new rows and skips merged in."""
    return merge(document, {"schema_version": 1, "runs": [run], "rows": list(rows), "skipped": list(skips)})

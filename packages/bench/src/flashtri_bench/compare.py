"""What changed between two results files, beyond what the machine does by itself.

A GPU is never twice equally warm: all rows of a case move together. So the change of one of our rows is measured
against the peers of the same case in the same run: what remains is ours. A change counts when it exceeds both the
threshold and the spread of the two measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .results import Document, Key, Row, gpu_of, key

MEASURE_OF_TIME = {"time": "time_ms", "host": "host_us"}


@dataclass(frozen=True)
class Change:
    """One row in both files.

    Attributes:
        name: What the row is.
        relative: New time over old time, less the drift of the peers; 1.1 is 10 % slower.
        drift: By how much the peers of the case changed; None where both files have none.
        noise: Relative spread of the two measurements.
        ours: Whether it is a row of this project.
    """

    name: Key
    relative: float
    drift: float | None
    noise: float
    ours: bool


@dataclass
class Outcome:
    """All changes.

    Attributes:
        changes: Every row that both files have.
        threshold: Smallest change that counts.
        gone: Rows of ours that only the old file has.
        memory: Rows of ours whose peak memory grew, as sentences.
    """

    changes: list[Change]
    threshold: float
    gone: list[Key] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)

    def _beyond(self, change: Change) -> float:
        return max(self.threshold, change.noise)

    @property
    def regressions(self) -> list[Change]:
        """Our rows that became slower beyond noise, slowest first."""
        found = [c for c in self.changes if c.ours and c.relative > 1 + self._beyond(c)]
        return sorted(found, key=lambda c: -c.relative)

    @property
    def improvements(self) -> list[Change]:
        """Our rows that became faster beyond noise, fastest first."""
        found = [c for c in self.changes if c.ours and c.relative < 1 / (1 + self._beyond(c))]
        return sorted(found, key=lambda c: c.relative)

    @property
    def agreement(self) -> float | None:
        """Share of our rows whose ratio to the peers is the same within the threshold; None without peers."""
        ours = [c for c in self.changes if c.ours and c.drift is not None]
        if not ours:
            return None
        return sum(abs(math.log(c.relative)) <= math.log1p(self.threshold) for c in ours) / len(ours)


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean.

    Raises:
        ValueError: No values.
    """
    logs = [math.log(v) for v in values]
    if not logs:
        raise ValueError("values: got none")
    return math.exp(sum(logs) / len(logs))


def is_ours(row: Row) -> bool:
    """Whether a row is this project's."""
    return str(row["impl"]).startswith("flashtri")


def _spread(row: Row) -> float:
    quantiles = row[MEASURE_OF_TIME[row["metric"]]]
    return float((quantiles["p80"] - quantiles["p20"]) / quantiles["p50"])


def _times(document: Document) -> dict[Key, Row]:
    gpus = gpu_of(document)
    return {key(row, gpus): row for row in document["rows"] if row["metric"] in MEASURE_OF_TIME}


def compare(old: Document, new: Document, threshold: float = 0.03) -> Outcome:
    """Compare every row that both files have.

    Args:
        old: The earlier document.
        new: The later one.
        threshold: Smallest relative change that counts.

    Returns:
        The outcome.
    """
    before, after = _times(old), _times(new)
    both = [name for name in after if name in before]

    def ratio(name: Key) -> float:
        measure = MEASURE_OF_TIME[after[name]["metric"]]
        return float(after[name][measure]["p50"] / before[name][measure]["p50"])

    cells: dict[tuple[str, ...], list[Key]] = {}
    for name in both:
        cells.setdefault((name[0], name[1], name[2], name[4]), []).append(name)
    changes = []
    for names in cells.values():
        peers = [ratio(n) for n in names if not is_ours(after[n])]
        drift = geometric_mean(peers) if peers else None
        for name in names:
            noise = max(_spread(before[name]), _spread(after[name]))
            ours = is_ours(after[name])
            changes.append(Change(name, ratio(name) / (drift if ours and drift else 1.0), drift, noise, ours))
    measured = {(name[0], name[1], name[2], name[4]) for name in after}
    gone = [n for n, row in before.items() if is_ours(row) and n not in after and (n[0], n[1], n[2], n[4]) in measured]
    return Outcome(changes, threshold, gone, list(_memory(old, new, threshold)))


def _memory(old: Document, new: Document, threshold: float) -> Iterable[str]:
    gpus_old, gpus_new = gpu_of(old), gpu_of(new)
    before = {key(r, gpus_old): r["memory"] for r in old["rows"] if r["metric"] == "memory" and is_ours(r)}
    for row in new["rows"]:
        name = key(row, gpus_new)
        if row["metric"] != "memory" or name not in before:
            continue
        was, now = before[name]["extra_bytes"], row["memory"]["extra_bytes"]
        if now is None and was is not None:
            yield f"{row['case']} {row['impl']}: runs out of memory now"
        elif now is not None and was is not None and now > was * (1 + threshold):
            yield f"{row['case']} {row['impl']}: {was / 1e6:.1f} MB beyond the outputs became {now / 1e6:.1f} MB"


def describe(outcome: Outcome) -> str:
    """The outcome in words."""
    lines = [f"{len(outcome.changes)} rows in both files"]
    if outcome.agreement is not None:
        within = f"{outcome.threshold:.0%}"
        lines.append(f"ratio to the peers equal within {within} in {outcome.agreement:.0%} of our rows that have peers")
    for title, changes in (("REGRESSION", outcome.regressions), ("faster", outcome.improvements)):
        for c in changes:
            gpu, case, op, impl, dtype = c.name
            peers = "no peers" if c.drift is None else f"peers {c.drift - 1:+.1%}"
            moved = f"{c.relative - 1:+.1%} ({peers}, spread {c.noise:.1%})"
            lines.append(f"{title}: {case} {op} {impl} {dtype} on {gpu}: {moved}")
    lines += [f"GONE: {' '.join(name[1:])}" for name in outcome.gone]
    lines += [f"MEMORY: {sentence}" for sentence in outcome.memory]
    if not outcome.regressions:
        lines.append("no regression beyond noise")
    return "\n".join(lines)

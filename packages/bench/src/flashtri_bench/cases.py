"""What is measured: every case as data, with an id that never changes its meaning.

A case says which attention is computed, not who computes it. Ids appear in results.json, in charts and in
`compare`: give a changed case a new id.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

KINDS = ("time", "host", "memory", "first_call", "error", "training")


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes:
        id: Stable name, unique over all suites.
        suite: The suite it belongs to.
        batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v: The shape. For a packed batch `seqlen_*` is
            the longest sequence and `batch` the number of sequences.
        causal: Bottom-right aligned causal mask.
        window: `(left, right)`, inclusive, -1 unbounded; None without a window.
        softcap: Cap of the scores, 0 for none.
        alibi, sink: Whether the feature is on.
        dropout: Probability that a weight is dropped.
        bias: An additive `(1, Hq, Nq, Nk)` bias that needs a gradient.
        lengths: Sequence lengths of a packed batch (queries and keys alike), None when dense.
        ops: Which passes are timed.
        kind: What is measured, one of `KINDS`.
        inputs: Distribution of the inputs, "normal" or "outlier".
    """

    id: str
    suite: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    dropout: float = 0.0
    bias: bool = False
    lengths: tuple[int, ...] | None = None
    ops: tuple[str, ...] = ("fwd", "bwd")
    kind: str = "time"
    inputs: str = "normal"

    @property
    def packed(self) -> bool:
        """Whether the batch is packed into one token axis (varlen)."""
        return self.lengths is not None

    @property
    def tokens_q(self) -> int:
        """Query rows in all, per head."""
        return sum(self.lengths) if self.lengths is not None else self.batch * self.seqlen_q

    @property
    def tokens_k(self) -> int:
        """Key rows in all, per key head."""
        return sum(self.lengths) if self.lengths is not None else self.batch * self.seqlen_k

    def smoke(self) -> Case:
        """The same features and id at a size that a CPU computes in milliseconds."""
        if self.lengths is not None:
            lengths = tuple(sorted({max(1, min(n, 96) * (i + 3) // 8) for i, n in enumerate(self.lengths[:5])}))
            batch, nq, nk = len(lengths), max(lengths), max(lengths)
        else:
            lengths, batch, limit = None, min(self.batch, 2), 96
            nq, nk = min(self.seqlen_q, limit), min(self.seqlen_k, limit)
            if self.seqlen_q != self.seqlen_k:
                nq = max(1, nk * self.seqlen_q // max(self.seqlen_q, self.seqlen_k))
        group = self.heads_q // self.heads_kv
        heads_kv = 1 if group > 1 else min(self.heads_kv, 2)
        window = None if self.window is None else (min(self.window[0], 16), min(self.window[1], 16))
        return dataclasses.replace(
            self,
            batch=batch,
            heads_q=heads_kv * min(group, 4),
            heads_kv=heads_kv,
            seqlen_q=nq,
            seqlen_k=nk,
            lengths=lengths,
            window=window,
        )


def _dense(
    id: str, suite: str, batch: int, heads: int | tuple[int, int], seqlen: int, dim: int, **kwargs: object
) -> Case:
    hq, hk = heads if isinstance(heads, tuple) else (heads, heads)
    fields: dict[str, object] = {"seqlen_k": seqlen, "head_dim_v": dim} | kwargs
    return Case(
        id=id,
        suite=suite,
        batch=batch,
        heads_q=hq,
        heads_kv=hk,
        seqlen_q=seqlen,
        head_dim=dim,
        **fields,  # type: ignore[arg-type]
    )


def log_uniform_lengths(low: int, high: int, total: int, count: int, seed: int = 0) -> tuple[int, ...]:
    """`count` lengths between `low` and `high`, uniform in their logarithm, that sum to `total`.

    Drawn by Python's generator, so that every machine gets the same batch, then scaled to the wanted sum.
    """
    rng = random.Random(seed)
    exponents = [rng.uniform(math.log(low), math.log(high)) for _ in range(count)]
    raw = [math.exp(e) for e in exponents]
    lengths = [max(low, min(high, round(n * total / sum(raw)))) for n in raw]
    longest = max(range(count), key=lengths.__getitem__)
    lengths[longest] += total - sum(lengths)
    return tuple(lengths)


PROTOCOL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _grid() -> Iterator[Case]:
    """The protocol that papers on this kernel share: 16k tokens in all, hidden size 2048."""
    # The middle lengths first, so that a run cut short by its time budget still says something about every group.
    for n in (4096, 16384, 1024, 8192, 2048, 512):
        for dim in (64, 128):
            for causal in (False, True):
                name = f"grid-d{dim}-{'causal' if causal else 'full'}-n{n}"
                yield _dense(name, "grid", 16384 // n, 2048 // dim, n, dim, causal=causal)


def _dims() -> Iterator[Case]:
    """Other head dims at N=4k, four sequences."""
    for dim, heads in ((256, 8), (192, 8), (96, 16)):
        for causal in (False, True):
            yield _dense(f"dims-d{dim}-{'causal' if causal else 'full'}", "dims", 4, heads, 4096, dim, causal=causal)


def _gqa() -> Iterator[Case]:
    """Grouped heads beside ungrouped ones, D=128, causal, one sequence."""
    for heads, n in (
        ((32, 32), 8192),
        ((32, 8), 8192),
        ((64, 64), 8192),
        ((64, 8), 2048),
        ((64, 8), 8192),
        ((64, 8), 32768),
    ):
        yield _dense(f"gqa-h{heads[0]}-{heads[1]}-n{n}", "gqa", 1, heads, n, 128, causal=True)


def _features() -> Iterator[Case]:
    """One feature at a time beside the plain call of the same shape: D=128, causal, N=8k, B2 H16."""
    base = {"causal": True}
    yield _dense("features-plain", "features", 2, 16, 8192, 128, **base)
    yield _dense("features-window1024", "features", 2, 16, 8192, 128, window=(1023, 0), **base)
    lengths = log_uniform_lengths(128, 8192, 32768, 22)
    packed = {"lengths": lengths, "seqlen_k": max(lengths)}
    yield _dense("features-varlen22", "features", len(lengths), 16, max(lengths), 128, **base, **packed)
    yield _dense("features-softcap30", "features", 2, 16, 8192, 128, softcap=30.0, **base)
    yield _dense("features-sink", "features", 2, 16, 8192, 128, sink=True, **base)
    yield _dense("features-alibi", "features", 2, 16, 8192, 128, alibi=True, **base)
    yield _dense("features-dropout10", "features", 2, 16, 8192, 128, dropout=0.1, **base)
    yield _dense("features-bias-n4096", "features", 2, 16, 4096, 128, bias=True)


def _window() -> Iterator[Case]:
    """A fixed window while N grows: time must grow as N, not as N squared."""
    for n in (8192, 16384, 32768, 65536):
        yield _dense(f"window1024-n{n}", "window", 1, 16, n, 128, causal=True, window=(1023, 0))


def _models() -> Iterator[Case]:
    """Attention layers of real models."""
    both = {"ops": ("fwd", "bwd", "fwd_bwd")}
    yield _dense("models-llama3-8b-n8192", "models", 1, (32, 8), 8192, 128, causal=True, **both)
    yield _dense("models-llama3-70b-n8192", "models", 1, (64, 8), 8192, 128, causal=True, **both)
    gpt_oss = {"causal": True, "sink": True}
    yield _dense("models-gpt-oss-window-n8192", "models", 1, (64, 8), 8192, 64, window=(127, 0), **gpt_oss)
    yield _dense("models-gpt-oss-full-n8192", "models", 1, (64, 8), 8192, 64, **gpt_oss)
    yield _dense("models-gemma2-9b-n4096", "models", 2, (16, 8), 4096, 256, causal=True, softcap=50.0)
    yield _dense("models-mistral-7b-n16384", "models", 1, (32, 8), 16384, 128, causal=True, window=(4095, 0))
    yield _dense("models-deepseek-v3-n4096", "models", 1, 128, 4096, 192, causal=True, head_dim_v=128)
    yield _dense("models-vit-b16-n197", "models", 64, 12, 197, 64)
    yield _dense("models-siglip-so400m-n729", "models", 16, 16, 729, 72)
    yield _dense("models-whisper-encoder-n1500", "models", 8, 20, 1500, 64)
    yield _dense("models-whisper-cross-n448-1500", "models", 8, 20, 448, 64, seqlen_k=1500)
    for n in (37, 128, 512):
        yield _dense(f"models-prompt-n{n}", "models", 1, (32, 8), n, 128, causal=True, ops=("fwd",))


def _host() -> Iterator[Case]:
    """The processor's share of one call: shapes so small that the device waits for the host."""
    yield _dense("host-b1-h4-n128-d64", "host", 1, 4, 128, 64, kind="host", ops=("fwd", "fwd_bwd"))
    yield _dense(
        "host-b1-h32-8-n128-d128-causal", "host", 1, (32, 8), 128, 128, causal=True, kind="host", ops=("fwd", "fwd_bwd")
    )


MEMORY_LENGTHS = tuple(1024 << i for i in range(10))


def _memory() -> Iterator[Case]:
    """Peak memory of one forward and backward while N doubles until nothing fits under the cap."""
    for n in MEMORY_LENGTHS:
        yield _dense(f"memory-n{n}", "memory", 1, 16, n, 128, causal=True, kind="memory", ops=("fwd_bwd",))


def _first_call() -> Iterator[Case]:
    """Time to the first gradient in a new process, on empty and on filled compiler caches."""
    yield _dense(
        "first-call-d128-causal", "first_call", 2, 16, 2048, 128, causal=True, kind="first_call", ops=("fwd_bwd",)
    )


def _errors() -> Iterator[Case]:
    """Difference from fp64, on normal inputs and on inputs with 0.1 % of outliers."""
    for inputs in ("normal", "outlier"):
        for dim in (64, 128):
            for causal in (False, True):
                name = f"errors-d{dim}-{'causal' if causal else 'full'}-{inputs}"
                yield _dense(
                    name, "errors", 2, 8, 1024, dim, causal=causal, inputs=inputs, kind="error", ops=("fwd_bwd",)
                )


def _training() -> Iterator[Case]:
    """A whole optimiser step of a small transformer: 4 layers, width 2048."""
    yield _dense("training-4l-w2048-n2048", "training", 4, 16, 2048, 128, causal=True, kind="training", ops=("step",))


SUITES: dict[str, tuple[Case, ...]] = {
    "grid": tuple(_grid()),
    "dims": tuple(_dims()),
    "gqa": tuple(_gqa()),
    "features": tuple(_features()),
    "window": tuple(_window()),
    "models": tuple(_models()),
    "host": tuple(_host()),
    "memory": tuple(_memory()),
    "first_call": tuple(_first_call()),
    "errors": tuple(_errors()),
    "training": tuple(_training()),
}

BY_ID: dict[str, Case] = {case.id: case for cases in SUITES.values() for case in cases}


def select(suites: Iterable[str], patterns: Iterable[str] = ()) -> list[Case]:
    """Cases of some suites, optionally only those whose id contains one of the patterns.

    Args:
        suites: Suite names; "all" stands for every suite.
        patterns: Substrings of ids; none means every case.

    Returns:
        The cases in the order of the suites.

    Raises:
        ValueError: A suite does not exist, or nothing matches.
    """
    names: list[str] = []
    for name in suites:
        if name != "all" and name not in SUITES:
            raise ValueError(f"suite: got {name!r}, supported are all, {', '.join(SUITES)}")
        names.extend(n for n in (SUITES if name == "all" else (name,)) if n not in names)
    wanted = tuple(patterns)
    cases = [c for n in names for c in SUITES[n] if not wanted or any(p in c.id for p in wanted)]
    if not cases:
        raise ValueError(f"cases: nothing in {', '.join(names)} matches {', '.join(wanted)}")
    return cases

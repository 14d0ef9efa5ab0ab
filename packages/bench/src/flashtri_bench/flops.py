"""Operations and bytes of one case: the only place that counts them.

Only the pairs of a query and a key that the mask leaves are counted, exactly. A multiply and an add are two operations.
The forward has two products (S = Q K^T over `head_dim`, O = P V over `head_dim_v`), the backward five (S again, dP, dV,
dQ, dK), which for equal head dims is the customary 2.5 times the forward. Softmax itself is not counted.
"""

from __future__ import annotations

import functools

from .cases import Case


@functools.cache
def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int] | None) -> int:
    """How many (query, key) pairs one head of one sequence computes.

    Args:
        seqlen_q: Number of queries.
        seqlen_k: Number of keys.
        causal: Bottom-right aligned causal mask: query i sees keys up to i + seqlen_k - seqlen_q.
        window: `(left, right)` about the same diagonal, inclusive, -1 unbounded; None without a window.

    Returns:
        The number of pairs left by the mask.
    """
    left, right = window if window is not None else (-1, -1)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return seqlen_q * seqlen_k
    offset = seqlen_k - seqlen_q
    pairs = 0
    for i in range(seqlen_q):
        low = 0 if left < 0 else max(0, i + offset - left)
        high = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, i + offset + right)
        pairs += max(0, high - low + 1)
    return pairs


def pairs(case: Case) -> int:
    """Visible pairs of a case over its batch and query heads; packed sequences are counted one by one."""
    if case.lengths is not None:
        per_head = sum(visible_pairs(n, n, case.causal, case.window) for n in case.lengths)
    else:
        per_head = case.batch * visible_pairs(case.seqlen_q, case.seqlen_k, case.causal, case.window)
    return per_head * case.heads_q


def flops(case: Case, op: str) -> int:
    """Floating-point operations of one pass.

    Args:
        case: The case.
        op: "fwd", "bwd" or "fwd_bwd".

    Returns:
        Operations that the mask leaves.

    Raises:
        ValueError: Another pass.
    """
    forward = 2 * pairs(case) * (case.head_dim + case.head_dim_v)
    backward = 2 * pairs(case) * (3 * case.head_dim + 2 * case.head_dim_v)
    counts = {"fwd": forward, "bwd": backward, "fwd_bwd": forward + backward}
    if op not in counts:
        raise ValueError(f"op: got {op!r}, supported are {', '.join(counts)}")
    return counts[op]


def io_bytes(case: Case, op: str, itemsize: int) -> int:
    """Least traffic to device memory of one pass: every input read once, every output written once.

    Args:
        case: The case.
        op: "fwd", "bwd" or "fwd_bwd".
        itemsize: Bytes of one element.

    Returns:
        Bytes; the fp32 log-sum-exp that links the passes is included.
    """
    q = case.tokens_q * case.heads_q * case.head_dim * itemsize
    k = case.tokens_k * case.heads_kv * case.head_dim * itemsize
    v = case.tokens_k * case.heads_kv * case.head_dim_v * itemsize
    o = case.tokens_q * case.heads_q * case.head_dim_v * itemsize
    bias = case.heads_q * case.seqlen_q * case.seqlen_k * itemsize if case.bias else 0
    lse = case.tokens_q * case.heads_q * 4
    forward = q + k + v + bias + o + lse
    backward = 2 * (q + k + v + bias) + 2 * o + lse
    return {"fwd": forward, "bwd": backward, "fwd_bwd": forward + backward}[op]

import pytest

from flashtri_bench.cases import BY_ID, KINDS, SUITES, log_uniform_lengths, select
from flashtri_bench.peers import CPU_PEERS, DEFAULT_PEERS, PEERS, chosen


def test_ids_are_unique_and_plain():
    cases = [case for suite in SUITES.values() for case in suite]
    assert len(BY_ID) == len(cases)
    for case in cases:
        assert case.id == case.id.lower()
        assert " " not in case.id
        assert case.kind in KINDS
        assert case.heads_q % case.heads_kv == 0


def test_grid_is_the_protocol():
    grid = SUITES["grid"]
    assert len(grid) == 24
    for case in grid:
        assert case.batch * case.seqlen_q == 16384
        assert case.heads_q * case.head_dim == 2048
    # A run that is cut short has seen every group once before it sees one twice.
    assert len({(c.head_dim, c.causal) for c in grid[:4]}) == 4


def test_lengths_of_the_packed_case():
    lengths = BY_ID["features-varlen22"].lengths
    assert (len(lengths), sum(lengths)) == (22, 32768)
    assert min(lengths) >= 128
    assert max(lengths) <= 8192
    assert lengths == log_uniform_lengths(128, 8192, 32768, 22)


@pytest.mark.parametrize("case", list(BY_ID.values()), ids=list(BY_ID))
def test_smoke_keeps_the_features_and_is_small(case):
    small = case.smoke()
    for name in ("id", "suite", "causal", "softcap", "alibi", "sink", "dropout", "bias", "ops", "kind", "inputs"):
        assert getattr(small, name) == getattr(case, name)
    assert (small.head_dim, small.head_dim_v) == (case.head_dim, case.head_dim_v)
    assert small.packed == case.packed
    assert (small.window is None) == (case.window is None)
    assert (small.heads_q > small.heads_kv) == (case.heads_q > case.heads_kv)
    assert (small.seqlen_q == small.seqlen_k) == (case.seqlen_q == case.seqlen_k)
    assert small.heads_q * small.tokens_q * small.tokens_k <= 1 << 19


def test_selection():
    assert {c.suite for c in select(["grid", "host"])} == {"grid", "host"}
    assert len(select(["all"])) == len(BY_ID)
    assert [c.id for c in select(["all"], ["d128-causal-n512"])] == ["grid-d128-causal-n512"]
    with pytest.raises(ValueError, match="suite: got 'gird', supported are all, grid"):
        select(["gird"])
    with pytest.raises(ValueError, match="nothing in grid matches d63"):
        select(["grid"], ["d63"])


def test_default_peers_exist():
    assert set(DEFAULT_PEERS) == set(SUITES)
    for names in (*DEFAULT_PEERS.values(), CPU_PEERS):
        assert set(names) <= set(PEERS)
    assert chosen(("fa4", "flashtri"), "grid", "cuda") == ["flashtri", "fa4"]
    with pytest.raises(ValueError, match="peers: got fa5, supported are flashtri,"):
        chosen(("fa5",), "grid", "cuda")

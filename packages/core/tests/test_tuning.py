"""Tile sizes: chosen without timing, within the device's limits, few per workload; tables that survive anything."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch

from flashtri_core import dispatch, flash_attn, ops, tune, tuning
from flashtri_core.problem import Extras, Problem, describe
from flashtri_core.target import INTERPRETER, SHARED_MEMORY, Target
from flashtri_core.testing import cases
from flashtri_core.testing.cases import Case
from flashtri_core.testing.plugin import lanes
from flashtri_core.variants import attn_bias

KERNELS = ("fwd", "dkdv", "dq")


def problem(d=64, dv=None, n=512, dtype=torch.bfloat16, **features):
    return Problem(1, 4, 4, n, n, d, dv or d, dtype, d**-0.5, **features)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHTRI_CACHE", str(tmp_path))
    tuning.forget()
    yield tmp_path
    tuning.forget()


@pytest.mark.parametrize("limit", [101376, 65536])
@pytest.mark.parametrize("kernel", tuning.KERNELS)
@pytest.mark.parametrize("d", [16, 64, 96, 128, 192, 256])
def test_chosen_within_the_limit(limit, kernel, d):
    """Rows 120, 122: about 100 KB (and 64 KB) of shared memory always have a config that fits, or say why not."""
    target = Target(86, limit)
    for features in ({}, {"causal": True}, {"window_left": 100}, {"bias": True}, {"mask": True}):
        try:
            config = tuning.choose(kernel, problem(d, **features), target)
        except NotImplementedError as error:
            assert f"head dimensions {d} and {d}" in str(error) and str(limit) in str(error)
            assert limit == 65536 and d > 128, "at 100 KB every head dimension must work"
        else:
            assert tuning.shared_bytes(kernel, config, problem(d, **features)) <= limit


def test_a_float32_bias_fits():
    """Its tiles are read ahead like those of K and V: at D = 64 the plain kernel's tiles would need 114688 bytes."""
    target, ask = Target(86, SHARED_MEMORY[86]), problem(64, bias=True)
    plain = tuning.choose("fwd", problem(64), target)
    assert tuning.shared_bytes("fwd", plain, ask) >= 114688 > target.shared_memory
    assert tuning.choose("fwd", ask, target) != plain


def test_any_of_asks_for_one_feature(own_cache):
    """A rule with ``any_of`` holds for each of its features, and for none of them not."""
    config = asdict(tuning.Config(64, 16, 2, 1))
    table(own_cache).write_text(json.dumps({"dq": [{"when": {"any_of": ["bias", "mask"]}, "config": config}]}))
    chosen = [
        asdict(tuning.choose("dq", problem(64, **on), Target(90, SHARED_MEMORY[90]))) == config
        for on in ({"bias": True}, {"mask": True}, {"bias": True, "mask": True}, {}, {"alibi": True})
    ]
    assert chosen == [True, True, True, False, False]


ROWS = {
    "whole": (torch.empty(2, 1, 40, 48), False),
    "one_row_for_all": (torch.empty(2, 1, 1, 48), False),
    "padded": (torch.empty(2, 1, 40, 56)[..., :48], False),
    "too_short": (torch.empty(2, 1, 40, 52)[..., :44], True),
    "odd_pitch": (torch.empty(2, 1, 40, 50)[..., :48], True),
    "odd_start": (torch.empty(2, 1, 40, 56)[..., 1:49], True),
    "by_columns": (torch.empty(2, 1, 48, 40).mT, True),
    "one_key_for_all": (torch.empty(2, 1, 40, 1), True),
}


@pytest.mark.parametrize("name", ROWS)
def test_tiles_for_a_bias_read_entry_by_entry(name):
    """Such a bias needs a pointer per entry: the larger tile of the others would spill."""
    bias, narrow = ROWS[name]
    q = torch.empty(2, 2, 40, 128, dtype=torch.bfloat16)
    k = torch.empty(2, 2, bias.shape[-1], 128, dtype=torch.bfloat16)
    found = describe(q, k, k, Extras(attn_bias=bias), 0, 0, 1.0, False, -1, -1, 0.0, 0.0)
    assert found.narrow_rows is narrow
    size = 32 if narrow else 64
    assert size == tuning.choose("fwd", found, Target(90, SHARED_MEMORY[90])).BLOCK_N


@pytest.mark.parametrize("dtype", [*attn_bias.FLOATS, torch.bool])
def test_a_plan_knows_how_a_bias_is_read(dtype):
    """A repeated launch hands over as many numbers as the first: a view 4 elements on took the place of one 8 elements on."""
    keys = {}
    for offset in range(33):
        x = torch.zeros(33 + 256, dtype=dtype)[offset : offset + 256].view(1, 1, 16, 16)
        keys.setdefault(ops._layouts(Extras(attn_bias=x)), set()).add(attn_bias.eighths(x))
    assert [len(ways) for ways in keys.values()] == [1] * len(keys)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_dkdv_mixes_no_instructions(capability, d):
    """Products of 64 rows are asynchronous on sm_90 and sm_100, smaller ones are not: on one tile, dK and dV came out wrong."""
    target = Target(capability, SHARED_MEMORY[capability])
    for features in ({}, {"causal": True}, {"window_left": 64}, {"bias": True}, {"mask": True}, {"dropout_p": 0.1}):
        tile = tuning.choose("dkdv", problem(d, **features), target)
        if capability in (90, 100, 103):
            assert (tile.BLOCK_M < 64) == (tile.BLOCK_N < 64)


def test_the_case_of_the_report():
    """Row 120: (1, 16, 4, 64) in bfloat16 on 101376 bytes."""
    for kernel in KERNELS:
        config = tuning.choose(kernel, replace(problem(64, n=16), heads_q=4, heads_k=4), Target(89, 101376))
        assert tuning.shared_bytes(kernel, config, problem(64)) <= 101376


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_architecture_has_configs(capability):
    target = Target(capability, SHARED_MEMORY[capability])
    for kernel in tuning.KERNELS:
        for d, dv in ((8, 8), (64, 64), (128, 128), (256, 256), (192, 128), (16, 256), (256, 16)):
            assert tuning.choose(kernel, problem(d, dv), target)


def test_short_lengths_have_a_config():
    """Row 125: a length below every tile is no reason to have none."""
    for n in (1, 17):
        assert all(tuning.choose(kernel, problem(64, n=n), Target(90, SHARED_MEMORY[90])) for kernel in tuning.KERNELS)


def test_choice_is_a_function_of_the_problem():
    """Rows 123, 131: no timing, no trial: two ranks, or two processes with caches of their own, choose the same."""
    code = (
        "from flashtri_core import tuning; from flashtri_core.target import Target; from flashtri_core.problem import Problem; "
        "import torch; print([tuning.choose(k, Problem(1, 4, 4, n, n, d, d, torch.half, 1.0, causal=c), Target(90, 232448)) "
        "for k in ('fwd', 'dkdv', 'dq') for n in (100, 5000) for d in (64, 128) for c in (True, False)])"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert "Config" in first.stdout and first.stdout == second.stdout


def test_few_configs_for_many_lengths():
    """Row 124: fifty lengths in 1000..2000 use a handful of configs: nothing is compiled per length."""
    lengths = random.Random(0).sample(range(1000, 2001), 50)
    for kernel in KERNELS:
        for causal in (True, False):
            chosen = {
                tuning.choose(kernel, problem(128, n=n, causal=causal), Target(90, SHARED_MEMORY[90])) for n in lengths
            }
            assert len(chosen) <= 2


@pytest.mark.gpu
def test_few_binaries_for_many_lengths():
    """Row 124: and on the GPU those lengths compile a handful of binaries, forward and backward."""
    from flashtri_core.kernels.backward import attn_bwd_delta_kernel, attn_bwd_dkdv_kernel, attn_bwd_dq_kernel
    from flashtri_core.kernels.forward import attn_fwd_kernel

    kernels = (attn_fwd_kernel, attn_bwd_dkdv_kernel, attn_bwd_dq_kernel, attn_bwd_delta_kernel)

    def binaries():
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    before = binaries()
    for n in random.Random(0).sample(range(1000, 2001), 50):
        q = torch.randn(1, 2, n, 72, device="cuda", dtype=torch.half, requires_grad=True)
        flash_attn(q, q, q, causal=True, impl="triton").sum().backward()
    assert binaries() - before <= 16


def test_the_plan_table_is_bounded():
    """Ever-new lengths do not make the launch plans grow without end."""
    ops._plans.clear()
    for n in range(ops._PLAN_LIMIT + 3):
        ops._remember((n,), None)
    assert len(ops._plans) <= ops._PLAN_LIMIT
    ops._plans.clear()


def table(folder, target=Target(90, SHARED_MEMORY[90])):
    return folder / f"{target.name}.json"


def measured(best):
    """A clock that finds one config fastest."""
    return lambda config: 1.0 if config == best else 2.0


def test_tuned_table_goes_first(own_cache):
    target, ask = Target(90, SHARED_MEMORY[90]), problem(64)
    shipped = tuning.choose("fwd", ask, target)
    best = next(c for c in tune.candidates("fwd", ask, target) if c != shipped)
    chosen, times = tune.tune("fwd", ask, target, measured(best))
    assert chosen == best and shipped in times
    assert tuning.choose("fwd", ask, target) == best
    assert json.loads(table(own_cache).read_text())["fwd"][0]["config"] == asdict(best)


def test_tuning_ignores_wrong_and_failing_configs(own_cache):
    """Row 126: a candidate that fails or is wrong (None) never wins, however fast; with none left it says so."""
    target, ask = Target(90, SHARED_MEMORY[90]), problem(64)
    good = tune.candidates("dq", ask, target)[2]
    assert tune.tune("dq", ask, target, lambda c: 9.0 if c == good else None)[0] == good
    with pytest.raises(RuntimeError, match="no dq config ran correctly"):
        tune.tune("dq", ask, target, lambda c: None)


TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
SPOILT_RULES = [
    3, {"config": TILES}, {"when": [1], "config": TILES}, {"when": {}, "config": 1}, {"when": {}, "config": {"BLOCK_M": 1}},
    *({"when": {}, "config": TILES | wrong} for wrong in (
        {"BLOCK_M": "x"}, {"BLOCK_M": 48}, {"BLOCK_N": 8}, {"num_warps": 3}, {"num_stages": 0}, {"num_stages": True},
    )),
    *({"when": wrong, "config": TILES} for wrong in (
        {"max_seqlen": "9"}, {"max_head_dim": None}, {"mask": 1}, {"features": "bias"}, {"any_of": [[]]}, {"later": 1},
    )),
]  # fmt: skip
SPOILT = ["", "{", "[]", "null", '{"fwd": 3}', '{"fwd": {"config": 1}}', "\x00\x01", "[" * 100_000]


@pytest.mark.parametrize("text", SPOILT + [json.dumps({"fwd": [rule]}) for rule in SPOILT_RULES])
def test_a_spoilt_table_is_no_table(own_cache, text):
    """A half-written or foreign file in the cache breaks neither a call nor tuning, which replaces it."""
    target = Target(90, SHARED_MEMORY[90])
    right = tuning.choose("fwd", problem(64), target)
    table(own_cache).write_text(text)
    tuning.forget()
    assert tuning.choose("fwd", problem(64), target) == right
    best = tune.candidates("fwd", problem(64), target)[1]
    tune.tune("fwd", problem(64), target, measured(best))
    assert [rule["config"] for rule in json.loads(table(own_cache).read_text())["fwd"]] == [asdict(best)]


def test_tuning_beside_a_rule_written_by_hand(own_cache):
    """A rule may leave conditions out; it holds for more than a tuned one, so it comes after it."""
    target = Target(90, SHARED_MEMORY[90])
    table(own_cache).write_text(json.dumps({"fwd": [{"when": {}, "config": TILES}]}))
    tuning.forget()
    best = next(c for c in tune.candidates("fwd", problem(64), target) if asdict(c) != TILES)
    tune.tune("fwd", problem(64), target, measured(best))
    assert [rule["config"] for rule in json.loads(table(own_cache).read_text())["fwd"]] == [asdict(best), TILES]


def test_a_folder_that_cannot_be_written_is_named_before_measuring(own_cache, monkeypatch):
    (own_cache / "file").touch()
    folder = own_cache / "file" / "tables"
    monkeypatch.setenv("FLASHTRI_CACHE", str(folder))
    with pytest.raises(OSError, match=r"cannot write its table, set FLASHTRI_CACHE") as caught:
        tune.tune("fwd", problem(64), Target(90, SHARED_MEMORY[90]), lambda config: pytest.fail("measured"))
    assert caught.value.filename == str(folder)


def test_a_table_has_the_mode_of_any_file(own_cache):
    tune.tune("fwd", problem(64), Target(90, SHARED_MEMORY[90]), lambda config: 1.0)
    (own_cache / "plain").touch()
    assert table(own_cache).stat().st_mode == (own_cache / "plain").stat().st_mode


def test_tables_are_replaced_in_one_step(own_cache, monkeypatch):
    """A process that dies while writing leaves the old table and nothing else: the new one is moved into place whole."""
    target = Target(90, SHARED_MEMORY[90])
    candidates = tune.candidates("fwd", problem(64), target)
    tune.tune("fwd", problem(64), target, measured(candidates[1]))
    old = table(own_cache).read_text()

    def die(*arguments, **keywords):
        arguments[1].write('{"fwd": [')
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.json, "dump", die)
    with pytest.raises(KeyboardInterrupt):
        tune.tune("fwd", problem(128), target, measured(tune.candidates("fwd", problem(128), target)[1]))
    assert table(own_cache).read_text() == old
    assert {path.suffix for path in own_cache.iterdir()} <= {".json", ".lock"}


TUNER = """
import pathlib, sys, time, torch
from flashtri_core import tune
from flashtri_core.problem import Extras, Problem, describe
from flashtri_core.target import SHARED_MEMORY, Target
number, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
if sys.argv[3] == "file":
    tune.fcntl = None
(folder / f"ready{number}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
for n in range(12):
    ask = Problem(1, 4, 4, 64 << n, 64 << n, 16 << number, 16 << number, torch.bfloat16, 1.0)
    tune.tune("fwd", ask, Target(90, SHARED_MEMORY[90]), lambda config: 1.0)
"""


@pytest.mark.parametrize("lock", ["system", "file"])
def test_tuners_at_the_same_time_lose_nothing(own_cache, tmp_path_factory, lock):
    """Four processes that tune different problems at once: every rule of each is in the table."""
    folder = tmp_path_factory.mktemp("start")
    command = [sys.executable, "-c", TUNER]
    tuners = [subprocess.Popen([*command, str(number), str(folder), lock]) for number in range(4)]
    while len(list(folder.glob("ready*"))) < 4:
        assert all(tuner.poll() is None for tuner in tuners)
        time.sleep(0.01)
    (folder / "go").touch()
    assert [tuner.wait(timeout=120) for tuner in tuners] == [0] * 4
    rules = json.loads(table(own_cache).read_text())["fwd"]
    assert {(r["when"]["max_head_dim"], r["when"]["max_seqlen"]) for r in rules} == {
        (16 << number, 64 << n) for number in range(4) for n in range(12)
    }
    assert {path.suffix for path in own_cache.iterdir()} <= {".json", ".lock"}


@pytest.mark.parametrize("lock", ["system", "file"])
def test_a_lock_left_behind_holds_nobody_up(own_cache, monkeypatch, lock):
    """A tuner that was killed while it wrote: the next one goes on, at once or when the file is old."""
    if lock == "file":
        monkeypatch.setattr(tune, "fcntl", None)
    elif tune.fcntl is None:
        pytest.skip("this system has no locks of its own")
    left = own_cache / "table.lock"
    left.touch()
    os.utime(left, (0, 0))
    with tune.locked(left):
        assert lock == "system" or left.stat().st_mtime > 0
    assert left.exists() == (lock == "system")


def test_two_problems_keep_their_own_rules(own_cache):
    target = Target(90, SHARED_MEMORY[90])
    wants = {}
    for d in (128, 64):
        wants[d] = tune.candidates("fwd", problem(d), target)[3]
        tune.tune("fwd", problem(d), target, measured(wants[d]))
    assert {d: tuning.choose("fwd", problem(d), target) for d in wants} == wants


def test_candidates_fit_and_hold_the_shipped_one():
    for capability, limit in SHARED_MEMORY.items():
        target = Target(capability, limit)
        for kernel in KERNELS:
            found = tune.candidates(kernel, problem(128), target)
            assert found[0] == tuning.choose(kernel, problem(128), target)
            assert len(found) == len(set(found)) > 1
            assert all(tuning.shared_bytes(kernel, c, problem(128)) <= limit for c in found)


def test_the_interpreter_ignores_tables(own_cache):
    table(own_cache, INTERPRETER).write_text(
        '{"fwd": [{"config": {"BLOCK_M": 256, "BLOCK_N": 16, "num_warps": 1, "num_stages": 1}}]}'
    )
    assert tuning.choose("fwd", problem(64), INTERPRETER).BLOCK_M == 32


def shipped_configs(kernel, d, target=Target(90, SHARED_MEMORY[90])):
    """Every config that some problem with this head dimension gets on this target."""
    found = {
        tuning.choose(kernel, problem(d, n=n, **features), target)
        for n in (256, 2048, 16384)
        for features in ({}, {"causal": True}, {"window_left": 64}, {"bias": True}, {"mask": True})
    }
    return sorted(found, key=lambda c: (c.BLOCK_M, c.BLOCK_N, c.num_warps, c.num_stages))


def forced(monkeypatch, kernel, config):
    """Make one kernel use this config, whatever the table says."""
    usual = tuning.choose
    from flashtri_core.kernels import launch

    def choose(name, problem, target):
        return config if name == kernel else usual(name, problem, target)

    monkeypatch.setattr(launch, "choose", choose)
    monkeypatch.setattr(dispatch, "_unfit", lambda problem, device: "")
    monkeypatch.setattr(ops, "_plans", {})


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq", "dbias"])
@pytest.mark.parametrize(("m", "n"), [(16, 32), (64, 16), (32, 64), (128, 32)])
def test_any_tile_covers_everything(kernel, m, n, monkeypatch, poisoned):
    """Row 126: whatever the tile, every row of every gradient is written and right."""
    from flashtri_core.testing.plugin import INTERPRETER as LANE

    forced(monkeypatch, kernel, tuning.Config(m, n, 4, 1))
    case = Case("tile", heads=(2, 1), nq=45, nk=37, d=16, causal=True, bias="hqk" if kernel == "dbias" else "")
    LANE.check(LANE.inputs(case))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_shipped_config_is_right_and_repeats(kernel, d, monkeypatch, poisoned):
    """Rows 82, 126: each config forced in turn is within budget, writes every row, and gives the same bits 20 times."""
    target = (
        Target(90, SHARED_MEMORY[90])
        if torch.cuda.get_device_capability() == (9, 0)
        else dispatch.target_of(torch.device("cuda"))
    )
    case = Case("config", heads=(4, 2), nq=1024, nk=1024, d=d, causal=True)
    given = cases.inputs(case, torch.bfloat16, "cuda")
    right, eager = cases.exact(given), cases.exact(given, torch.bfloat16)
    from flashtri_core.testing import budget

    for config in shipped_configs(kernel, d, target):
        forced(monkeypatch, kernel, config)
        first = cases.run(given, "triton")
        budget.check(first, right, eager)
        for _ in range(19):
            again = cases.run(given, "triton", backward=kernel != "fwd")
            assert all(torch.equal(first[name], again[name]) for name in again), config


@lanes()
def test_the_first_call_is_like_the_second(lane, monkeypatch):
    """Rows 128, 129: with no plan and no table yet, the first result of each new shape equals the second."""
    monkeypatch.setattr(ops, "_plans", {})
    for nq in (33, 47, 20):
        given = cases.inputs(Case("cold", heads=(2, 1), nq=nq, nk=nq, d=16, causal=True), lane.dtype, lane.device)
        first, second = lane.run(given), lane.run(given)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("shape", "batch", "share"),
    [
        ((1, 4, 64, 64), 1, 1), ((2, 4, 64, 64), 2, 1), ((1, 4, 64, 64), 2, 2), ((1, 4, 64, 64), 3, None),
        ((2, 1, 64, 64), 2, None), ((2, 4, 1, 64), 2, None), ((2, 4, 64, 1), 2, None),
    ],
)  # fmt: skip
def test_dbias_comes_with_dq_where_one_program_owns_its_tiles(shape, batch, share):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from flashtri_core.kernels.launch import batch_entries_of_one_program

    problem = Problem(batch, 4, 4, 64, 64, 64, 64, torch.bfloat16, 0.1, total_q=64, total_k=64, bias=True)
    hopper = Target(90, SHARED_MEMORY[90])
    assert batch_entries_of_one_program(problem, torch.empty(shape), hopper) == share
    assert batch_entries_of_one_program(problem, torch.empty(shape), Target(80, SHARED_MEMORY[80])) is None

"""Several processes, several devices: gloo training equals one process, and tables of tile sizes stay whole and apart."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashtri_core import target, tune, tuning
from flashtri_core.problem import Problem
from flashtri_core.target import SHARED_MEMORY, Target

WORKER = Path(__file__).with_name("train_worker.py")
spec = importlib.util.spec_from_file_location("train_worker", WORKER)
train_worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_worker)

CASES = [(wrapper, features, False) for wrapper in ("ddp", "fsdp2") for features in (False, True)]


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{}-processes".format)
def world(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def alone(world: int) -> dict[bool, dict]:
    """The run in one process on the same batches, in fp64, by whether the attention has features."""
    batch, cpu = train_worker.batch_for(world), torch.device("cpu")
    return {f: train_worker.train(train_worker.make_model(f, torch.float64), cpu, batch) for f in (False, True)}


@pytest.fixture(scope="module")
def together(world: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases trained by some processes that meet once."""
    folder = tmp_path_factory.mktemp("gloo")
    settings = {
        "device": "cpu", "dtype": "float64", "precision": None, "cases": CASES,
        "meet": str(folder / "meet"), "out": str(folder / "results.pt"),
    }  # fmt: skip
    return train_worker.launch(settings, world, folder)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")
@pytest.mark.parametrize(("wrapper", "features", "compiled"), CASES)
def test_equals_one_process(
    alone: dict[bool, dict], together: dict[str, dict], wrapper: str, features: bool, compiled: bool
) -> None:
    want, got = alone[features], together[f"{wrapper}-{features}-{compiled}"]
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-12, atol=0)
    assert want["losses"][-1] < want["losses"][0]
    for kind in ("gradients", "weights"):
        assert got[kind].keys() == want[kind].keys()
        for name, reference in want[kind].items():
            torch.testing.assert_close(
                got[kind][name], reference, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


def problem(seqlen: int) -> Problem:
    return Problem(1, 4, 4, seqlen, seqlen, 64, 64, torch.bfloat16, 0.125)


LENGTHS = range(64, 64 * 60, 64)
FASTEST = [tuning.Config(64, 32, 4, 2), tuning.Config(128, 32, 4, 2)]  # What the clock of each process says.
TUNE = """
import sys
from flashtri_core.target import SHARED_MEMORY, Target
from flashtri_core.tune import tune
sys.path.insert(0, sys.argv[1])
from test_distributed import FASTEST, LENGTHS, problem
here = Target(90, SHARED_MEMORY[90])
print("ready", flush=True)
sys.stdin.readline()
for seqlen in LENGTHS:
    tune("fwd", problem(seqlen), here, lambda config: 1.0 if config == FASTEST[int(sys.argv[2])] else 2.0)
"""


def test_table_written_by_several_processes_stays_whole(tmp_path: Path) -> None:
    """Whoever reads while two processes tune finds a whole table; no rule is lost, and none there that neither wrote."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TUNE, str(Path(__file__).parent), str(number)],
            env=os.environ | {"FLASHTRI_CACHE": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    reads = 0
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        while any(process.poll() is None for process in processes):
            if (tmp_path / "sm_90.json").exists():
                json.loads((tmp_path / "sm_90.json").read_text())
                reads += 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    assert reads > 10
    rules = json.loads((tmp_path / "sm_90.json").read_text())["fwd"]
    assert {rule["when"]["max_seqlen"] for rule in rules} == set(LENGTHS)
    assert all(rule["config"] in [asdict(config) for config in FASTEST] for rule in rules)
    assert {p.name for p in tmp_path.iterdir()} - {"sm_90.lock"} == {"sm_90.json"}  # the lock stays where fcntl is


def test_each_compute_capability_has_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of two compute capabilities in one machine, here by name only: neither takes tiles tuned on the other."""
    kinds = [Target(80, SHARED_MEMORY[80]), Target(90, SHARED_MEMORY[90])]
    monkeypatch.setattr(target, "_cuda_target", kinds.__getitem__)
    monkeypatch.setenv("FLASHTRI_CACHE", str(tmp_path))
    tuning.forget()
    devices = [torch.device("cuda", index) for index in range(2)]
    shipped = [tuning.choose("fwd", problem(512), target.target_of(device)) for device in devices]
    best = tune.candidates("fwd", problem(512), kinds[1])[2]
    tune.tune("fwd", problem(512), kinds[1], lambda config: 1.0 if config == best else 2.0)
    chosen = [tuning.choose("fwd", problem(512), target.target_of(device)) for device in devices]
    assert chosen == [shipped[0], best]
    assert best != shipped[1]
    monkeypatch.undo()
    tuning.forget()

"""Data-parallel training over gloo: processes that share a batch take the steps of one process that has all of it."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

WORKER = Path(__file__).with_name("train_worker.py")
spec = importlib.util.spec_from_file_location("train_worker", WORKER)
train_worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_worker)

CASES = [(wrapper, features, False) for wrapper in ("ddp", "fsdp2") for features in (False, True)]


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict]:
    """The run in one process, in fp64, by whether the attention has features."""
    return {
        f: train_worker.train(train_worker.make_model(f, torch.float64), torch.device("cpu")) for f in (False, True)
    }


@pytest.fixture(scope="module", params=[2, 4], ids="{}-processes".format)
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases trained by some processes that meet once."""
    folder = tmp_path_factory.mktemp("gloo")
    settings = {
        "device": "cpu", "dtype": "float64", "precision": None, "cases": CASES,
        "meet": str(folder / "meet"), "out": str(folder / "results.pt"),
    }  # fmt: skip
    return train_worker.launch(settings, request.param, folder)


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

"""On a machine with several GPUs: the right device and the right stream, and data-parallel training over NCCL.

    python -m pytest -p flashtri_core.gpu_report --gpu-report=packages/modules/tests/multi_gpu_report.json \
        -m multi_gpu packages
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashtri_core import flash_attn, flash_attn_varlen, supports

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(COUNT < 2, reason=f"needs two GPUs, this machine has {COUNT}"),
]
B, H, HK, N, D = 2, 8, 2, 1024, 128

WORKER = Path(__file__).with_name("train_worker.py")
spec = importlib.util.spec_from_file_location("train_worker", WORKER)
train_worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_worker)


@pytest.fixture(autouse=True)
def first_device_stays_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


@pytest.fixture(params=["triton", "hopper"])
def impl(request: pytest.FixtureRequest) -> str:
    q, k, v, _ = inputs(1)
    support = supports(q, k, v, causal=True, impl=request.param)
    if not support:
        pytest.skip(f"impl={request.param!r} does not run here: {support.reason}")
    return request.param


def inputs(device: int, seed: int = 0, rows: int = N) -> list[Tensor]:
    """q, k, v as leaves and the gradient of the output, bf16; the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, rows, D), (B, HK, rows, D), (B, HK, rows, D), (B, H, rows, D))
    q, k, v, g = (torch.randn(s, generator=generator).to(f"cuda:{device}", torch.bfloat16) for s in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g]


def forward_backward(tensors: list[Tensor], impl: str) -> list[Tensor]:
    q, k, v, g = tensors
    out = flash_attn(q, k, v, causal=True, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), g)]


def assert_right(results: list[Tensor], tensors: list[Tensor]) -> None:
    """Against SDPA in fp32 on the same device; the tolerance is bf16's, and a wrong stream is far outside of it."""
    leaves = [t.detach().float().requires_grad_() for t in tensors[:3]]
    q, k, v = leaves[0], *(t.repeat_interleave(H // HK, dim=1) for t in leaves[1:])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    want = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].float())]
    for got, reference in zip(results, want, strict=True):
        assert got.device == tensors[0].device
        torch.testing.assert_close(got.float(), reference, atol=0.02 * reference.abs().max().item(), rtol=0)


FIRST_CALL = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import test_multi_gpu as t
tensors = t.inputs(1)
results = t.forward_backward(tensors, sys.argv[2])
assert torch.cuda.current_device() == 0
assert torch.cuda.memory_allocated(0) == 0, "something was allocated on the current device"
t.assert_right(results, tensors)
"""


def test_first_call_of_a_process(impl: str, tmp_path: Path) -> None:
    """Compiling and choosing tiles happen for the tensors' device, too: empty caches, and cuda:0 never touched."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "FLASHTRI_CACHE": str(tmp_path / "flashtri"),
    }
    command = [sys.executable, "-c", FIRST_CALL, str(Path(__file__).parent), impl]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", range(1, max(COUNT, 2)))
def test_other_than_the_current_device(impl: str, device: int) -> None:
    tensors = inputs(device)
    assert_right(forward_backward(tensors, impl), tensors)


def test_interleaved_devices(impl: str) -> None:
    """Forwards of all devices, then all of them again in reverse, then one backward through everything."""
    tensors = [inputs(device) for device in range(COUNT)]
    order = [*tensors, *reversed(tensors)]
    outs = [flash_attn(q, k, v, causal=True, impl=impl) for q, k, v, _ in order]
    for first, second in zip(outs[:COUNT], reversed(outs[COUNT:]), strict=True):
        assert torch.equal(first, second)
    sum((out.float() * g.float()).sum().to("cuda:0") for out, (_, _, _, g) in zip(outs, order, strict=True)).backward()
    for (q, k, v, _), out in zip(tensors, outs[:COUNT], strict=True):
        assert_right([out.detach(), *(t.grad / 2 for t in (q, k, v))], tensors[out.device.index])


@pytest.mark.parametrize("first_call", [False, True])
def test_side_stream_of_another_device(impl: str, first_call: bool) -> None:
    """The kernels wait for what the tensors' device's current stream still has to do, not for another stream's work.

    A first call chooses its tiles meanwhile: its shapes are no other test's, its kernels are compiled beforehand.
    """
    forward_backward(inputs(1, seed=1), impl)
    tensors = inputs(1, seed=1, rows=N - 64 if first_call else N)
    late = [torch.zeros_like(t).requires_grad_(t.requires_grad) for t in tensors]
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        with torch.cuda.device(1), torch.no_grad():
            torch.cuda._sleep(200_000_000)  # About 0.1 s, in which a kernel on any other stream would read zeros.
            for to, source in zip(late, tensors, strict=True):
                to.copy_(source, non_blocking=True)
        results = forward_backward(late, impl)
    stream.synchronize()
    assert_right(results, tensors)


def test_varlen_on_another_device(impl: str) -> None:
    q, k, v, g = (t.detach()[0].transpose(0, 1).requires_grad_() for t in inputs(1))
    cu_seqlens = torch.tensor([0, 300, 300, N], dtype=torch.int32, device="cuda:1")
    out = flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, 724, 724, causal=True, impl=impl)
    gradients = torch.autograd.grad(out, (q, k, v), g)
    for start, end in ((0, 300), (300, N)):
        piece = [t.detach()[start:end].transpose(0, 1)[None].requires_grad_() for t in (q, k, v)]
        alone = flash_attn(*piece, causal=True, impl=impl)
        want = [alone, *torch.autograd.grad(alone, piece, g.detach()[start:end].transpose(0, 1)[None])]
        for a, b in zip((out, *gradients), want, strict=True):
            torch.testing.assert_close(a[start:end].transpose(0, 1)[None], b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("device", range(max(COUNT, 2)))
def test_cuda_graph_on_each_device(impl: str, device: int) -> None:
    """Captured while cuda:0 is current outside the capture, replayed on new values."""
    static = inputs(device)
    stream = torch.cuda.Stream(device=device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward_backward(static, impl)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device=device)):
        results = forward_backward(static, impl)
    fresh = inputs(device, seed=2)
    with torch.no_grad():
        for to, source in zip(static, fresh, strict=True):
            to.copy_(source)
    graph.replay()
    torch.cuda.synchronize(device)
    assert_right(results, fresh)


def test_compile_on_another_device(impl: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn(q, k, v, causal=True, impl=impl), fullgraph=True)
    q, k, v, g = tensors = inputs(1)
    out = compiled(q, k, v)
    assert_right([out.detach(), *torch.autograd.grad(out, (q, k, v), g)], tensors)


CASES = [(w, features, compiled) for w in ("ddp", "fsdp2") for features in (False, True) for compiled in (False, True)]


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict]:
    """The run on one GPU on the same batches with bf16 autocast, by whether the attention has features."""
    device, batch = torch.device("cuda", 0), train_worker.batch_for(COUNT)
    return {
        f: train_worker.train(
            train_worker.make_model(f, torch.float32).to(device), device, batch, precision=torch.bfloat16
        )
        for f in (False, True)
    }


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases trained by one process per GPU, over NCCL."""
    folder = tmp_path_factory.mktemp("nccl")
    settings = {
        "device": "cuda", "dtype": "float32", "precision": "bfloat16", "cases": CASES,
        "meet": str(folder / "meet"), "out": str(folder / "results.pt"),
    }  # fmt: skip
    return train_worker.launch(settings, COUNT, folder)


@pytest.mark.parametrize(("wrapper", "features", "compiled"), CASES)
def test_data_parallel_equals_one_gpu(
    alone: dict[bool, dict], together: dict[str, dict], wrapper: str, features: bool, compiled: bool
) -> None:
    want, got = alone[features], together[f"{wrapper}-{features}-{compiled}"]
    torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-2, atol=0)
    assert got["losses"][-1] < got["losses"][0]
    for name, reference in want["gradients"].items():
        # bf16 rounds each share of the batch by itself: a few percent. A rank left out or a sum for a mean is far more.
        error = (got["gradients"][name] - reference).norm() / reference.norm()
        assert error < 0.08, f"{name}: off by {error:.3f} of its norm"

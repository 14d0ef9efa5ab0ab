"""The first forward compiles its backward's kernels in a thread: the same kernels, once, and nothing is left behind."""

import json
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest
import torch

from flashtri_core import ahead
from flashtri_core.problem import Problem
from flashtri_core.target import INTERPRETER, SHARED_MEMORY, Target

PROBLEM = Problem(2, 4, 4, 1000, 1000, 64, 64, torch.bfloat16, 0.125, causal=True, total_q=1000, total_k=1000)
HOPPER, DEVICE = Target(90, SHARED_MEMORY[90]), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is neither there nor capturing a graph."""
    monkeypatch.setattr(ahead, "_tried", set())
    monkeypatch.setattr(ahead, "target_of", lambda device: HOPPER)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_kind_of_call_is_due_once(gpu):
    assert ahead.due(PROBLEM, DEVICE, "auto")
    assert not ahead.due(PROBLEM, DEVICE, "auto")
    assert not ahead.due(replace(PROBLEM, batch=7, seqlen_q=600, total_q=600), DEVICE, "auto")
    for other in (
        {"seqlen_k": 5000},
        {"head_dim": 128},
        {"causal": False},
        {"softcap": 1.0},
        {"dtype": torch.float16},
        {"softmax_scale": -0.125},
        {"dropout_p": 0.1},
        {"window_left": 100},
        {"window_left": 5000},
        {"window_right": 0},
    ):
        assert ahead.due(replace(PROBLEM, **other), DEVICE, "auto"), other
    for known in (
        {"softmax_scale": 0.3},
        {"softcap": 2.0},
        {"dropout_p": 0.2},
        {"window_left": 99},
    ):  # a schedule's next step
        assert not ahead.due(replace(PROBLEM, **known), DEVICE, "auto"), known
    assert ahead.due(PROBLEM, torch.device("cuda", 1), "auto")
    assert ahead.due(PROBLEM, DEVICE, "triton")


def test_nothing_is_due_in_a_captured_graph(gpu, monkeypatch):
    """Loading a kernel from another thread would break the capture; the first call outside of one is due all the same."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not ahead.due(PROBLEM, DEVICE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert ahead.due(PROBLEM, DEVICE)


def test_nothing_is_due_where_nothing_is_compiled(gpu, monkeypatch):
    monkeypatch.setattr(ahead, "target_of", lambda device: INTERPRETER)
    assert not ahead.due(PROBLEM, DEVICE)


@pytest.fixture
def driver():
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime import driver

    from flashtri_core.testing.aot import StubDriver

    previous = driver._active
    driver.set_active(StubDriver(HOPPER))
    yield
    driver._active = previous


def test_both_have_ended_when_the_body_has(driver):
    """A compilation that outlives the forward would delay the process's exit, and not survive a fork."""
    body_runs, seen = threading.Event(), []

    def compilation():
        assert body_runs.wait(60)
        seen.append(threading.current_thread())

    with ahead.beside(compilation, -1):
        body_runs.set()  # the compilation waits for it: they run side by side
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()


def test_errors_of_the_body_alone_come_through(driver):
    ended = []

    def compilation():
        ended.append(threading.current_thread())
        raise RuntimeError("of the compilation")

    with ahead.beside(compilation, -1):
        pass
    with pytest.raises(KeyError, match="of the body"), ahead.beside(compilation, -1):
        raise KeyError("of the body")
    assert len(ended) == 2
    assert not any(thread.is_alive() for thread in ended)


def test_without_a_thread_the_body_runs(driver, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    ran = []
    with ahead.beside(lambda: ran.append("compilation"), -1):
        ran.append("body")
    assert ran == ["body"]


def test_warning_filters_stay_as_they_were(driver):
    """Triton changes them for every node that it compiles; left and right, two threads restore what the other has set."""
    entered, both_entered, left = threading.Event(), threading.Event(), threading.Event()

    def compilation():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entered.set()
            assert both_entered.wait(60)
        left.set()

    before = list(warnings.filters)
    with ahead.beside(compilation, -1):
        assert entered.wait(60)
        with warnings.catch_warnings():
            both_entered.set()
            assert left.wait(60)
    assert warnings.filters == before


HASH = """
import json, threading, torch
found = {}
import flashtri_core
from flashtri_core import ahead
from triton.runtime import cache
ours = [call for call, _ in torch.cuda._queued_calls if call.__module__ == ahead.__name__]
found["import"] = threading.active_count(), cache.triton_key.cache_info().misses
for call in ours:
    call()  # as torch does when CUDA is initialised
ahead.wait_for_hash()
found["initialised"] = threading.active_count(), cache.triton_key.cache_info().misses
print(json.dumps(found))
"""


def test_triton_is_hashed_when_cuda_is_initialised():
    """Not before: a process without a GPU has no use for it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    assert output_of(HASH) == {"import": [1, 0], "initialised": [1, 1]}


PROGRAM = """
import hashlib, json, sys, tempfile, threading, torch, triton
from pathlib import Path
from unittest import mock
from triton import knobs
from triton.runtime.jit import JITFunction
from flashtri_core import flash_attn, ops
from flashtri_core.testing import host_path

impl, seen = sys.argv[1], []

def listener(src, metadata, metadata_group, times, cache_hit):
    cubin = next(Path(path) for name, path in metadata_group.items() if name.endswith(".cubin"))
    seen.append([src.name, cache_hit, threading.current_thread().name, hashlib.sha256(cubin.read_bytes()).hexdigest()])

knobs.compilation.listener = listener
q, k, v = (torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
sink, slopes = torch.zeros(4, requires_grad=True), torch.zeros(4)

def both():
    out = flash_attn(q, k, v, causal=True, alibi_slopes=slopes, learnable_sink=sink, impl=impl)
    forward, sympy = seen.copy(), "sympy" in sys.modules
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    torch.autograd.grad(out, (q, k, v, sink), torch.zeros_like(out))
    found = {"forward": forward, "backward": seen[len(forward):], "threads": threads, "sympy": sympy}
    seen.clear()
    return found

def not_in_threads(*arguments, compile=triton.compiler.compile, **options):
    if threading.current_thread().name.startswith("flashtri"):
        raise RuntimeError("the compiler failed")
    return compile(*arguments, **options)

def afresh():
    knobs.cache.dir = tempfile.mkdtemp(dir=folder)
    ops._plans.clear()
    ops.ahead._tried.clear()
    for x in {x for name, m in sys.modules.items() if name.startswith("flashtri_core.kernels") for x in vars(m).values()
              if isinstance(x, JITFunction)}:
        x.device_caches.clear()

with tempfile.TemporaryDirectory() as folder:
    host_path.build_driver(folder)
    with host_path.pretend_sm90():
        afresh()
        found = {"beside": both()}
        afresh()
        with mock.patch.object(triton.compiler, "compile", not_in_threads):
            found["failed"] = both()
print(json.dumps(found))
"""


KEYS = """
import json, sys, tempfile, threading, torch
from dataclasses import replace
from unittest import mock
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from flashtri_core import ahead, ops
from flashtri_core.kernels import quick
from flashtri_core.testing import cases, host_path

seen, found = [], {}

def compile_nothing(kernel, key, signature, device, *rest):
    seen.append((kernel.fn.__name__, threading.current_thread().name))
    kernel.device_caches[device][0][key] = binary = mock.MagicMock(spec=["run", "src", "metadata", "launch_metadata", "function",
                                                                         "packed_metadata"])
    return binary

with tempfile.TemporaryDirectory() as folder:
    host_path.build_driver(folder)
    with host_path.pretend_sm90():
        from flashtri_core.kernels.hopper import common
        driver.active.launcher_cls = lambda src, metadata: None
        mock.patch.object(JITFunction, "_do_compile", compile_nothing).start()
        for launch in quick.QuickLaunch, common.Launches:
            mock.patch.object(launch, "__init__", lambda self, *arguments: None).start()
        kernels = [x for name, m in list(sys.modules.items()) if name.startswith("flashtri_core.kernels")
                   for x in vars(m).values() if isinstance(x, JITFunction)]
        for impl in "triton", "hopper":
            for name, case in cases.CASES.items():
                given = cases.inputs(case.grown(2, 4), torch.bfloat16)
                leaves = {n: given.tensors[n].detach().requires_grad_() for n in given.differentiable}
                for kernel in kernels:
                    kernel.device_caches.clear()
                ops._plans.clear(), ahead._tried.clear(), seen.clear()
                try:
                    out = cases.call(replace(given, tensors=given.tensors | leaves), impl)
                    forward = seen.copy()
                    torch.autograd.grad(out, list(leaves.values()), given.do)
                except NotImplementedError:
                    continue
                beside = [kernel for kernel, thread in forward if thread == "flashtri-backward"]
                found[f"{impl} {name}"] = beside, [kernel for kernel, _ in seen[len(forward):]]
print(json.dumps([found, "torch._dynamo" in sys.modules]))
"""


def output_of(program, *arguments):
    """What a program prints that pretends to have a GPU: its process is good for nothing else then."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: Triton's driver library cannot be built")
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.aot
def test_whatever_the_features_nothing_is_left_to_compile():
    """By the keys of Triton's cache. Misaligned tensors are left to the backward: outlines have no such address."""
    found, dynamo = output_of(KEYS)
    assert len(found) > 100
    assert not dynamo  # which torch imports for arithmetic with tensors without memory, in a second or two
    misaligned = {name for name in found if "misaligned" in name}
    assert misaligned
    assert {name for name, (_, late) in found.items() if late} == misaligned
    assert {name for name, (beside, _) in found.items() if not beside} == misaligned


@pytest.mark.aot
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_the_thread_compiles_what_the_backward_launches(impl):
    """Once, with the same code; and where it fails, the backward compiles by itself, and would raise by itself."""
    found = output_of(PROGRAM, impl)
    beside, failed = found["beside"], found["failed"]
    assert beside["backward"] == []
    assert not beside["sympy"]  # which torch imports for the shapes of some tensors without memory, in 0.3 s
    assert not any(name.startswith("flashtri") for name in beside["threads"])
    assert {name: thread.startswith("flashtri-backward") for name, _, thread, _ in beside["forward"]} == {
        name: "_bwd_" in name for name, *_ in failed["forward"] + failed["backward"]
    }
    assert not any(hit for _, hit, *_ in beside["forward"] + failed["forward"] + failed["backward"])
    assert ["_bwd_" in name for name, *_ in failed["forward"]] == [False]
    codes = [sorted([name, code] for name, _, _, code in x["forward"] + x["backward"]) for x in (beside, failed)]
    assert codes[0] == codes[1]

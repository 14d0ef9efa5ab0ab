"""What one worker process does with one case: make the inputs, check every peer, then measure.

Each step is announced before it begins. Whoever watches the process knows then which peer to blame when nothing
follows.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import memory, training
from .cases import BY_ID, Case
from .checks import OURS_MAX, PEER_MAX, Check, Error, Reference, dropout_is_plausible
from .inputs import DTYPES, Inputs, draw
from .peers import PEERS, Call
from .results import MEASURES
from .timing import Clock, HangError, Timed, clock_for, host_time, interleave

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Unit:
    """One case to measure in one process.

    Attributes:
        case: Id of the case.
        peers: Names of the peers.
        ops: Passes to time.
        dtype: Element type.
        device: "cuda" or "cpu".
        smoke: Cut the size down.
        window_ms, least, most: See `timing.interleave`.
        hang_s: Device time after which a peer counts as hung.
    """

    case: str
    peers: tuple[str, ...]
    ops: tuple[str, ...]
    dtype: str
    device: str
    smoke: bool = False
    window_ms: float = 400.0
    least: int = 15
    most: int = 60
    hang_s: float = 60.0

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Unit:
        """From parsed JSON."""
        return cls(**(fields | {"peers": tuple(fields["peers"]), "ops": tuple(fields["ops"])}))

    @property
    def problem(self) -> Case:
        """The case at the size to run."""
        case = BY_ID[self.case]
        return case.smoke() if self.smoke else case


class Bench:
    """A unit being measured.

    Args:
        unit: What to measure.
        emit: Where events go.
    """

    def __init__(self, unit: Unit, emit: Emit) -> None:
        self.unit, self.case, self.emit = unit, unit.problem, emit
        self.clock: Clock = clock_for(unit.device, unit.hang_s)

    def step(self, peer: str | None, what: str) -> None:
        """Announce what comes next."""
        self.emit({"event": "step", "case": self.unit.case, "peer": peer, "what": what})

    def skip(self, peer: str, reason: str) -> None:
        """Report that a peer gives no row."""
        for op in self.unit.ops:
            self.emit({"event": "skip", "case": self.unit.case, "op": op, "impl": peer, "reason": reason})

    def row(self, call: Call, op: str, check: dict[str, Any], metric: str, measure: dict[str, Any]) -> None:
        """Report a measurement."""
        row = {"case": self.unit.case, "op": op, "impl": call.peer, "metric": metric, "resolved": call.resolved}
        self.emit({"event": "row", "row": row | {"check": check, MEASURES[metric]: measure}})

    @contextmanager
    def guarded(self, peer: str, what: str) -> Iterator[None]:
        """Announce a step; what a peer raises in it becomes the reason for its missing row."""
        self.step(peer, what)
        try:
            yield
        except RefusedError as refused:
            self.skip(peer, str(refused))
        except torch.OutOfMemoryError:
            self.skip(peer, f"out of memory in {what}")
        except Exception as error:  # a peer may raise anything, and the next peer must still run
            if self.unit.device == "cuda" and poisons(error):
                raise
            self.skip(peer, _sentence(error))

    def inputs(self) -> Inputs:
        """Draw the tensors."""
        self.step(None, "inputs")
        return draw(self.case, DTYPES[self.unit.dtype], self.unit.device)

    def prepare(self, peer: str, inputs: Inputs) -> Call:
        """Make a peer ready, or raise the reason why not."""
        adapter = PEERS[peer]
        reason = adapter.unavailable(self.unit.device) or adapter.refuses(inputs.case)
        if reason is not None:
            raise RefusedError(reason)
        return adapter.prepare(inputs)

    def checked(self, call: Call, reference: Reference) -> Check:
        """Run both passes and compare them with fp64.

        Raises:
            RefusedError: The result is wrong.
        """
        ours = PEERS[call.peer].ours
        if reference.inputs.case.dropout:
            self._check_dropout(call)
            plain = dataclasses.replace(reference.inputs.case, dropout=0.0)
            call = PEERS[call.peer].prepare(dataclasses.replace(call.inputs, case=plain))
        with torch.no_grad(), call.around():
            alone = call.inputs.canonical(call.forward(), call.layout)
        self.clock.wait(call.peer)
        without = reference.compare({"out": alone}, ours)
        if not without.ok:
            raise RefusedError("without gradients: " + without.reason)
        if not self.needs_backward:
            return without
        results = call.results()
        self.clock.wait(call.peer)
        if ours and call.missing:
            raise RefusedError(f"wrong result: no gradient {', '.join(call.missing)}")
        check = reference.compare(results, ours)
        if not check.ok:
            raise RefusedError(check.reason)
        return check

    @property
    def needs_backward(self) -> bool:
        """Whether any pass computes gradients."""
        return any(op != "fwd" for op in self.unit.ops)

    def _check_dropout(self, call: Call) -> None:
        _, _, v, dout = call.inputs.laid_out(call.layout)
        kept = v.detach().clone(), dout.clone()
        try:
            with torch.no_grad():
                v.fill_(1.0)
                dout.fill_(1.0)
            found = call.results()
            self.clock.wait(call.peer)
            reason = dropout_is_plausible(found["out"], found["dv"])
        finally:
            with torch.no_grad():
                v.copy_(kept[0])
                dout.copy_(kept[1])
        if reason is not None:
            raise RefusedError(reason)

    def calls(self) -> tuple[dict[str, Call], dict[str, Check]]:
        """Every peer that computes the case rightly, ready to be timed."""
        inputs = self.inputs()
        reference: Reference | None = None
        calls: dict[str, Call] = {}
        checks: dict[str, Check] = {}
        for peer in self.unit.peers:
            with self.guarded(peer, "first call"):
                call = self.prepare(peer, inputs)
                if reference is None:
                    self.step(None, "reference")
                    reference = Reference(inputs, every=self.case.kind == "error")
                    self.step(peer, "first call")
                checks[peer] = self.checked(call, reference)
                calls[peer] = call
        return calls, checks

    def timed(self, call: Call, op: str) -> Timed:
        """A call's pass as something to time."""
        if op == "fwd":
            return Timed(call.forward, lambda: _both(torch.no_grad(), call.around()))
        if op == "fwd_bwd":
            return Timed(lambda: call.backward(call.forward()), call.around)
        with call.around():
            out = call.forward()
        return Timed(lambda: call.backward(out, keep=True))


class RefusedError(RuntimeError):
    """A peer does not compute this case; the message is the reason."""


@contextmanager
def _both(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def poisons(error: Exception) -> bool:
    """Whether the process can't use its GPU any more."""
    sticky = getattr(torch, "AcceleratorError", HangError)  # since torch 2.8
    return isinstance(error, (sticky, HangError)) or "CUDA error" in str(error)


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:3]) if lines else "no message"
    return f"{type(error).__name__}: {text}"[:240]


def measure_time(bench: Bench) -> None:
    """Forward, backward and both, all peers interleaved."""
    unit = bench.unit
    calls, checks = bench.calls()
    for op in unit.ops:
        timed: dict[str, Timed] = {}
        for peer, call in calls.items():
            with bench.guarded(peer, f"first {op}"):
                candidate = bench.timed(call, op)
                with candidate.around():
                    candidate.fn()
                bench.clock.wait(peer)
                timed[peer] = candidate
        if not timed:
            continue
        bench.step(None, f"timing {op}")
        times = interleave(timed, bench.clock, window_ms=unit.window_ms * len(timed), least=unit.least, most=unit.most)
        for peer, spread in times.items():
            bench.row(calls[peer], op, checks[peer].as_dict(), "time", spread.as_dict())


def measure_host(bench: Bench) -> None:
    """The processor's time per call."""
    calls, checks = bench.calls()
    for peer, call in calls.items():
        for op in bench.unit.ops:
            with bench.guarded(peer, f"host time {op}"):
                spread = host_time(bench.timed(call, op), bench.clock, peer)
                bench.row(call, op, checks[peer].as_dict(), "host", spread.as_dict())


def measure_memory(bench: Bench) -> None:
    """Peak of one forward and backward under the cap. The check runs at the ladder's first length, where fp64 fits."""
    unit, case, cuda = bench.unit, bench.case, bench.unit.device == "cuda"
    meter: memory.Meter = memory.CudaMeter() if cuda else memory.ProcessMeter()
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory.CAP_BYTES / total))
    small = dataclasses.replace(case, seqlen_q=min(case.seqlen_q, 1024), seqlen_k=min(case.seqlen_k, 1024))
    reference = Reference(draw(small, DTYPES[unit.dtype], unit.device))
    for peer in unit.peers:
        _drop_caches(cuda)
        with bench.guarded(peer, "memory"):
            ready = bench.prepare(peer, reference.inputs)
            check = bench.checked(ready, reference).as_dict()
            sizes: dict[str, Any] = {"oom": False, "cap_bytes": memory.CAP_BYTES}
            try:
                peak = _peak(bench, peer, meter)
                sizes |= {"peak_bytes": peak.peak_bytes, "extra_bytes": peak.extra_bytes}
            except torch.OutOfMemoryError:
                sizes |= {"oom": True, "peak_bytes": None, "extra_bytes": None}
            bench.row(ready, "fwd_bwd", check, "memory", sizes)
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _peak(bench: Bench, peer: str, meter: memory.Meter) -> memory.Peak:
    """Peak of a peer with nothing else in memory."""
    inputs = draw(bench.case, DTYPES[bench.unit.dtype], bench.unit.device)
    call = bench.prepare(peer, inputs)
    inputs.keep_only(call.layout)

    def both() -> list[Tensor]:
        with call.around():
            out = call.forward()
        grads = call.backward(out)
        bench.clock.wait(peer)
        return [out, *(g for g in grads if g is not None)]

    return memory.measure(both, meter)


def measure_error(bench: Bench) -> None:
    """Errors against fp64 of output and gradients, all heads."""
    calls, checks = bench.calls()
    for peer, call in calls.items():
        errors: dict[str, Error] = dict(checks[peer].errors)
        measure = {"inputs": bench.case.inputs} | {n: errors[n].as_dict() for n in ("out", "dq", "dk", "dv")}
        bench.row(call, "fwd_bwd", checks[peer].as_dict(), "error", measure)


def measure_training(bench: Bench) -> None:
    """One optimiser step, all peers interleaved, each with its own copy of the same model."""
    unit, case = bench.unit, bench.case
    dtype, vocabulary = DTYPES[unit.dtype], 256 if unit.smoke else training.VOCABULARY
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (case.batch, case.seqlen_q + 1), device=unit.device)
    plain = training.plain(case)
    # Without a batch of tensors an adapter has no options to read; these are never computed with.
    inputs = bench.inputs()
    with torch.device(unit.device):
        exact = training.Model(case, plain, True, vocabulary)
    base = training.Model.with_attention(exact, plain, True).to(dtype)
    want = training.first_gradient(exact.double() if unit.smoke else exact, tokens).double()
    eager = (training.first_gradient(base, tokens).double() - want).abs().max().item()
    del exact
    calls: dict[str, Call] = {}
    checks: dict[str, dict[str, Any]] = {}
    steps: dict[str, Timed] = {}
    for peer in unit.peers:
        with bench.guarded(peer, "first step"):
            call = bench.prepare(peer, inputs)
            model = base.with_attention(call.attend, call.layout == "bhnd")
            with call.around():
                got = training.first_gradient(model, tokens).double()
            bench.clock.wait(peer)
            factor = OURS_MAX if PEERS[peer].ours else PEER_MAX
            error = (got - want).abs().max().item()
            budget = factor * eager + torch.finfo(dtype).eps * want.abs().max().item()
            if not error <= budget:
                raise RefusedError(f"wrong gradient: off by {error:.2e}, the budget is {budget:.2e}")
            step = training.stepper(model, tokens)
            with call.around():
                step()
            bench.clock.wait(peer)
            ratio = error / eager if eager else 0.0
            checks[peer] = {"ok": True, "max_err": error, "budget": budget, "ratio": ratio}
            calls[peer], steps[peer] = call, Timed(step, call.around)
    if steps:
        bench.step(None, "timing steps")
        window = unit.window_ms * len(steps)
        times = interleave(steps, bench.clock, window_ms=window, least=unit.least, most=unit.most)
        for peer, spread in times.items():
            bench.row(calls[peer], "step", checks[peer], "time", spread.as_dict())


def measure_first_call(bench: Bench) -> None:
    """Import, compile, forward and backward in a new process, on empty caches and again on filled ones."""
    unit = bench.unit
    for peer in unit.peers:
        with bench.guarded(peer, "new process"):
            reason = PEERS[peer].unavailable(unit.device) or PEERS[peer].refuses(bench.case)
            if reason is not None:
                raise RefusedError(reason)
            with tempfile.TemporaryDirectory(prefix="flashtri-bench-") as folder:
                cold = _new_process(unit, peer, Path(folder))
                bench.step(peer, "second process")
                warm = _new_process(unit, peer, Path(folder))
            call = Call(peer, "bhnd", lambda q, k, v: q, bench.inputs(), resolved=cold["resolved"])
            seconds = {"cold": cold["seconds"], "warm": warm["seconds"]}
            bench.row(call, "fwd_bwd", cold["check"], "first_call", seconds)


def cache_variables(folder: Path) -> dict[str, str]:
    """Environment that points every compiler cache in use into one folder."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME", "FLASHTRI_CACHE",
             "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")  # fmt: skip
    return {name: str(folder / name.lower()) for name in names}


def _new_process(unit: Unit, peer: str, folder: Path) -> dict[str, Any]:
    fields = json.dumps(dataclasses.asdict(dataclasses.replace(unit, peers=(peer,))))
    done = subprocess.run(
        [sys.executable, "-m", "flashtri_bench.worker", "--first-call", fields],
        env=os.environ | cache_variables(folder),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise RefusedError((done.stderr.strip().splitlines() or ["the process died"])[-1][:240])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def first_call(unit: Unit) -> dict[str, Any]:
    """What the new process does: the time to the first gradient, then the check.

    Args:
        unit: With a single peer.

    Returns:
        `seconds`, `check` and `resolved`.

    Raises:
        RefusedError: The result is wrong.
    """
    (peer,) = unit.peers
    bench = Bench(unit, lambda event: None)
    inputs = draw(bench.case, DTYPES[unit.dtype], unit.device)
    inputs.laid_out("bhnd")
    bench.clock.wait(peer)  # the device's context exists before the clock starts
    begin = time.perf_counter()
    call = bench.prepare(peer, inputs)
    results = call.results()
    bench.clock.wait(peer)
    seconds = time.perf_counter() - begin
    check = Reference(inputs).compare(results, PEERS[peer].ours)
    if not check.ok:
        raise RefusedError(check.reason)
    return {"seconds": seconds, "check": check.as_dict(), "resolved": call.resolved}


MEASURE: dict[str, Callable[[Bench], None]] = {
    "time": measure_time,
    "host": measure_host,
    "memory": measure_memory,
    "first_call": measure_first_call,
    "error": measure_error,
    "training": measure_training,
}


def measure(unit: Unit, emit: Emit) -> None:
    """Measure a unit and report rows and skips.

    Args:
        unit: What to measure.
        emit: Receives the events.
    """
    bench = Bench(unit, emit)
    MEASURE[bench.case.kind](bench)
    # Not after an exception: freeing memory waits for the device, and the exception may say that it hangs.
    _drop_caches(unit.device == "cuda")


def warm(unit: Unit, emit: Emit) -> None:
    """Run each peer once, with and without gradients, so that what it compiles is in its caches.

    Args:
        unit: What to run.
        emit: Receives the events; failures are not reported here, the measurement will meet them again.
    """
    quiet = Bench(unit, lambda event: emit(event) if event["event"] == "step" else None)
    inputs = quiet.inputs()
    for peer in unit.peers:
        with quiet.guarded(peer, "warming up"):
            call = quiet.prepare(peer, inputs)
            with torch.no_grad(), call.around():
                call.forward()
            if quiet.needs_backward:
                call.results()
            quiet.clock.wait(peer)
    del inputs
    _drop_caches(unit.device == "cuda")


def _drop_caches(cuda: bool) -> None:
    # Compiled functions are looked up through every graph compiled before; a fresh start keeps the host's share fair.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()

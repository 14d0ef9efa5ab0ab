"""What the host does in a repeated call: the same launch as Triton's own, no new plan, few steps.

Times depend on the machine; calls of functions do not, and a plan that is made anew every iteration costs a millisecond.
"""

import json
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.aot

#: Functions and built-ins called from this package in a repeated forward (with gradients) and backward. Raise one only
#: with `python -m flashtri_core.testing.host_path --time` before and after.
CEILING = {
    "triton": {"forward": 36, "backward": 46, "packed forward": 45},
    "hopper": {"forward": 38, "backward": 30, "packed forward": 46},
}


@pytest.fixture(scope="module")
def report():
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: Triton's launchers cannot be built")
    command = [sys.executable, "-m", "flashtri_core.testing.host_path"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("impl", CEILING)
def test_a_quick_launch_hands_over_what_tritons_own_does(report, impl):
    """Compiled in a call with one tensor for q, k and v, and repeated with three: no address may stand for another."""
    assert report[impl]["same"]


@pytest.mark.parametrize("impl", CEILING)
def test_a_training_loop_plans_once(report, impl):
    """New tensors of the same layout each iteration: a plan's key holds no address and nothing made per call."""
    assert report[impl]["replanned"] == 0


def test_what_the_driver_refuses_triton_launches(report):
    """As in a thread that has no context yet; nothing is left out."""
    assert report["hopper"]["refused"] == 4


def test_threads_do_not_write_into_each_others_parameters(report):
    assert report["hopper"]["undisturbed"]


@pytest.mark.parametrize("impl", CEILING)
@pytest.mark.parametrize("op", CEILING["hopper"])
def test_a_repeated_call_takes_few_steps(report, impl, op):
    assert report[impl]["calls"][op] <= CEILING[impl][op]


@pytest.mark.parametrize("version", [(3, 5), (3, 10), None])
def test_an_untried_triton_launches_by_itself(monkeypatch, version):
    """Its launcher may take other arguments, in silence."""
    quick = pytest.importorskip("flashtri_core.kernels.quick", reason="Triton is not installed")
    monkeypatch.setattr(quick, "triton_version", lambda: version)
    launch = quick.QuickLaunch(object())
    assert launch.run(1, 0, ()) is False


def test_a_launcher_that_refuses_is_not_asked_again(monkeypatch):
    quick = pytest.importorskip("flashtri_core.kernels.quick", reason="Triton is not installed")
    monkeypatch.setattr(quick, "triton_version", lambda: None)
    launch, asked = quick.QuickLaunch(object()), []

    def refuse(*arguments):
        asked.append(arguments)
        raise TypeError("function takes exactly 9 arguments")

    launch.raw, launch._head, launch._tail, launch._stream_of = refuse, (), None, lambda device: 0
    assert launch.run(1, 0, ()) is launch.run(1, 0, ()) is False
    assert len(asked) == 1

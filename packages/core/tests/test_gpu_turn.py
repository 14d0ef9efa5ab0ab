"""Tests that share a GPU, and those that want it alone."""

import threading

import pytest

from flashtri_core.testing import plugin
from flashtri_core.testing.plugin import turn

pytestmark = pytest.mark.skipif(plugin.fcntl is None, reason="no file locks on this system")


class Holder(threading.Thread):
    """Takes a turn, says so, and keeps it until told."""

    def __init__(self, folder, alone):
        super().__init__(daemon=True)
        self.folder, self.alone, self.has, self.leave = folder, alone, threading.Event(), threading.Event()
        self.start()

    def run(self):
        with turn(self.alone, self.folder):
            self.has.set()
            self.leave.wait(30)

    def let_go(self):
        self.leave.set()
        self.join(30)


def test_one_that_wants_the_gpu_alone_gets_it(tmp_path):
    """Two share it; the one that wants it alone waits for both."""
    first, second = Holder(tmp_path, False), Holder(tmp_path, False)
    assert first.has.wait(10) and second.has.wait(10)
    alone = Holder(tmp_path, True)
    first.let_go()
    assert not alone.has.wait(0.3)
    second.let_go()
    assert alone.has.wait(10)
    alone.let_go()


def test_a_late_comer_does_not_overtake(tmp_path):
    """While one waits for the GPU alone, a stream of others that share it must not keep it waiting for ever."""
    first = Holder(tmp_path, False)
    assert first.has.wait(10)
    alone = Holder(tmp_path, True)
    assert not alone.has.wait(0.3)  # it has shut the gate by now
    late = Holder(tmp_path, False)
    assert not late.has.wait(0.3)
    first.let_go()
    assert alone.has.wait(10)
    assert not late.has.is_set()
    alone.let_go()
    assert late.has.wait(10)
    late.let_go()

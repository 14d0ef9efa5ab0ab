"""No kernel touches memory that is not its own: every address that the interpreter loads or stores is checked."""

import numpy as np
import pytest
import torch

from flashtri_core.testing.cases import CASES
from flashtri_core.testing.plugin import INTERPRETER

pytestmark = pytest.mark.interpreter

WATCHED = [
    "causal_dead_rows", "d3_dv1", "misaligned", "bias_shared_by_heads", "bias_of_queries", "mask", "seqused", "packed_empty",
    "packed_bias", "packed_mask",
]  # fmt: skip


class Fence:
    """The interpreter's loads and stores, refusing addresses outside the tensors of the launch."""

    def __init__(self, real):
        self.real, self.first, self.end = real, np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def admit(self, tensors):
        """From now on these tensors' memory, and no other, may be touched."""
        spans = sorted({(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors if x.numel()})
        self.first = np.array([start for start, _ in spans], np.uint64)
        self.end = np.array([start + size for start, size in spans], np.uint64)

    def check(self, pointers, mask, width, what):
        used = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.uint64)
        if not used.size:
            return
        owner = np.searchsorted(self.first, used, side="right") - 1
        outside = (owner < 0) | (used + np.uint64(width) > self.end[owner])
        assert not outside.any(), f"{what} of {outside.sum()} elements outside every tensor"

    def load(self, pointers, mask, other, dtype):
        self.check(pointers, mask, np.dtype(dtype).itemsize, "load")
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self.check(pointers, mask, value.dtype.itemsize, "store")
        return self.real.store(pointers, value, mask)


@pytest.fixture
def fence(monkeypatch):
    from triton.runtime import interpreter

    fence = Fence(interpreter._interpreter)
    prepare = interpreter.GridExecutor._init_args_hst

    def tensors_in(x):
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple | list):
            for y in x:
                yield from tensors_in(y)

    def prepared(self, args, kwargs):
        result = prepare(self, args, kwargs)
        fence.admit(list(tensors_in(result[0])) + list(tensors_in(tuple(result[1].values()))))
        return result

    monkeypatch.setattr(interpreter, "_interpreter", fence)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", prepared)
    return fence


@pytest.mark.parametrize("name", WATCHED)
def test_nothing_outside_is_touched(name, fence):
    """A read behind the end of a tensor gives right numbers on most days and a device fault on others."""
    INTERPRETER.run(INTERPRETER.inputs(CASES[name]))
    assert fence.first.size, "no launch was watched"


def test_the_fence_holds(fence):
    buffer = np.zeros(4, np.float32)
    fence.admit([torch.from_numpy(buffer)])
    addresses = np.arange(4, dtype=np.uint64) * np.uint64(4) + np.uint64(buffer.ctypes.data)
    fence.check(addresses, np.ones(4, bool), 4, "load")
    fence.check(addresses + np.uint64(4), np.arange(4) < 3, 4, "load")
    with pytest.raises(AssertionError, match="load of 1 elements"):
        fence.check(addresses + np.uint64(4), np.ones(4, bool), 4, "load")

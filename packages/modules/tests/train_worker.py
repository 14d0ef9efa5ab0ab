"""One rank of a data-parallel training run, started by the tests: `python train_worker.py SETTINGS.json`.

The environment names rank and world size as torchrun does; processes meet at the file that SETTINGS names. Every rank
takes an equal share of each batch; rank 0 writes what the tests compare with a run in one process. The same functions
run there.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashtri_modules import FlashSelfAttention
from flashtri_modules.demo import CharModel

VOCAB, BLOCK, STEPS = 16, 32, 3
WIDTH, HEADS = 96, 6


def make_model(features: bool, dtype: torch.dtype) -> nn.Module:
    """The demo's model from one seed; with `features`, its attention has grouped heads, sinks, ALiBi and a window."""
    torch.manual_seed(0)
    model = CharModel(VOCAB, WIDTH, HEADS, 2, BLOCK)
    if features:
        for block in model.blocks:
            block.attention = FlashSelfAttention(
                WIDTH, HEADS, num_kv_heads=2, causal=True, sink=True, alibi=True, window_size=(20, -1)
            )
    return model.to(dtype)


def batch_for(world: int) -> int:
    """Sequences in a batch that `world` ranks share equally: the mean over ranks is then the mean over the batch."""
    return -(-16 // world) * world


def train(
    model: nn.Module, device: torch.device, batch: int, rank: int = 0, world: int = 1,
    precision: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Take STEPS steps of SGD; return losses, the last gradients and the weights after them, whole and in fp64."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        # Each sequence counts up from somewhere, which a model begins to learn in a few steps.
        first = torch.randint(VOCAB, (batch, 1), generator=generator)
        tokens = ((first + torch.arange(BLOCK + 1)) % VOCAB).view(world, -1, BLOCK + 1)[rank].to(device)
        with nullcontext() if precision is None else torch.autocast(device.type, precision):
            logits = model(tokens[:, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())

    def whole(t: Tensor) -> Tensor:
        return (t.full_tensor() if isinstance(t, DTensor) else t).detach().double().cpu()

    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "gradients": {name: whole(p.grad) for name, p in parameters.items()},
        "weights": {name: whole(p) for name, p in parameters.items()},
    }


def data_parallel(model: nn.Module, device: torch.device, compiled: bool, precision: torch.dtype | None) -> nn.Module:
    """DistributedDataParallel; autocast does the rest of mixed precision."""
    if compiled:
        model.compile()
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def fully_sharded(model: nn.Module, device: torch.device, compiled: bool, precision: torch.dtype | None) -> nn.Module:
    """FSDP2, block by block; parameters are gathered in `precision`, gradients reduced in fp32."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=None if precision is None else torch.float32)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


WRAPPERS: dict[str, Callable[[nn.Module, torch.device, bool, torch.dtype | None], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp2": fully_sharded,
}


def launch(settings: dict[str, Any], world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run `world` processes of this file to the end and return what rank 0 wrote.

    A file's function cannot be sent to a spawned process by name under pytest's importlib mode; a file can be run.
    """
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    logs = [folder / f"rank{rank}.txt" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world)}
        with log.open("w") as output:
            command = [sys.executable, __file__, str(file)]
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + 500
    try:
        # One rank that fails leaves the others waiting for it.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(f"{log.stem}: {log.read_text()}" for log in logs))
    results: dict[str, dict[str, Any]] = torch.load(settings["out"])
    return results


def main() -> None:
    """Train every case of SETTINGS in this rank, and write the results of rank 0."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if settings["device"] == "cuda" else torch.device("cpu")
    precision = None if settings["precision"] is None else getattr(torch, settings["precision"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=Path(settings["meet"]).as_uri(), rank=rank, world_size=world)
    results = {}
    for wrapper, features, compiled in settings["cases"]:
        model = make_model(features, getattr(torch, settings["dtype"])).to(device)
        wrapped = WRAPPERS[wrapper](model, device, compiled, precision)
        # FSDP2 casts by itself; for it autocast would only hide a cast that is missing.
        autocast = precision if wrapper == "ddp" else None
        results[f"{wrapper}-{features}-{compiled}"] = train(wrapped, device, batch_for(world), rank, world, autocast)
    if rank == 0:
        torch.save(results, settings["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A worker without a device: answers as flashtri_bench.worker does, and misbehaves for one peer as FAULT says."""

import json
import os
import sys
import time


def emit(**event):
    print(json.dumps(event), flush=True)


CHECK = {"ok": True, "max_err": 0.1, "budget": 1.0, "ratio": 0.5}
ENVIRONMENT = {
    "device": "cuda", "gpu": "Test GPU", "sm": "9.0", "driver": "1", "cuda": "13", "cudnn": "9", "torch": "2",
    "triton": "3", "python": "3", "peers": {},
}  # fmt: skip


def misbehave(kind, case, peer):
    if kind in ("hang", "warm"):
        time.sleep(600)
    elif kind == "endless":
        while True:
            time.sleep(0.05)
            emit(event="step", case=case, peer=peer, what="compiling")
    elif kind == "die":
        os._exit(9)
    elif kind == "fault":
        emit(event="fault", peer=peer, reason="CUDA error: misaligned address")
        os._exit(3)


kind, _, culprit = os.environ.get("FAULT", "").partition(":")
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "environment":
        emit(event="environment", environment=ENVIRONMENT)
    elif command["do"] == "ceilings":
        emit(event="ceilings", ceilings={"copy_tb_s": 4.0, "matmul_tflops": {"bf16": 700.0}})
    elif command["do"] == "sweep":
        names = [name for name, *_ in command["todo"]]
        for name in names:
            emit(event="step", case=command["unit"]["case"], peer=name, what="first call")
            if name == culprit:
                misbehave(kind, command["unit"]["case"], name)
        emit(event="cells", cells={name: {"tflops": 100.0, "reason": ""} for name in names})
    else:
        unit = command["unit"]
        for peer in unit["peers"]:
            emit(event="step", case=unit["case"], peer=peer, what="first call")
            if peer == culprit and (kind not in ("warm", "endless") or command["do"] == "warm"):
                misbehave(kind, unit["case"], peer)
            if command["do"] == "measure":
                spread = {"p20": 9.0, "p50": 10.0, "p80": 11.0, "rounds": 5}
                for op in unit["ops"]:
                    row = {
                        "case": unit["case"],
                        "op": op,
                        "impl": peer,
                        "metric": "time",
                        "resolved": None,
                        "check": CHECK,
                    }
                    emit(event="row", row=row | {"time_ms": spread})
    if kind == "start":
        os._exit(1)
    emit(event="done")

"""The process that touches the device. It reads one JSON command a line and writes one JSON event a line.

Kernels under development deadlock and fault; peers abort. So the process that keeps the results never touches the
device itself: `runner` watches this one, and starts another when it stops.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, TextIO

import torch

from . import ceilings, measure, provenance, sweep
from .timing import HangError, clock_for


def _answer(command: dict[str, Any], emit: measure.Emit) -> None:
    what = command["do"]
    if what == "environment":
        emit({"event": "environment", "environment": provenance.environment(command["device"])})
    elif what == "ceilings":
        clock = clock_for(command["device"])
        found = ceilings.measure(command["device"], tuple(command["dtypes"]), clock)
        emit({"event": "ceilings", "ceilings": found})
    elif what == "measure":
        measure.measure(measure.Unit.parse(command["unit"]), emit)
    elif what == "warm":
        measure.warm(measure.Unit.parse(command["unit"]), emit)
    elif what == "sweep":
        sweep.answer(command, emit)
    else:
        raise ValueError(f"do: got {what!r}, supported are environment, ceilings, measure, warm, sweep")


def serve(source: TextIO, sink: TextIO) -> None:
    """Answer commands until the source ends.

    A fault that leaves the device unusable is reported with the peer to blame, and ends the process: nothing that runs
    after it could be trusted.

    Args:
        source: Commands.
        sink: Events.
    """

    def emit(event: dict[str, Any]) -> None:
        sink.write(json.dumps(event) + "\n")
        sink.flush()

    gc.freeze()  # what the imports made lives as long as the process; looking through it takes a quarter second a case
    for line in source:
        try:
            _answer(json.loads(line), emit)
        except HangError as hang:
            emit({"event": "fault", "peer": hang.peer, "reason": f"hung: {hang}"})
            os._exit(3)  # an ordinary exit would wait for the device
        except Exception as error:  # whatever it was, the watching process must hear of it
            emit({"event": "fault", "peer": None, "reason": f"{type(error).__name__}: {error}"[:240]})
            os._exit(4)
        emit({"event": "done"})


def main() -> None:
    """Serve standard input, or make one first call and print what it took."""
    torch.set_num_threads(int(os.environ.get("FLASHTRI_BENCH_THREADS", torch.get_num_threads())))
    if sys.argv[1:2] == ["--first-call"]:
        print(json.dumps(measure.first_call(measure.Unit.parse(json.loads(sys.argv[2])))), flush=True)
        return
    # Libraries print; events need a channel of their own.
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, sink)


if __name__ == "__main__":
    main()

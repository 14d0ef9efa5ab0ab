"""What a run shows while it runs: bars where `rich` can draw them, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Self


class PlainProgress:
    """Lines on standard error, at most one every few seconds, so that logs stay short."""

    PAUSE_S = 5.0

    def __init__(self) -> None:
        self._name, self._total, self._done, self._last = "", 0, 0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def stage(self, name: str, total: int) -> None:
        """A part of the run begins."""
        self._name, self._total, self._done = name, total, 0
        print(f"{name}: {total}", file=sys.stderr, flush=True)

    def doing(self, text: str) -> None:
        """What happens now."""
        if time.monotonic() - self._last > self.PAUSE_S:
            self._last = time.monotonic()
            print(f"{self._name} {self._done}/{self._total}: {text}", file=sys.stderr, flush=True)

    def advance(self) -> None:
        """One item of the part is done."""
        self._done += 1

    def note(self, text: str) -> None:
        """A line worth keeping on the screen."""
        print(text, file=sys.stderr, flush=True)


class RichProgress:
    """A bar for each part of the run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Any = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int) -> None:
        """A part of the run begins."""
        self._task = self._progress.add_task(name, total=total, now="")

    def doing(self, text: str) -> None:
        """What happens now."""
        if self._task is not None:
            self._progress.update(self._task, now=text)

    def advance(self) -> None:
        """One item of the part is done."""
        self._progress.advance(self._task)

    def note(self, text: str) -> None:
        """A line worth keeping on the screen."""
        self._progress.console.print(text, highlight=False, markup=False)


def make_progress() -> PlainProgress | RichProgress:
    """Bars on a terminal with `rich`, lines otherwise."""
    if not sys.stderr.isatty():
        return PlainProgress()
    try:
        return RichProgress()
    except ImportError:
        return PlainProgress()

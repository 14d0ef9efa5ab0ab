"""`flashtri-bench run | report | compare | validate | merge | sweep`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from . import compare, report, results
from .cases import SUITES, select


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _positive(text: str) -> float:
    number = float(text)
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a positive number")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashtri-bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure; without a GPU, prove that the suites run and write nothing")
    run.add_argument("--suite", type=_names, default=("all",), help=f"all, or some of {', '.join(SUITES)}")
    run.add_argument("--cases", type=_names, default=(), help="only cases whose id contains one of these")
    run.add_argument("--peers", type=_names, default=(), help="only these implementations")
    run.add_argument("--ops", type=_names, default=(), help="only these passes: fwd, bwd, fwd_bwd, step")
    run.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default bf16 on a GPU, fp32 on a CPU")
    run.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    run.add_argument("--smoke", action="store_true", help="tiny sizes; always so on a CPU")
    run.add_argument(
        "--time-budget",
        type=_positive,
        metavar="SECONDS",
        help="start no further case after this long; at most 40 %% of it is spent on compiling ahead, suite by suite",
    )
    run.add_argument("--step-timeout", type=_positive, default=240.0, metavar="SECONDS", help="silence that is a hang")
    run.add_argument("--window", type=_positive, default=60.0, metavar="MS", help="device time per peer, pass and case")
    run.add_argument("--out", type=Path, help="merge into this file; default on a GPU: the checkout's results.json")

    shown = commands.add_parser("report", help="tables and plots of a results file")
    shown.add_argument("file", type=Path, nargs="?", help="default: the checkout's results.json")
    shown.add_argument("--markdown", type=Path, help="write the full report there")
    shown.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG plots there")
    shown.add_argument("--readme", type=Path, help="the file whose marked block the figures fill")
    shown.add_argument("--check", action="store_true", help="with --readme: fail if the block is out of date")

    compared = commands.add_parser("compare", help="what changed between two files; exit 1 on a regression")
    compared.add_argument("old", type=Path)
    compared.add_argument("new", type=Path)
    compared.add_argument("--threshold", type=_positive, default=0.03, help="smallest change that counts (0.03 = 3 %%)")

    validated = commands.add_parser("validate", help="may this file be committed?")
    validated.add_argument("file", type=Path, nargs="?")

    swept = commands.add_parser("sweep", help="time candidates for the Hopper kernels' tables beside the shipped ones")
    swept.add_argument(
        "candidates", nargs="*", metavar="NAME:FIELD=VALUE,...", help="changes to the shipped configuration"
    )
    swept.add_argument("--op", choices=("fwd", "bwd"), default="fwd")
    swept.add_argument("--suite", type=_names, default=("grid",), help=f"some of {', '.join(SUITES)}")
    swept.add_argument("--cases", type=_names, default=(), help="only cases whose id contains one of these")
    swept.add_argument("--peers", type=_names, default=("torch-cudnn",), help="other implementations beside them")
    swept.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")

    merged = commands.add_parser("merge", help="rows of a file from another machine into the committed one")
    merged.add_argument("source", type=Path)
    merged.add_argument("--into", type=Path)
    return parser


def _device(wanted: str | None) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got cuda, but torch finds no GPU here")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _run(args: argparse.Namespace) -> int:
    from .progress import make_progress
    from .provenance import commit
    from .runner import Plan, Run, Stopped, committed_path

    device = _device(args.device)
    smoke = args.smoke or device == "cpu"
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    out: Path | None = args.out if smoke else args.out or committed_path()
    if smoke and out is not None and out.resolve() == committed_path().resolve():
        raise ValueError(f"out: a smoke run leaves {out} alone")
    if not smoke and out is not None and out.resolve() == committed_path().resolve() and commit()[1]:
        raise ValueError(f"out: {out} takes figures of committed code only; commit first, or give --out another file")
    cases = select(args.suite, args.cases)
    ops = {op for case in cases for op in case.ops}
    if not ops.issuperset(args.ops):
        raise ValueError(f"ops: got {','.join(args.ops)}, the chosen cases have {', '.join(sorted(ops))}")
    plan = Plan(
        cases,
        args.peers,
        args.ops,
        dtype,
        device,
        smoke,
        args.time_budget,
        args.window,
        args.step_timeout,
    )
    before = results.load(out) if out is not None and out.exists() else results.empty()

    def save(document: results.Document) -> None:
        if out is not None:
            results.save(results.merge(before, document), out)

    began = time.monotonic()
    with make_progress() as progress:
        if smoke:
            why = "no GPU here" if device == "cpu" else "asked for"
            progress.note(
                f"Smoke run ({why}): tiny sizes, to prove that the suites run. These figures are not results."
            )
        run = Run(plan, progress, save)
        try:
            document = run.carry_out()
        except Stopped as stopped:
            print(f"flashtri-bench: the measuring process does not start: {stopped}", file=sys.stderr)
            return 1
    print(report.smoke_summary(document) if smoke else report.terminal(document))
    rows, skips = len(document["rows"]), len(document["skipped"])
    print(f"{rows} rows, {skips} skipped, {time.monotonic() - began:.0f} s", end="")
    print(f", {len(run.left_over)} cases {results.NOT_STARTED}" if run.left_over else "")
    print(f"written to {out}" if out is not None else "Nothing was written: a smoke run gives no results.")
    red = [s for s in document["skipped"] if s["impl"].startswith("flashtri") and "wrong" in s["reason"]]
    for skip in red:
        print(f"RED {skip['case']} {skip['op']} {skip['impl']}: {skip['reason']}", file=sys.stderr)
    return 1 if red or not rows else 0


def _default(path: Path | None) -> Path:
    from .runner import committed_path

    return path or committed_path()


def _report(args: argparse.Namespace) -> int:
    if args.check and args.readme is None:
        raise ValueError("check: it checks the file that --readme names")
    document = results.load(_default(args.file))
    if args.readme is not None:
        text = args.readme.read_text(encoding="utf-8")
        filled = report.fill(text, document)
        if args.check:
            if filled != text:
                print(f"{args.readme}: figures are out of date; run flashtri-bench report --readme {args.readme}")
                return 1
            return 0
        args.readme.write_text(filled, encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(report.markdown(document), encoding="utf-8")
    if args.plots is not None:
        for path in report.write_plots(document, args.plots):
            print(path)
    if args.readme is None and args.markdown is None and args.plots is None:
        print(report.terminal(document))
    return 0


def _compare(args: argparse.Namespace) -> int:
    outcome = compare.compare(results.load(args.old), results.load(args.new), args.threshold)
    print(compare.describe(outcome))
    return 1 if outcome.regressions else 0


def _validate(args: argparse.Namespace) -> int:
    path = _default(args.file)
    found = list(results.problems(results.parse(path)))
    for sentence in found:
        print(f"{path}: {sentence}")
    if not found:
        print(f"{path}: valid")
    return 1 if found else 0


def _merge(args: argparse.Namespace) -> int:
    target = _default(args.into)
    new = results.load(args.source)
    found = list(results.problems(results.normalised(new)))
    if found:
        for sentence in found:
            print(f"{args.source}: {sentence}")
        return 1
    old = results.load(target) if target.exists() else results.empty()
    results.save(results.merge(old, new), target)
    print(f"{len(new['rows'])} rows merged into {target}")
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from .progress import make_progress
    from .runner import Plan, Run
    from .sweep import Candidate, sweep, table

    candidates = [Candidate.parse(text) for text in args.candidates]
    cases, rows = select(args.suite, args.cases), {}
    with make_progress() as progress, closing(Run(Plan(cases, device=_device("cuda")), progress)) as run:
        progress.stage("sweeping", len(cases))
        for case in cases:
            rows[case.id] = sweep(run, case.id, args.op, candidates, args.peers, args.dtype)
            progress.advance()
            print(table({case.id: rows[case.id]}), flush=True)
    print(table(rows))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        Exit status: 0 for good, 1 for a finding, 2 for a wrong argument.
    """
    args = _parser().parse_args(argv)
    commands = {
        "run": _run, "report": _report, "compare": _compare, "validate": _validate, "merge": _merge, "sweep": _sweep
    }  # fmt: skip
    try:
        return commands[args.command](args)
    except (ValueError, OSError) as error:
        print(f"flashtri-bench: {error}", file=sys.stderr)
        return 2

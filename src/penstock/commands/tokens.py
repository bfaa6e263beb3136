"""Print means and maxima over the trained tokens of finished steps: mismatch KL, entropy, masked fractions, rewards.

  penstock tokens runs/demo                      one line per step, for every run in the folder
  penstock tokens runs/demo --step 12 --json     everything about one step, for programs
  penstock tokens runs/demo --evaluation         evaluation groups, one line per policy version

Reads only steps that every rank has finished. Evaluation groups are read from the plane's folder. Lines that are not
records are counted and skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from penstock.commands.terminal import Progress
from penstock.commands.which_run import RUN_HELP, checked_where, export_folder
from penstock.errors import InvalidInput
from penstock.server import printable
from penstock.view import EVALUATION, Export, Skipped, Step, tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", type=checked_where, help=f"{RUN_HELP}; or the folder given to TokenExporter"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--step", type=int, help="this step only")
    parser.add_argument("--run", dest="of_run", help="this run only, if the folder holds several")
    parser.add_argument("--evaluation", action="store_true", help="evaluation groups only, by policy version")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    of_run = EVALUATION if args.evaluation else args.of_run
    folder = export_folder(args.folder, args.keys)
    progress, reports = Progress(), []
    for step in _chosen(Export(folder), of_run, args.step):
        progress(f"reading step {step.number}")
        reports.append(summarize(step))
    progress.end()
    for report in reports:
        _warn(report)
    print(json.dumps({"folder": str(folder), "steps": reports}, indent=1) if args.json else _table(reports))
    return 1 if any(report["malformed_lines"] or report["altered_files"] for report in reports) else 0


def _chosen(export: Export, run: str | None, step: int | None) -> list[Step]:
    """Return the requested steps, of one run or of all. Raises if no step has that number."""
    if run == EVALUATION and run not in export.runs:
        raise InvalidInput("--evaluation: no evaluation groups are in the export")
    runs = export.runs if run is None else [export.choose(run)]
    found = [one for name in runs for one in export.steps(name) if step is None or one.number == step]
    if step is not None and not found:
        return [export.step(step, name) for name in runs]  # raises, and lists the steps there are
    return found


def summarize(step: Step) -> dict[str, Any]:
    """Summarize one step as plain data."""
    skipped = Skipped()
    summary = tally(step.records(skipped)).as_dict()
    return {
        "step": step.number,
        "run": step.run,
        **summary,
        "malformed_lines": skipped.lines,
        "reasons": skipped.reasons,
        "altered_files": step.altered(),
    }


def _warn(report: dict[str, Any]) -> None:
    count = report["malformed_lines"]
    of_run = f"{printable(report['run'])}: " if report["run"] else ""
    if count:
        lines = "line" if count == 1 else "lines"
        print(
            f"{of_run}step {report['step']}: {count} malformed {lines} skipped; {report['reasons'][0]}", file=sys.stderr
        )
    for name in report["altered_files"]:
        print(f"{of_run}step {report['step']}: {name} is not what its rank wrote", file=sys.stderr)


_CELLS = (
    ("KL mean", "mismatch_kl", "mean"),
    ("KL max", "mismatch_kl", "max"),
    ("entropy", "entropy", "mean"),
    ("reward", "reward", "mean"),
    ("stale", "staleness", "mean"),
)


def _table(reports: list[dict[str, Any]]) -> str:
    heads = "".join(f"{head:>11}" for head, _, _ in _CELLS)
    runs = {report["run"] for report in reports}
    wide = max(map(len, runs)) + 2 if len(runs) > 1 else 0

    def named(run: str) -> str:
        return f"{printable(run):<{wide}}" if wide else ""

    step = "version" if runs == {EVALUATION} else "step"
    lines = [f"{named('run')}{step:>7}{'records':>9}{'trained':>10}{heads}{'masked':>9}{'high':>9}{'low':>9}"]
    for report in reports:
        cells = [report[name][what] if report[name] else None for _, name, what in _CELLS]
        masked = [report["masked_fraction"].get(name) for name in ("is_masked", "is_masked_high", "is_masked_low")]
        lines.append(
            f"{named(report['run'])}{report['step']:>7}{report['records']:>9,}{report['loss_tokens']:>10,}"
            + "".join(f"{'-' if cell is None else format(cell, '.4g'):>11}" for cell in cells)
            + "".join(f"{'-' if cell is None else format(cell, '.2%'):>9}" for cell in masked)
        )
    return "\n".join(lines)

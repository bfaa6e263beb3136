"""Compare a run's log with its storage, recover groups that the log has lost, or forget old groups.

  penstock storage check runs/mine                  read every frame; exit 1 if one is missing or damaged
  penstock storage check runs/mine --fast           compare sizes only
  penstock storage recover runs/mine                show what would be done, ask, do it
  penstock storage recover runs/mine --step 501     the trainer's checkpoint is of step 500
  penstock storage recover runs/old --into runs/new   copy the groups of an old folder, an archive or any files
  penstock storage forget runs/mine                 end retain="all": from now on keep only retain_steps steps

`check` changes nothing, and the run's plane may be running. `recover` needs the plane to be stopped. It deletes
nothing: the log, its witness and the marker are first copied to before-recover-1/ in the run's folder. docs/storage.md
explains the files, and what to do when a plane does not start. `forget` needs the plane to be stopped too. It shows how
much would be freed and asks. The next plane on the folder frees the frames.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.terminal import Progress, aligned, size
from penstock.commands.which_run import checked_where, folder_for, plane_folder
from penstock.errors import InvalidInput
from penstock.log import PLANE, as_corrupt, is_postgres
from penstock.server import printable

if TYPE_CHECKING:
    from penstock.runs import Plan, Report

_SHOWN = 20
"""Lines of each kind that are printed for people; `--json` lists all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check", "recover", "forget"])
    parser.add_argument("where", metavar="RUN", type=checked_where, help="the run's folder, or its plane's folder")
    parser.add_argument(
        "--storage", metavar="WHERE", type=checked_where, help="folder or URL of the frames, if not in the run's folder"
    )
    parser.add_argument("--fast", action="store_true", help="check: compare sizes, read no frame")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--yes", action="store_true", help="recover, forget: do not ask")
    parser.add_argument(
        "--as",
        dest="state",
        choices=["held", "quarantined", "dropped"],
        default="held",
        help="recover: add groups for training (the default); in quarantine, until `penstock quarantine` releases "
        "them; or as dropped, so that they are not put again and the next plane frees their frames",
    )
    parser.add_argument("--step", type=int, metavar="N", help="recover: the step at which the trainer continues")
    parser.add_argument(
        "--policy-version", type=int, metavar="V", help="recover: the last version the trainer published"
    )
    parser.add_argument("--into", type=Path, metavar="DIR", help="recover: copy all groups into the run in this folder")


def run(args: argparse.Namespace) -> int:
    return {"check": _check, "recover": _recover, "forget": _forget}[args.action](args)


class _BytesProgress(Progress):
    """Shows how many bytes were read or written so far."""

    def __init__(self, what: str) -> None:
        super().__init__(every_s=0.2)
        self._what, self._bytes = what, 0

    def add(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self(f"{self._what}: {size(self._bytes)}")


def _plane_folder(where: str) -> Path:
    """Return the folder of a run's plane, even if its log is missing."""
    if is_postgres(where):
        return folder_for(where)
    root = Path(where)
    laid_out = root / PLANE
    return laid_out if laid_out.is_dir() and not _is_run(root) else root


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("log.sqlite", "log.url", "log.witness", "storage", "frames"))


# ------------------------------------------------------------------ check


def _check(args: argparse.Namespace) -> int:
    from penstock.runs import check

    if args.into or args.step is not None or args.policy_version is not None:
        raise InvalidInput("check: --into, --step and --policy-version are for recover")
    progress = _BytesProgress("read")
    with as_corrupt(args.where):
        report = check(_plane_folder(args.where), storage=args.storage, fast=args.fast, progress=progress.add)
    progress.end()
    print(json.dumps(report.as_dict(), indent=1) if args.json else "\n".join(check_lines(report)))
    return 0 if report.ok else 1


def check_lines(report: Report) -> list[str]:
    """Format a check's report for people."""
    looked = "sizes compared" if report.fast else "all read"
    witness = "none yet" if report.witness is None else f"{report.witness['commits']:,} transactions"
    rows = [
        ["log", _state(report, "log", f"run {report.run_id[:12]}, epoch {report.epoch}, transaction {report.commits}")],
        ["marker", _state(report, "marker", _marker_text(report))],
        ["witness", _state(report, "witness", witness)],
        ["frames", f"{report.frames:,} needed, {size(report.bytes)}, {looked}"],
        ["missing", f"{len(report.missing):,}"],
        ["damaged", f"{len(report.damaged):,}"],
        ["not in the log", "not looked for" if report.fast else f"{report.lost:,} groups"],
        ["not attached", "not looked for" if report.fast else f"{report.unused:,} frames, {size(report.unused_bytes)}"],
        ["unregistered", f"{len(report.unregistered):,} of {report.segments:,} segments"],
        ["not needed", f"{size(report.dead_bytes)}, {report.pending_frees:,} deletions pending"],
    ]
    lines = [f"{report.folder}, frames in {report.storage}", *aligned(rows, left=2)]
    lines += _some("missing", [f"group {bad.group!r} at {bad.location}: {bad.why}" for bad in report.missing])
    lines += _some("damaged", [f"group {bad.group!r} at {bad.location}: {bad.why}" for bad in report.damaged])
    lines += _some("not in the log", [f"group {group!r}" for group in report.lost_groups])
    lines += _some("unregistered", [f"segment {name}: {size(count)}" for name, count in report.unregistered.items()])
    lines += _some("other samples", report.conflicts)
    lines += _some("damaged, not in the log", report.broken)
    return [*lines, *_advice(report)]


def _state(report: Report, name: str, text: str) -> str:
    return printable(f"WRONG: {report.disagreements[name]}" if name in report.disagreements else text)


def _marker_text(report: Report) -> str:
    if report.marker is None:
        return "none yet"
    found = (
        f"run {report.marker['run_id'][:12]}, epoch {report.marker['epoch']}, transaction {report.marker['commits']}"
    )
    return f"{found}; behind the log, as after a kill" if report.marker["epoch"] < report.epoch else found


def _some(what: str, lines: list[str]) -> list[str]:
    shown = [f"  {what}: {printable(line)}" for line in lines[:_SHOWN]]
    return [*shown, *([f"  {what}: and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else [])]


def _advice(report: Report) -> list[str]:
    found = []
    if report.disagreements:
        found.append("A plane does not start here: restore the newest copy, or see `penstock storage recover --help`.")
    if report.missing or report.damaged:
        found.append(
            "Restore these segments from a copy; otherwise a step that draws one of these groups quarantines it."
        )
    if report.lost:
        found.append("`penstock storage recover` adds the groups that are in storage and not in the log.")
    if report.unregistered:
        found.append("Nothing is deleted while there are unregistered segments: recover them, or move them away.")
    if report.ok and not found:
        found.append("Log and storage agree.")
    return found


# ------------------------------------------------------------------ recover


def _recover(args: argparse.Namespace) -> int:
    from penstock.runs import Choices, owning, plan_copy, plan_recovery, recover, recover_into

    _check_choices(args)
    if not args.into and not args.storage and not _is_run(_plane_folder(args.where)):
        raise InvalidInput(f"{args.where}: no run in it; give a run's folder, or its frames with --storage")
    folder, progress = _plane_folder(args.where), _BytesProgress("read")
    choices = Choices(state=args.state, step=args.step, policy_version=args.policy_version)
    with nullcontext() if args.into else owning(folder):
        with as_corrupt(args.where):
            plan = (
                plan_copy(args.where, args.into, progress.add)
                if args.into
                else plan_recovery(folder, args.storage, progress.add)
            )
        progress.end()
        if args.step is not None and args.step < plan.next_step:
            raise InvalidInput(
                f"--step {args.step}: the log is at step {plan.next_step}; a trainer that resumes earlier reports it"
            )
        metadata = plan_metadata(plan, args)
        say: Callable[[str], None] = (lambda _: None) if args.json else print
        say("\n".join(plan_lines(plan, metadata)))
        if not metadata["needed"]:
            say("Nothing to recover: nothing was changed.")
            return _end(args, metadata, None)
        if not args.yes and not _asked(args):
            say("Nothing was changed.")
            _end(args, metadata, None)
            return 1
        progress = _BytesProgress("written")
        done = recover_into(plan, choices, progress.add) if args.into else recover(plan, choices, progress.add)
        progress.end()
    aside = f" The previous files are in {done.aside}." if done.aside else ""
    say(f"Done: {done.groups:,} groups were added, as {args.state}. You can start a plane.{aside}")
    return _end(args, metadata, asdict(done))


def _check_choices(args: argparse.Namespace) -> None:
    if args.fast:
        raise InvalidInput("recover: --fast is for check")
    if args.into and args.storage:
        raise InvalidInput("recover --into: give the folder that holds the frames as RUN, without --storage")
    for name, least in (("step", 1), ("policy_version", 0)):
        value = getattr(args, name)
        if value is not None and not least <= value < 2**31:
            raise InvalidInput(f"--{name.replace('_', '-')} {value}: give a number from {least} up")


def _asked(args: argparse.Namespace) -> bool:
    if args.json:
        return False
    print("Continue? [y/N] ", end="", flush=True)
    answer = sys.stdin.readline().strip().lower()
    return answer in ("y", "yes")


def _end(args: argparse.Namespace, metadata: dict[str, Any], done: dict[str, Any] | None) -> int:
    if args.json:
        print(json.dumps({"plan": metadata, "done": done}, indent=1))
    return 0


def plan_metadata(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Return what would be done, as plain data."""
    lost = plan.found.lost
    return {
        "folder": str(plan.run.folder),
        "storage": plan.run.storage.place,
        "copied": plan.copied,
        "needed": plan.is_needed or (not plan.copied and args.step not in (None, plan.next_step)),
        "problems": plan.problems,
        "new_log": plan.log is None,
        "run_id": plan.run_id,
        "groups": [frame.group for frame in lost],
        "samples": sum(frame.samples for frame in lost),
        "tokens": sum(frame.tokens for frame in lost),
        "bytes": sum(frame.size for frame in lost),
        "as": args.state,
        "known": plan.found.repeated,
        "register": plan.register,
        "left": plan.left,
        "conflicts": [one.why for one in plan.found.conflicts],
        "unusable": [f"{one.part.name} at {one.offset}: {one.why}" for one in plan.found.unusable],
        "newer": [row.id for row, _ in plan.newer],
        "unused": len(plan.found.unused) - len(plan.newer),
        "without_frame": plan.without_frame,
        "step": plan.next_step if args.step is None else args.step,
        "policy_version": plan.newest_version if args.policy_version is None else args.policy_version,
    }


def plan_lines(plan: Plan, metadata: dict[str, Any]) -> list[str]:
    """Format what would be done, for people."""
    lines = [f"{what}: {problem}" for what, problem in plan.problems.items()]
    count = f"{len(metadata['groups']):,} groups ({metadata['samples']:,} samples, {size(metadata['bytes'])})"
    if plan.copied:
        lines.append(f"{count} would be copied to {metadata['folder']}, as {metadata['as']}.")
    elif plan.log is None:
        whose = f"run {plan.run_id[:12]}" if plan.run_id else "a new run"
        lines.append(f"A new log of {whose} would be made, with {count}, as {metadata['as']}.")
    elif metadata["needed"]:
        lines.append(f"{count} would be added to the log of run {plan.run_id[:12]}, as {metadata['as']}.")
    if plan.register:
        lines.append(f"{len(plan.register):,} segments would be registered.")
    lines += _some("left alone", [f"{one}: no complete frame in it; move it away if unused" for one in plan.left])
    lines += _some("not accepted", [*metadata["conflicts"], *metadata["unusable"]])
    if plan.ended:
        lines.append(f"{plan.ended:,} groups are left out: according to the damaged log no step needs them.")
    if plan.newer:
        lines.append(
            f"{len(plan.newer):,} groups would get their newest frames: late columns were attached after this copy of "
            "the log was made."
        )
        lines += _some("newest frame", [f"group {row.id!r} at {frame.location}" for row, frame in plan.newer])
    if metadata["unused"]:
        lines.append(
            f"{metadata['unused']:,} further frames with late columns are left alone: the log says that they were not "
            "attached, or has newer ones."
        )
    if plan.without_frame:
        lines.append(
            f"{plan.without_frame:,} groups in the log have no frame: it was freed after this copy of the log was "
            "made, or lost. A step that draws one of them quarantines it and continues without it."
        )
    lines.append(f"The trainer would continue at step {metadata['step']}, policy version {metadata['policy_version']}.")
    return [*lines, *_warning(plan)]


def _warning(plan: Plan) -> list[str]:
    """Warn about what a frame does not record."""
    if not plan.found.lost:
        return []
    return [
        "A frame does not record what happened to its group. Some of these may have been trained already and would be "
        "trained again; some may be evaluation groups. If that matters, use --as quarantined and release the "
        "groups you want, or --as dropped.",
    ]


# ------------------------------------------------------------------ forget


def _forget(args: argparse.Namespace) -> int:
    from penstock.runs import forget, forgettable

    folder = plane_folder(args.where)
    with as_corrupt(args.where):
        found = forgettable(folder)
    what = f"{found.groups:,} groups ({size(found.num_bytes)}) and the plans of steps before {found.before_step:,}"
    say: Callable[[str], None] = (lambda _: None) if args.json else print
    say(f"{folder}: run {found.run_id[:12]} would free {what}; they cannot be restored")
    agreed = args.yes or (not args.json and _agreed_to_forget())
    if agreed:
        forget(folder)
    if args.json:
        print(json.dumps({"folder": str(folder), **asdict(found), "done": agreed}, indent=1))
    say(
        "From now on the run keeps only its last steps. The next plane on this folder frees the rest."
        if agreed
        else "Nothing was changed."
    )
    return 0 if agreed else 1


def _agreed_to_forget() -> bool:
    if not sys.stdin.isatty():
        raise InvalidInput("storage forget: asks before it changes anything, and there is no terminal; pass --yes")
    return input("Forget them? [y/N] ").strip().lower() in ("y", "yes")

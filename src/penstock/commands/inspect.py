"""Show the contents of a frame or of a run's folder. Read-only.

penstock inspect group.frame                         samples, columns, codings, bytes
penstock inspect group.frame --json | jq .columns
penstock inspect groups.penstock                     a file of several frames: one line each
penstock inspect runs/demo                           ledger, steps, groups, sizes; also while its plane is running
penstock inspect runs/demo --json | jq .ledger
penstock inspect runs/demo --plot step.svg           the last step: ranks by micro-batches, waiting, shared tokens
penstock inspect group.frame --plot group.png --ranks 8 --trees
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.arrays import known
from penstock.commands.terminal import aligned, masked_line, reasons_line, size
from penstock.commands.which_run import RUN_HELP, checked_where, plane_folder
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames import NAMES, PREFIX_SIZE, Block, Head, decode, describe, frame_size, raw_frames
from penstock.log import as_corrupt
from penstock.plane import Ledger
from penstock.protocol import over_length_text
from penstock.server import printable

if TYPE_CHECKING:
    from penstock.packing import Cost, RankPlan

_SHOWN = 20
"""Rows of a table for people; `--json` lists all."""
_NUMBERS = ("tokens", "loss_tokens", "policy_version")
_COUNTS = ("samples", "tokens", "loss_tokens", "bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", metavar="FRAME|RUN", type=checked_where, help=f"a frame, as written by penstock.encode, or {RUN_HELP}"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a packed step to an .svg or .png file")
    parser.add_argument("--step", type=int, help="for a run: the step to draw (default: the last)")
    parser.add_argument("--ranks", type=int, default=8, help="for a frame: ranks to pack it for (8)")
    parser.add_argument("--cap", type=int, metavar="TOKENS", help="for a frame: tokens per micro-batch (its longest)")
    parser.add_argument("--trees", action="store_true", help="for a frame: compute shared prefixes once")


def run(args: argparse.Namespace) -> int:
    frame = Path(args.what)
    if "://" not in args.what and not frame.exists():
        raise InvalidInput(
            f"{frame}: not a file or folder; give a frame, as written by penstock.encode, or a run's folder"
        )
    if frame.is_file():
        print(_of_frame(frame, args))
    else:
        print(_of_run(plane_folder(args.what, args.keys), args))
    return 0


def _of_frame(frame: Path, args: argparse.Namespace) -> str:
    if args.plot is not None:
        return plot_frame(frame, args.plot, ranks=args.ranks, cap=args.cap, trees=args.trees)
    data = frame.read_bytes()
    if len(data) > frame_size(data[:PREFIX_SIZE]):
        return frames_report(frame, as_json=args.json)
    report = inspect_frame(data)
    return json.dumps(report, indent=1) if args.json else _frame_text(report)


def _of_run(folder: Path, args: argparse.Namespace) -> str:
    if args.plot is not None:
        return plot_run(folder, args.plot, step=args.step)
    return run_report(folder, as_json=args.json)


# ------------------------------------------------------------------ one frame


def inspect_frame(data: bytes) -> dict[str, Any]:
    """Return a frame's contents as plain data: what `penstock inspect --json` prints."""
    front, samples, used = describe(data)
    codings = _codings(front)
    columns = [
        {
            "name": name,
            "coding": codings[name],
            "dtype": samples.columns[name].values.dtype.str if name in samples.columns else None,
            "bytes": num_bytes,
            "bytes_per_token": round(num_bytes / max(samples.num_tokens, 1), 4),
        }
        for name, num_bytes in used.most_common()
    ]
    rows = zip(
        samples.ids,
        samples.text["group"],
        samples.text["env"],
        samples.lengths.tolist(),
        samples.loss_tokens.tolist(),
        map(known, samples.policy_versions.tolist()),
        strict=True,
    )
    keys = ("id", "group", "env", *_NUMBERS)
    return {
        "bytes": len(data),
        "samples": len(samples),
        "tokens": samples.num_tokens,
        "loss_tokens": int(samples.loss_tokens.sum()),
        "tokens_shared": front.header.num_shared,
        "bytes_per_token": round(len(data) / max(samples.num_tokens, 1), 4),
        "columns": columns,
        "rows": [dict(zip(keys, row, strict=True)) for row in rows],
    }


def _codings(front: Head) -> dict[str, str]:
    header = front.header
    named = {"lengths": header.lengths, "loss_tokens": header.loss_tokens, "policy_version": header.policy_versions}
    named |= {spec.name: spec.values for spec in (*header.head_columns, *header.body_columns)}
    if header.parents is not None and header.shared is not None:
        named |= {"parents": header.parents, "shared": header.shared}
    found = {"header": "msgpack"} | {name: _name(block) for name, block in named.items()}
    found |= {text.name: f"{text.num_distinct} distinct" for text in header.text}
    shared = {spec.name for spec in header.body_columns if spec.shares_prefixes}
    return {name: coding + (" + shared prefixes" if name in shared else "") for name, coding in found.items()}


def _name(block: Block) -> str:
    name = NAMES[block.coding]
    if name in ("narrow", "packed"):
        name += f" {block.arg} bit"
    inner = [_name(part) for part in block.parts]
    return f"{name} ({', '.join(inner)})" if inner else name


def _frame_text(report: dict[str, Any]) -> str:
    columns = [[c["name"], c["coding"], f"{c['bytes']:,}", f"{c['bytes_per_token']:g}"] for c in report["columns"]]
    rows = [
        [
            *(printable(row[k]) for k in ("id", "group", "env")),
            *("-" if row[k] is None else f"{row[k]}" for k in _NUMBERS),
        ]
        for row in report["rows"][:_SHOWN]
    ]
    hidden = len(report["rows"]) - len(rows)
    return "\n".join(
        [
            f"{report['samples']} samples, {report['tokens']:,} tokens ({report['loss_tokens']:,} trained, "
            f"{report['tokens_shared']:,} shared), {report['bytes']:,} bytes, {report['bytes_per_token']} B/token",
            "",
            *aligned([["column", "coding", "bytes", "B/token"], *columns], left=2),
            "",
            *aligned([["sample", "group", "env", "tokens", "trained", "version"], *rows], left=3),
            *([f"... and {hidden} more; --json lists all"] if hidden else []),
        ]
    )


# ------------------------------------------------------------------ a file of frames


def frames_report(path: Path, *, as_json: bool) -> str:
    """Return the text or JSON for a file of several frames."""
    frames = inspect_frames(path)
    sums = {name: sum(frame[name] for frame in frames) for name in _COUNTS}
    sums["bytes_per_token"] = round(sums["bytes"] / max(sums["tokens"], 1), 4)
    if as_json:
        columns = Counter(name for frame in frames for name in frame["columns"])
        return json.dumps({"frames": len(frames), **sums, "columns": dict(columns), "rows": frames}, indent=1)
    rows = [
        [str(i), printable(frame["group"]), *(f"{frame[name]:,}" for name in _COUNTS)]
        for i, frame in enumerate(frames[:_SHOWN])
    ]
    hidden = len(frames) - len(rows)
    return "\n".join(
        [
            f"{len(frames)} frames, {sums['samples']:,} samples, {sums['tokens']:,} tokens "
            f"({sums['loss_tokens']:,} trained), {sums['bytes']:,} bytes, {sums['bytes_per_token']} B/token",
            "",
            *aligned([["frame", "group", "samples", "tokens", "trained", "bytes"], *rows], left=2),
            *([f"... and {hidden} more; --json lists all"] if hidden else []),
        ]
    )


def inspect_frames(path: Path) -> list[dict[str, Any]]:
    """Summarize each frame as plain data. Holds one frame in memory at a time."""
    found: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, data in enumerate(raw_frames(file, name=str(path))):
            try:
                samples = decode(data)
            except CorruptFrame as error:
                raise CorruptFrame(f"{path} frame {number}: {error}") from None
            found.append(
                {
                    "group": samples.text["group"][0] if len(samples) else "",
                    "samples": len(samples),
                    "tokens": samples.num_tokens,
                    "loss_tokens": int(samples.loss_tokens.sum()),
                    "bytes": len(data),
                    "columns": list(samples.columns),
                }
            )
    return found


# ------------------------------------------------------------------ a run


def run_report(folder: Path, *, as_json: bool) -> str:
    """Return the text or JSON for a run's folder. JSON lists every step and every group."""
    from penstock.runs import read_run  # not needed for frames

    with as_corrupt(folder):
        if as_json:
            return json.dumps(read_run(folder), indent=1)
        return _run_text(read_run(folder, steps=_SHOWN, groups=_SHOWN))


def _run_text(found: dict[str, Any]) -> str:
    ledger = found["ledger"]
    files = ", ".join(f"{name} {size(count)}" for name, count in found["files"].items())
    lines = [
        f"run in {found['folder']}: epoch {found['epoch']}, session {found['session']}, next step "
        f"{found['next_step']}, policy version {found['policy_version']}",
        f"ledger     {Ledger.from_dict(ledger)}",
        f"trained    {ledger['uses']:,} uses of samples",
        f"discarded  {reasons_line(ledger['discarded'])} (before they were put, or when late columns came)",
        *([f"too long   {over_length_text(ledger['over_length'])}"] if any(ledger["over_length"].values()) else []),
        *([masked_line(ledger["masked"])] if any(ledger["masked"].values()) else []),
        f"groups     {found['num_groups']:,}, {found['num_tokens']:,} tokens; {found['held_groups']:,} held",
        f"bytes      {size(found['frame_bytes'])} of frames kept, {size(found['held_bytes'])} not yet trained; {files}",
    ]
    return "\n".join(printable(line) for line in [*lines, *_steps(found["steps"]), *_groups(found)])


def _steps(steps: list[dict[str, Any]]) -> list[str]:
    if not steps:
        return []
    head = ["step", "state", "groups", "samples", "tokens", "trained", "staleness", "digest of rank 0"]
    rows = [
        [
            f"{s['step']}",
            s["state"],
            f"{s['groups']}",
            f"{s['samples']:,}",
            f"{s['tokens']:,}",
            f"{s['loss_tokens']:,}",
            f"{s['staleness']['mean']:.1f}, at most {s['staleness']['max']}",
            s["digests"][0][:16] if s["digests"] else "",
        ]
        for s in steps
    ]
    first = steps[0]["step"]
    more = [f"... and the steps before {first}; --json lists all"] if first > 1 else []
    return ["", *aligned([head, *rows], left=2), *more]


def _groups(found: dict[str, Any]) -> list[str]:
    groups = found["groups"]
    if not groups:
        return []
    head = ["group", "state", "samples", "tokens", "bytes", "version", "uses"]
    rows = [
        [
            printable(g["id"])[:60],
            f"{g['state']} ({g['reason']})" if g["reason"] else g["state"],
            f"{g['samples']}",
            f"{g['tokens']:,}",
            f"{g['size']:,}",
            f"{g['policy_version']}",
            f"{g['uses']}",
        ]
        for g in groups
    ]
    hidden = found["num_groups"] - len(groups)
    more = [f"... and {hidden:,} groups before them; --json lists all"] if hidden else []
    return ["", *aligned([head, *rows], left=2), *more]


# ------------------------------------------------------------------ pictures


def plot_frame(frame: Path, picture: Path, *, ranks: int, cap: int | None, trees: bool) -> str:
    """Draw the samples of a frame as one packed step. Returns a sentence about it."""
    from penstock.packing import Packing, pack_with

    samples = decode(frame.read_bytes())
    longest = int(samples.lengths.max(initial=1))
    packing = Packing(ranks=ranks, seq_len=longest, micro_batch_max_tokens=cap, long_rows=True, trees=trees)
    step = pack_with(packing, samples)
    title = f"{frame.name}, {ranks} ranks{', trees' if trees else ''}"
    return _drawn(title, [rank.rank_plan for rank in step.ranks], packing.cost, picture)


def plot_run(folder: Path, picture: Path, *, step: int | None) -> str:
    """Draw a step of a run; by default the last one whose plan still exists."""
    from penstock.packing import Cost, RankPlan
    from penstock.runs import planned_step

    number, plans = planned_step(folder, step)
    return _drawn(f"step {number}", [RankPlan.from_bytes(data) for data in plans], Cost(), picture)


def _drawn(title: str, plans: list[RankPlan], cost: Cost, picture: Path) -> str:
    from penstock.view import draw, timing_of

    if not plans or not len(plans[0]):
        raise InvalidInput(f"{title}: no micro-batches; there is nothing to draw")
    draw({title: timing_of(plans, cost)}, picture)
    total = plans[0].accounting.total
    shared = f", {total.shared_tokens:,} not computed twice" if total.shared_tokens else ""
    return f"{picture}: {title}, {total.samples:,} samples, {total.tokens:,} tokens{shared}"

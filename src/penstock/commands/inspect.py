"""Show what a frame or a run's folder holds, without changing either.

penstock inspect group.frame                         samples, columns, how each is coded, bytes
penstock inspect group.frame --json | jq .columns
penstock inspect groups.penstock                     a file of several frames: one line each
penstock inspect runs/demo                           ledger, steps, groups, sizes; also while a plane works on it
penstock inspect runs/demo --json | jq .ledger
penstock inspect runs/demo --plot step.svg           the last step: ranks by micro-batches, waiting, shared tokens
penstock inspect group.frame --plot group.png --ranks 8 --trees
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.arrays import known
from penstock.commands.tables import aligned, printable
from penstock.commands.which_run import RUN_HELP, plane_folder
from penstock.errors import InvalidInput
from penstock.frames import NAMES, PREFIX_SIZE, Block, Head, describe, frame_size

_SHOWN = 20
_NUMBERS = ("tokens", "loss_tokens", "policy_version")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="FRAME|RUN", help=f"a frame, as written by penstock.encode, or {RUN_HELP}")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a packed step to an .svg or .png file")
    parser.add_argument("--step", type=int, help="of a run: the step to draw; the last one unless given")
    parser.add_argument("--ranks", type=int, default=8, help="of a frame: ranks to pack it for (8)")
    parser.add_argument("--cap", type=int, metavar="TOKENS", help="of a frame: tokens of a micro-batch (its longest)")
    parser.add_argument("--trees", action="store_true", help="of a frame: compute what its samples share once")


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
        from penstock.commands.inspect_plot import plot_frame

        return plot_frame(frame, args.plot, ranks=args.ranks, cap=args.cap, trees=args.trees)
    data = frame.read_bytes()
    if len(data) > frame_size(data[:PREFIX_SIZE]):
        from penstock.commands.inspect_frames import report_of

        return report_of(frame, as_json=args.json)
    report = inspect_frame(data)
    return json.dumps(report, indent=1) if args.json else _text(report)


def _of_run(folder: Path, args: argparse.Namespace) -> str:
    if args.plot is not None:
        from penstock.commands.inspect_plot import plot_run

        return plot_run(folder, args.plot, step=args.step)
    from penstock.commands import inspect_run  # frames are looked at without loading the plane

    return inspect_run.report(folder, as_json=args.json)


def inspect_frame(data: bytes) -> dict[str, Any]:
    """What `penstock inspect` shows, as plain data."""
    front, samples, used = describe(data)
    codings = _codings(front)
    columns = [
        {
            "name": name,
            "coding": codings[name],
            "dtype": samples.columns[name].values.dtype.str if name in samples.columns else None,
            "bytes": size,
            "bytes_per_token": round(size / max(samples.num_tokens, 1), 4),
        }
        for name, size in used.most_common()
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


def _text(report: dict[str, Any]) -> str:
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

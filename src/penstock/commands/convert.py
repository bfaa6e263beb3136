"""Convert samples between file formats: frames, JSON lines, Parquet, and the files of other trainers.

  penstock convert rollout_7.pt rollout_7.penstock           formats are detected by ending or by content
  penstock convert a.penstock b.penstock all.parquet         several files into one
  penstock convert runs/demo groups.parquet                  the groups that a run still has
  penstock convert group.penstock - --to jsonl | jq .id      - is standard input or output
  penstock convert data.penstock outputs/rollouts --to prime-rl --ranks 8 --seq-len 8192
  penstock convert --formats                                 list the formats

Prints what the target format cannot hold, counted by name. With --strict the exit code is then 1. Of a run it also
counts the samples that are written although no step takes them: dropped, quarantined, evaluation, scored as error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path

from penstock.commands.terminal import MissingWords, Progress, aligned, size
from penstock.convert import ADVANTAGES
from penstock.errors import InvalidInput
from penstock.integrations.formats.file_formats import FORMATS, Conversion, convert_files
from penstock.integrations.formats.shared import STANDARD, Options
from penstock.server import printable

_EVERY_S = 0.2
"""Seconds between two lines of progress."""
_HEADS = {"unread": "not read", "unwritten": "not written", "left_out": "left out", "untrained": "not trained"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock convert [options] IN [IN ...] OUT"
    parser.add_argument("files", nargs="*", metavar="IN, OUT", help="input files, then the output file")
    parser.add_argument("--from", dest="source", metavar="FORMAT", help="format of the input files")
    parser.add_argument("--to", dest="target", metavar="FORMAT", help="format of the output file")
    parser.add_argument("--formats", action="store_true", help="list the formats")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if anything was lost")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--advantages", choices=ADVANTAGES, help="compute advantages from the rewards of each group")
    parser.add_argument("--reward-key", metavar="KEY", help="for slime: which reward, if samples have several")
    parser.add_argument("--ranks", type=int, default=1, help="for prime-rl: data ranks of the trainer (1)")
    parser.add_argument("--seq-len", type=int, metavar="TOKENS", help="for prime-rl: tokens per micro-batch")
    parser.add_argument("--samples-per-step", type=int, metavar="N", help="for prime-rl: default is all samples")
    parser.add_argument("--first-step", type=int, default=1, metavar="N", help="for prime-rl: first step (1)")


def run(args: argparse.Namespace) -> int:
    if args.formats:
        print("\n".join(formats_table()))
        return 0
    if len(args.files) < 2:
        raise MissingWords(f"{' '.join(args.files) or 'no files'}: give a file to read and one to write; see --help")
    *inputs, output = args.files
    if output != STANDARD and Path(output).is_file() and not args.force:
        raise InvalidInput(f"{output}: already exists; choose another name, or pass --force to overwrite it")
    options = Options(**{option.name: getattr(args, option.name) for option in fields(Options)})
    began = time.monotonic()
    progress = Progress(_EVERY_S)

    def tell(done: Conversion) -> None:
        progress(f"{done.samples:,} samples, {done.tokens:,} tokens")

    done = convert_files(inputs, output, source=args.source, target=args.target, options=options, tell=tell)
    progress.end()
    seconds = time.monotonic() - began
    report = (
        json.dumps({**done.as_dict(), "seconds": round(seconds, 3)}, indent=1) if args.json else text(done, seconds)
    )
    print(report, file=sys.stderr if output == STANDARD else sys.stdout)
    return 1 if args.strict and done.lost else 0


def text(done: Conversion, seconds: float) -> str:
    """Format the report for people."""
    sources = ", ".join(f"{name} ({kind})" for name, kind in zip(done.inputs[:3], done.sources, strict=False))
    more = f" and {len(done.inputs) - 3} more" if len(done.inputs) > 3 else ""
    path = Path(done.output)
    written = f", {size(path.stat().st_size)}" if done.output != STANDARD and path.is_file() else ""
    lines = [
        f"{sources}{more} -> {done.output} ({done.target})",
        f"{counted(done.samples, 'sample')} in {counted(done.groups, 'group')}, {counted(done.tokens, 'token')} "
        f"({done.loss_tokens:,} trained){written}, {seconds:.1f} s",
    ]
    for name, counts in done.lost.as_dict().items():
        if counts:
            lines.append(f"{_HEADS[name]:<13}" + ", ".join(f"{what} ({count:,})" for what, count in counts.items()))
    if done.lost.left_out:
        lines.append(f"{'written':<13}{done.written:,} of {counted(done.samples, 'sample')}")
    return "\n".join(printable(line) for line in lines)  # names of fields and files are not ours


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def formats_table() -> list[str]:
    rows = [["format", "read", "write", "endings", ""]]
    for kind in FORMATS.values():
        able = ["yes" if function is not None else "-" for function in (kind.read, kind.write)]
        rows.append([kind.name, *able, " ".join(kind.endings), kind.summary])
    return aligned(rows, left=5)

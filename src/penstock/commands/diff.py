"""Find where two recorded runs first differ: step, sample, token and column, in one sentence.

  penstock diff runs/a runs/b                 all finished steps
  penstock diff runs/a runs/b --step 12       one step; --json for programs, --view to open the viewer there

Exits 0 when the runs are the same, 1 when they differ.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.commands.view import open_library, port, serve
from penstock.commands.which_run import RUN_HELP, checked_where, export_folder
from penstock.server import printable
from penstock.view import Difference, Export, Library, compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="RUN_A", type=checked_where, help=RUN_HELP)
    parser.add_argument("b", metavar="RUN_B", type=checked_where, help="the other run")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for planes that need one")
    parser.add_argument("--step", type=int, help="compare this step only")
    parser.add_argument("--run", dest="of_run", help="the run, if the folders hold several")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--view", action="store_true", help="open both runs in the viewer, where they differ")
    parser.add_argument("--tokenizer", type=Path, help="for --view: a folder with tokenizer.json")
    parser.add_argument("--assets", type=Path, help="for --view: the asset store with the samples' images")
    parser.add_argument("--assets-run", default="local", help="for --view: the run the images were stored under")
    parser.add_argument("--port", type=port, default=0, help="for --view: on 127.0.0.1; a free one by default")
    parser.add_argument("--no-open", action="store_true", help="for --view: only print the URL")


def run(args: argparse.Namespace) -> int:
    a, b = export_folder(args.a, args.keys), export_folder(args.b, args.keys)
    difference = compare(Export(a), Export(b), run=args.of_run, step=args.step)
    print(json.dumps(asdict(difference), indent=1) if args.json else printable(difference.sentence))
    if args.view:
        library = open_library({"A": a, "B": b}, args)
        library.difference = place(library, difference, args.of_run)
        return serve(library, args)
    return 0 if difference.what == "same" else 1


def place(library: Library, difference: Difference, run: str | None) -> dict[str, Any]:
    """Return where the viewer opens: the sample's index in the first run that has it."""
    for name, export in library.exports.items():
        chosen = export.choose(run)
        if difference.step is None or difference.step not in [step.number for step in export.steps(chosen)]:
            continue
        rows = library.index(name, chosen, difference.step).rows
        found = [row["index"] for row in rows if row["sample_id"] == difference.sample_id]
        if found:
            at = {"export": name, "run": chosen, "step": difference.step, "sample": found[0], "token": difference.token}
            return {"sentence": difference.sentence, **at}
    return {"sentence": difference.sentence}

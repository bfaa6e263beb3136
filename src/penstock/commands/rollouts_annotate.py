"""Write what the trainer made of every token back to verifiers' traces: log-probabilities, entropies and the like.

  penstock rollouts verifiers my-taskset --traces traces ...        episodes are appended to traces/traces.jsonl
  penstock rollouts annotate traces --run runs/demo                 annotate them, in place
  penstock rollouts annotate traces --run runs/demo --out seen.jsonl

The values are those of the run's token export (`export_every` in its configuration). Of a sample that was trained
several times, the last one counts.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from penstock.commands.which_run import RUN_HELP, export_folder
from penstock.view import Export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, help="a folder with traces.jsonl, or such a file")
    parser.add_argument("--run", required=True, dest="of", metavar="RUN", help=f"where the export is: {RUN_HELP}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there; default: in place")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")


def run(args: argparse.Namespace) -> int:
    from penstock.integrations.environments.verifiers_annotations import annotate_file
    from penstock.integrations.environments.verifiers_rollouts import TRACES_FILE

    export = Export(export_folder(args.of, args.keys))
    steps = [step for name in export.runs for step in export.steps(name)]
    records = itertools.chain.from_iterable(step.records() for step in steps)
    out = args.out or (args.traces / TRACES_FILE if args.traces.is_dir() else args.traces)
    found = annotate_file(args.traces, records, out)
    print(
        f"{out}: {found.traces:,} traces annotated, {found.tokens:,} sampled tokens of {len(steps):,} exported steps; "
        f"{found.untrained:,} traces are in none of them"
    )
    return 0

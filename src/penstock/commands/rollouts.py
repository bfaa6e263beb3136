"""Make rollouts with the environments people have, and put them into a plane as groups.

  penstock rollouts endpoint tiny --write-model        the demo's model and its tokenizer, as a folder
  penstock rollouts endpoint tiny --port 8000          serve it, as vLLM would: token ids and log-probabilities
  penstock rollouts verifiers reverse-words --endpoint http://127.0.0.1:8000/v1 --plane tcp://127.0.0.1:7440
  penstock rollouts annotate traces --run runs/demo    what the trainer made of every token, into verifiers' traces

Each says more: penstock rollouts verifiers --help. Ctrl-C ends any of them with exit code 130; `verifiers` then says
what was put. Groups that were put stay in the plane.
"""

from __future__ import annotations

import argparse

from penstock.commands import rollouts_annotate, rollouts_endpoint, rollouts_verifiers

_KINDS = {
    "verifiers": (rollouts_verifiers, "play a verifiers environment"),
    "endpoint": (rollouts_endpoint, "a tiny inference server, for first steps and tests"),
    "annotate": (rollouts_annotate, "write what the trainer made of every token back to verifiers' traces"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (module, summary) in _KINDS.items():
        sub = kinds.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    code: int = _KINDS[args.kind][0].run(args)
    return code

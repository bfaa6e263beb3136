"""Generate rollouts with existing environments, and put them into a plane as groups.

  penstock rollouts endpoint tiny --write-model        write the demo's model and tokenizer to a folder
  penstock rollouts endpoint tiny --port 8000          serve it like vLLM: token ids and log-probabilities
  penstock rollouts verifiers reverse-words --endpoint http://127.0.0.1:8000/v1 --plane tcp://127.0.0.1:7440
  penstock rollouts annotate traces --run runs/demo    add the trainer's values for every token to verifiers' traces

See also penstock rollouts verifiers --help. Ctrl-C ends each of them with exit code 130, and `verifiers` then prints
what was put. Groups that were put stay in the plane.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.terminal import Progress
from penstock.commands.which_run import RUN_HELP, checked_where, export_folder
from penstock.config import Given
from penstock.errors import InvalidInput, PenstockError

if TYPE_CHECKING:
    from penstock.capture import ImageLookup
    from penstock.integrations.environments.verifiers_rollouts import Rollouts, Tally

_VERIFIERS = """Play a verifiers environment against an OpenAI-compatible endpoint, and put its groups into a plane.

  penstock rollouts verifiers my-taskset --endpoint http://127.0.0.1:8000/v1 --plane tcp://127.0.0.1:7440
  penstock rollouts verifiers my-taskset --plane ipc:///tmp/plane --runtime subprocess --group-size 16 --in-flight 64
  penstock rollouts verifiers my-taskset --plane ... --groups 100 --temperature 0.8 --top-p 0.95 --max-tokens 512
  penstock rollouts verifiers my-taskset --plane ... --set agent.max_turns=4 --set taskset.split=train
  penstock rollouts verifiers my-taskset --plane ... --server tcp://127.0.0.1:5000     on an env server
  penstock rollouts verifiers my-taskset --plane ... --traces traces     also save the episodes, to annotate later

ENV is an installed taskset, or a module in this folder. The endpoint must have /inference/v1/generate: vLLM has it, and
so does `penstock rollouts endpoint`. Waits while the plane is full. Without --groups it runs until Ctrl-C, which ends
it with exit code 130 and prints what was put.
"""
_ENDPOINT = """Run a tiny inference server on this machine's CPU, for first steps and tests.

  penstock rollouts endpoint tiny --write-model                       write the demo's model and tokenizer, and end
  penstock rollouts endpoint tiny --write-model bytes                 one for any text and tools: --renderer qwen3
  penstock rollouts endpoint tiny --port 8000                         serve a Hugging Face folder
  penstock rollouts endpoint tiny --weights runs/demo/weights         with the newest weights that a run published

It answers /v1/models, /v1/chat/completions and /inference/v1/generate with token ids and log-probabilities, like vLLM,
and nothing else. Ctrl-C ends it.
"""
_ANNOTATE = """Add the trainer's values for every token to verifiers' traces: log-probabilities, entropies and others.

  penstock rollouts verifiers my-taskset --traces traces ...        episodes are appended to traces/traces.jsonl
  penstock rollouts annotate traces --run runs/demo                 annotate them, in place
  penstock rollouts annotate traces --run runs/demo --out seen.jsonl

The values come from the run's token export (`export_every` in its configuration). If a sample was trained several
times, the last time counts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, summary, description, add, run_kind in (
        ("verifiers", "play a verifiers environment", _VERIFIERS, _add_verifiers, _run_verifiers),
        ("endpoint", "a tiny inference server, for first steps and tests", _ENDPOINT, _add_endpoint, _run_endpoint),
        ("annotate", "add the trainer's values for every token to traces", _ANNOTATE, _add_annotate, _run_annotate),
    ):
        sub = kinds.add_parser(name, help=summary, description=description)
        add(sub)
        sub.set_defaults(run_kind=run_kind)


def run(args: argparse.Namespace) -> int:
    code: int = args.run_kind(args)
    return code


# ------------------------------------------------------------------ verifiers


def _add_verifiers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ENV", help="an installed taskset, or a module in this folder that exports one")
    parser.add_argument("--plane", required=True, metavar="URL", type=checked_where, help="the plane's address")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--run", dest="of_run", default="", help="fail unless the plane serves this run")
    parser.add_argument(
        "--endpoint", default="http://127.0.0.1:8000/v1", metavar="URL", help="the server (default %(default)s)"
    )
    parser.add_argument("--model", default="", help="the endpoint's name for the model; default: its first model")
    parser.add_argument("--tokenizer", default="", help="folder or name of the tokenizer; default: the model's")
    parser.add_argument("--renderer", default="", help="a renderer by name; default: found by the model's name")
    parser.add_argument(
        "--api-key-var", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key (default %(default)s)"
    )
    parser.add_argument(
        "--group-size", type=int, default=8, metavar="N", help="rollouts per task (default %(default)s)"
    )
    parser.add_argument("--groups", type=int, metavar="N", help="number of groups; default: until stopped")
    parser.add_argument("--in-flight", type=int, default=32, metavar="N", help="episodes at once (default %(default)s)")
    parser.add_argument(
        "--max-failures",
        type=int,
        default=3,
        metavar="N",
        help="end after N groups in a row that all failed (default 3)",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default %(default)s)")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens that reach this probability")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="per answer; default: the endpoint's")
    parser.add_argument("--runtime", default="", help="where agents' programs run: subprocess, docker, ...")
    parser.add_argument("--server", default="", metavar="URL", help="an env server; default: in this process")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the environment")
    parser.add_argument("--seed", type=int, help="of the order of tasks; default: another order each time")
    parser.add_argument("--evaluation", action="store_true", help="record the groups and never train them")
    parser.add_argument("--drop-truncated", action="store_true", help="do not train rollouts that a limit ended")
    parser.add_argument(
        "--drop-zero-variance", action="store_true", help="do not put groups whose rollouts all have the same reward"
    )
    parser.add_argument("--assets", type=Path, metavar="DIR", help="the run's asset store, where messages have images")
    parser.add_argument(
        "--image-model",
        type=Path,
        metavar="DIR",
        help="with --assets: folder with config.json and preprocessor_config.json",
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="append the episodes to DIR/traces.jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end, and nothing else")


def _run_verifiers(args: argparse.Namespace) -> int:
    from penstock.client import open as open_plane
    from penstock.integrations.environments.verifiers_rollouts import Tally

    if "://" not in args.plane:
        raise InvalidInput(
            f"--plane {args.plane}: not an address; give the address of a running plane, such as tcp://127.0.0.1:7440"
        )
    rollouts, tally = _rollouts(args), Tally()
    progress = Progress(0.5, log_every_s=10.0)

    def show(tally: Tally) -> None:
        progress(f"{tally}; {tally.playing:,} episodes running")

    with open_plane(args.plane, keys=args.keys, **({"run": args.of_run} if args.of_run else {})) as plane:
        try:
            asyncio.run(rollouts.arun(plane, tally, on_change=None if args.json else show))
        except PenstockError:
            if tally.groups:
                _print_tally(args, tally)
            raise
        except KeyboardInterrupt:
            _print_tally(args, tally)
            raise
        finally:
            progress.end()
    _print_tally(args, tally)
    return 0


def _print_tally(args: argparse.Namespace, tally: Tally) -> None:
    print(json.dumps(asdict(tally)) if args.json else f"{args.env}: {tally}", flush=True)


def _rollouts(args: argparse.Namespace) -> Rollouts:
    from penstock.convert import Truncated, ZeroVariance
    from penstock.integrations.environments.verifiers_rollouts import Environment, Rollouts

    chosen = ((Truncated(), args.drop_truncated), (ZeroVariance(), args.drop_zero_variance))
    settings = Given()
    for text in args.set:
        settings.assign(text)
    sampling: dict[str, Any] = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    names = ["endpoint", "model", "tokenizer", "renderer", "api_key_var"]
    names += ["group_size", "groups", "in_flight", "max_failures", "seed"]
    return Rollouts(
        environment=Environment(name=args.env, settings=settings.tables, runtime=args.runtime, server=args.server),
        sampling={name: value for name, value in sampling.items() if value is not None},
        evaluation=args.evaluation,
        filters=tuple(each for each, wanted in chosen if wanted),
        traces=args.traces,
        images=_images(args.assets, args.image_model),
        **{name: getattr(args, name) for name in names},
    )


def _images(assets: Path | None, model: Path | None) -> ImageLookup | None:
    """Return a function that finds the images of messages and counts their tokens."""
    if assets is None and model is None:
        return None
    if assets is None or model is None:
        raise InvalidInput("--assets and --image-model: give both; where images are stored, and how they are cut")
    from penstock.assets import AssetStore, image_lookup, layout_from_config

    try:
        family = json.loads((model / "config.json").read_text())["model_type"]
        layout = layout_from_config(family, json.loads((model / "preprocessor_config.json").read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(
            f"--image-model {model}: {error}; give the folder of an image model, with config.json and "
            "preprocessor_config.json"
        ) from None
    return image_lookup(AssetStore(assets), layout)


# ------------------------------------------------------------------ endpoint


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model and its tokenizer")
    parser.add_argument(
        "--write-model",
        nargs="?",
        const="letters",
        choices=("letters", "bytes"),
        help="write a tiny model there, and end: the demo's, or one that reads any text and has tools (bytes)",
    )
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a run's weights folder; the newest are served")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for a free one (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling, and for weights that are written")


def _run_endpoint(args: argparse.Namespace) -> int:
    from penstock.demo.endpoint import Endpoint, Engine, save_model

    _no_progress_bars()
    if args.write_model:
        folder = save_model(args.model, kind=args.write_model, seed=args.seed)
        print(f"{folder}: a model; serve it: penstock rollouts endpoint {args.model}")
        return 0
    endpoint = Endpoint(Engine(args.model, weights=args.weights, seed=args.seed), host=args.host, port=args.port)
    endpoint.serve(lambda url: print(f"serving {endpoint.engine.name} at {url}", flush=True))
    return 0


def _no_progress_bars() -> None:
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


# ------------------------------------------------------------------ annotate


def _add_annotate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, help="a folder with traces.jsonl, or such a file")
    parser.add_argument(
        "--run", required=True, dest="of", metavar="RUN", type=checked_where, help=f"where the export is: {RUN_HELP}"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there; default: in place")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")


def _run_annotate(args: argparse.Namespace) -> int:
    from penstock.integrations.environments.verifiers_annotations import annotate_file
    from penstock.integrations.environments.verifiers_rollouts import TRACES_FILE
    from penstock.view import Export

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

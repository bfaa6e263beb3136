"""Play a verifiers environment against an OpenAI-compatible endpoint, and put its groups into a plane as they finish.

  penstock rollouts verifiers my-taskset --endpoint http://127.0.0.1:8000/v1 --plane tcp://127.0.0.1:7440
  penstock rollouts verifiers my-taskset --plane ipc:///tmp/plane --runtime subprocess --group-size 16 --in-flight 64
  penstock rollouts verifiers my-taskset --plane ... --groups 100 --temperature 0.8 --top-p 0.95 --max-tokens 512
  penstock rollouts verifiers my-taskset --plane ... --set agent.max_turns=4 --set taskset.split=train
  penstock rollouts verifiers my-taskset --plane ... --server tcp://127.0.0.1:5000     on an env server
  penstock rollouts verifiers my-taskset --plane ... --traces traces     also keep the episodes, to annotate later

ENV is an installed taskset, or a module in this folder. The endpoint must have /inference/v1/generate: vLLM has it, and
so has `penstock rollouts endpoint`. When the plane is full, it waits. Without --groups it goes on until Ctrl-C, which
ends it with exit code 130 and says what was put.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Given
from penstock.errors import InvalidInput, PenstockError

if TYPE_CHECKING:
    from penstock.capture import ImageLookup
    from penstock.integrations.environments.verifiers_rollouts import Rollouts, Tally

_EVERY_S = {True: 0.5, False: 10.0}
"""Between two lines of progress: on a terminal, and in a log."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", metavar="ENV", help="an installed taskset, or a module in this folder that exports one")
    parser.add_argument("--plane", required=True, metavar="URL", help="the plane's address")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--run", dest="of_run", default="", help="the plane must be that of this run")
    parser.add_argument(
        "--endpoint", default="http://127.0.0.1:8000/v1", metavar="URL", help="the server (default %(default)s)"
    )
    parser.add_argument("--model", default="", help="what the endpoint calls it; default: the first it names")
    parser.add_argument("--tokenizer", default="", help="folder or name of the tokenizer; default: that of the model")
    parser.add_argument("--renderer", default="", help="a renderer by name; default: found by the model's name")
    parser.add_argument(
        "--api-key-var", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key (default %(default)s)"
    )
    parser.add_argument(
        "--group-size", type=int, default=8, metavar="N", help="rollouts per task (default %(default)s)"
    )
    parser.add_argument("--groups", type=int, metavar="N", help="how many groups; default: until it is stopped")
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
    parser.add_argument("--evaluation", action="store_true", help="groups are recorded and never trained")
    parser.add_argument("--assets", type=Path, metavar="DIR", help="the run's asset store, where messages have images")
    parser.add_argument(
        "--image-model",
        type=Path,
        metavar="DIR",
        help="with --assets: folder with config.json and preprocessor_config.json",
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="append the episodes to DIR/traces.jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end, and nothing else")


def run(args: argparse.Namespace) -> int:
    from penstock.client import open as open_plane
    from penstock.integrations.environments.verifiers_rollouts import Tally

    if "://" not in args.plane:
        raise InvalidInput(
            f"--plane {args.plane}: not an address; give that of a plane at work, as tcp://127.0.0.1:7440"
        )
    rollouts, tally = _rollouts(args), Tally()
    progress = Progress(quiet=args.json)
    with open_plane(args.plane, keys=args.keys, **({"run": args.of_run} if args.of_run else {})) as plane:
        try:
            asyncio.run(rollouts.arun(plane, tally, on_change=progress.show))
        except PenstockError:
            if tally.groups:
                _say(args, tally)
            raise
        except KeyboardInterrupt:
            _say(args, tally)
            raise
        finally:
            progress.end()
    _say(args, tally)
    return 0


def _say(args: argparse.Namespace, tally: Tally) -> None:
    print(json.dumps(asdict(tally)) if args.json else f"{args.env}: {tally}", flush=True)


def _rollouts(args: argparse.Namespace) -> Rollouts:
    from penstock.integrations.environments.verifiers_rollouts import Environment, Rollouts

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
        traces=args.traces,
        images=_images(args.assets, args.image_model),
        **{name: getattr(args, name) for name in names},
    )


def _images(assets: Path | None, model: Path | None) -> ImageLookup | None:
    """How images of messages are found, and how many tokens they take."""
    if assets is None and model is None:
        return None
    if assets is None or model is None:
        raise InvalidInput("--assets and --image-model belong together: where images are kept, and how they are cut")
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


class Progress:
    """One line that says how far it is: redrawn on a terminal, now and then in a log."""

    def __init__(self, *, quiet: bool) -> None:
        self._terminal, self._quiet, self._last = sys.stderr.isatty(), quiet, time.monotonic()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if self._quiet or now - self._last < _EVERY_S[self._terminal]:
            return
        self._last = now
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        sys.stderr.write(f"{before}{tally}; {tally.playing:,} episodes at play{after}")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave no half line behind."""
        if self._terminal and not self._quiet:
            sys.stderr.write("\r\x1b[K")

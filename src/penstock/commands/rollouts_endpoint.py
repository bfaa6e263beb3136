"""A tiny inference server on this machine's processor, for first steps and tests.

  penstock rollouts endpoint tiny --write-model                       write the demo's model and tokenizer, and end
  penstock rollouts endpoint tiny --port 8000                         serve a Hugging Face folder
  penstock rollouts endpoint tiny --weights runs/demo/weights         with the newest weights that a run published

It answers /v1/models, /v1/chat/completions and /inference/v1/generate with token ids and log-probabilities, as vLLM
does, and nothing else. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model and its tokenizer")
    parser.add_argument("--write-model", action="store_true", help="write the demo's text model there, and end")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a run's weights folder; the newest are served")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for a free one (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, and of weights that are written")


def run(args: argparse.Namespace) -> int:
    from penstock.demo.endpoint import Endpoint, Engine, save_model

    _no_progress_bars()
    if args.write_model:
        print(f"{save_model(args.model, seed=args.seed)}: a model; serve it: penstock rollouts endpoint {args.model}")
        return 0
    endpoint = Endpoint(Engine(args.model, weights=args.weights, seed=args.seed), host=args.host, port=args.port)
    endpoint.serve(lambda url: print(f"serving {endpoint.engine.name} at {url}", flush=True))
    return 0


def _no_progress_bars() -> None:
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()

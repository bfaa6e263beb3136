"""Run a plane: workers put groups into it, ranks take steps out of it.

  penstock serve runs/demo --ranks 2 --seq-len 4096 --groups-per-step 4 --listen tcp://127.0.0.1:7440
  penstock serve --write-config plane.toml     every setting, with its default and what it does
  penstock serve --config plane.toml           the same from a file; words on the command line win
  penstock serve --config plane.toml --set timeouts.peer_s=5 --set replay.sampler=uniform

It prints where it listens, and the line that a rank and a worker need. SIGTERM ends it within 10 s; nothing that
was acknowledged is lost, and a plane started again on the same folder goes on where this one was.

Exit codes: 0 ended by SIGTERM or Ctrl-C; 1 did not start; 2 bad command line; 3 failed beyond repair (see the log);
4 another plane took the run over; 137 killed, by the watchdog if the log says so; 143 asked twice to end.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.serve.process.config import assign, build_config, load_config
from penstock.serve.process.daemon import Ready, run_plane
from penstock.serve.process.template import TEMPLATE

_FLAGS = {
    "ranks": ("packing", "ranks", "data ranks that take part in every step"),
    "seq_len": ("packing", "seq_len", "samples are cut to this many tokens"),
    "micro_batch_max_tokens": ("packing", "micro_batch_max_tokens", "tokens of a micro-batch; default: seq-len"),
    "groups_per_step": ("target", "groups", "groups that make a step"),
    "samples_per_step": ("target", "samples", "samples that make a step"),
    "tokens_per_step": ("target", "tokens", "tokens that make a step"),
    "replicas": ("", "replicas", "processes per data rank"),
}
"""Flag -> (table, key, help)."""
_TARGETS = ("groups", "samples", "tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help='where the run is kept; "memory:" keeps nothing')
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from a TOML file")
    parser.add_argument("--write-config", type=Path, metavar="FILE", help="write a commented TOML file and end")
    for flag, (_, _, what) in _FLAGS.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", type=int, metavar="N", help=what)
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="the run's name")
    parser.add_argument("--listen", action="append", metavar="URL", help="where to listen; may be given several times")
    parser.add_argument("--keys", metavar="DIR", help="key folder; needed where other hosts can connect")
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics for Prometheus on a loopback address")
    parser.add_argument("--log-file", metavar="FILE", help="write log lines there instead of to stderr")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, by its path")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, which started us, ends")
    parser.add_argument("--json", action="store_true", help="print where it listens as one line of JSON")


def run(args: argparse.Namespace) -> int:
    if args.write_config is not None:
        return _write_config(args.write_config)
    tables = tables_of(args)
    if args.config is None:
        _check_given(tables)
    config = build_config(tables, _where(args))
    say = _say_json if args.json else _say
    return int(run_plane(config, ready=say, parent=args.parent))


def _where(args: argparse.Namespace) -> str:
    """Where the settings stand: a wrong one may be in the file, or among the words that changed it."""
    if args.config is None:
        return "the command line"
    return f"{args.config} and --set {' '.join(args.set)}" if args.set else str(args.config)


def tables_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings as tables: those of the file, then flags, then --set."""
    tables: dict[str, Any] = {} if args.config is None else load_config(args.config)
    named = {"folder": args.folder, "listen": args.listen, "keys": args.keys, "run": args.run_name}
    named |= {"metrics": args.metrics, "log_file": args.log_file}
    tables |= {name: value for name, value in named.items() if value is not None}
    targets = [f"--{kind}-per-step" for kind in _TARGETS if getattr(args, f"{kind}_per_step") is not None]
    if len(targets) > 1:
        raise ConfigError(f"{' and '.join(targets)}: give exactly one; it says when a step is complete")
    if targets:
        tables["target"] = {}  # what the file said no longer counts
    for flag, (table, key, _) in _FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            (tables.setdefault(table, {}) if table else tables)[key] = value
    for text in args.set:
        assign(tables, text)
    return tables


def _check_given(tables: dict[str, Any]) -> None:
    """Name the flag, not the key, for what a newcomer leaves out."""
    flags = {
        "folder": "the run's FOLDER",
        "packing": "--ranks and --seq-len",
        "target": f"one of {', '.join(f'--{kind}-per-step' for kind in _TARGETS)}",
    }
    missing = [flag for name, flag in flags.items() if name not in tables]
    if missing:
        raise ConfigError(f"not enough to start a plane: give {'; '.join(missing)}; or --config FILE")


def _write_config(path: Path) -> int:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        raise ConfigError(f"{path}: exists; remove it first, or write to another file") from None
    print(f"{path}: written; edit it, then: penstock serve --config {path}")
    return 0


def _say(ready: Ready) -> None:
    lines = [f"penstock: run {ready.run!r} in {ready.folder}, process {ready.pid}, next step {ready.next_step}"]
    lines += [f"  listening   {url}" for url in ready.urls]
    lines += [f"  metrics     {ready.metrics}"] if ready.metrics else []
    lines += [f"  a rank      {_rank_line(ready)}", f"  a worker    {_worker_line(ready)}"]
    print("\n".join(lines), flush=True)


def _say_json(ready: Ready) -> None:
    lines = {"rank": _rank_line(ready), "worker": _worker_line(ready)}
    sys.stdout.write(json.dumps(asdict(ready) | lines) + "\n")
    sys.stdout.flush()


def _rank_line(ready: Ready) -> str:
    replica = f", replica=REPLICA, replicas={ready.replicas}" if ready.replicas > 1 else ""
    resume = f", resume_step={ready.next_step}" if ready.next_step > 1 else ""
    return f"source = ps.connect({_place(ready)}, rank=RANK, world={ready.ranks}{replica}{resume})"


def _worker_line(ready: Ready) -> str:
    return f"plane = ps.open({_place(ready)})"


def _place(ready: Ready) -> str:
    """The first address, as another host would write it, and the keys it needs."""
    url = (
        ready.urls[0]
        .replace("//0.0.0.0:", f"//{socket.gethostname()}:")
        .replace("//[::]:", f"//{socket.gethostname()}:")
    )
    keys = ', keys="FOLDER"' if ready.secured and url.startswith("tcp://") else ""
    return f'"{url}"{keys}'

"""Run a plane: workers put groups into it, ranks take steps out of it.

  penstock serve runs/demo --ranks 2 --seq-len 4096 --groups-per-step 4 --listen tcp://127.0.0.1:7440
  penstock serve --run demo --log postgresql://me@db/runs --storage s3://bucket/demo --ranks 2 ...
                                               without a folder: it can be started on any host
  penstock serve --write-config plane.toml     every setting, with its default and what it does
  penstock serve --config plane.toml           settings from a file; the command line overrides them
  penstock serve --config plane.toml --set timeouts.peer_s=5 --set replay.sampler=uniform
  penstock serve /shared/demo --ray demo --ranks 2 --seq-len 4096 --groups-per-step 4
                                               start it in a Ray cluster, where it stays; --ray demo --end ends it

Prints where it listens, and the line of code that a rank and a worker need. SIGTERM ends it within 10 s. Nothing
acknowledged is lost, and a plane started on the same folder continues from there.

Exit codes: 0 ended by SIGTERM or Ctrl-C; 1 did not start; 2 bad command line; 3 failed beyond repair (see the log);
4 another plane took over the run; 137 killed, by the watchdog if the log says so; 143 asked twice to end.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.commands.terminal import MissingWords
from penstock.commands.which_run import checked_where
from penstock.config import Given, add_flags, read_flags, template
from penstock.errors import ConfigError
from penstock.plane import EXAMPLE, TITLE, ServerSettings, read_settings, server_settings
from penstock.server import Ready, run_plane

_TARGETS = ("groups", "samples", "tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=checked_where, help='folder of the run; "memory:" stores nothing on disk'
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="read settings from a TOML file")
    parser.add_argument("--write-config", type=Path, metavar="FILE", help="write a commented TOML file and exit")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process ends; must be our parent")
    parser.add_argument("--json", action="store_true", help="print where it listens as one line of JSON")
    parser.add_argument("--ray", metavar="NAME", help="start it as an actor in this host's Ray cluster")
    parser.add_argument("--end", action="store_true", help="with --ray: end it")
    add_flags(parser, ServerSettings, without=("folder",))


def run(args: argparse.Namespace) -> int:
    if args.write_config is not None:
        return _write_config(args.write_config)
    given = given_by(args)
    if args.ray is not None:
        return _in_ray(args, given)
    if args.config is None:
        _check_given(given.tables)
    say = _say_json if args.json else _say
    return int(run_plane(server_settings(given), ready=say, parent=args.parent))


def _in_ray(args: argparse.Namespace, given: Given) -> int:
    """Start a plane in the cluster, or end one. It keeps running when this process exits."""
    from penstock.ray import end_ray, open_given

    address = f"ray://{args.ray}"
    if args.end:
        end_ray(address)
        print(f"{address}: ended")
        return 0
    print(f"{address}: looking for it in the Ray cluster, or starting it", file=sys.stderr, flush=True)
    with open_given(address, given) as plane:
        status = plane.status()
    if args.json:
        print(json.dumps({"urls": [address], "run": status["run"], "next_step": status["next_step"]}))
        return 0
    print(
        f"penstock: run {status['run']!r} at {address}, next step {status['next_step']}\n"
        f'  a rank      source = ps.connect("{address}", rank=RANK, world={status["ranks"]})\n'
        f'  a worker    plane = ps.open("{address}")\n'
        f"  end it      penstock serve --ray {args.ray} --end"
    )
    return 0


def given_by(args: argparse.Namespace) -> Given:
    """Collect settings: from the file, then flags, then --set. Later ones win."""
    given = Given() if args.config is None else read_settings(args.config)
    if args.folder is not None:
        given.set("folder", args.folder)
    targets = [f"--{unit}-per-step" for unit in _TARGETS if getattr(args, f"setting_{unit}_per_step") is not None]
    if len(targets) > 1:
        raise ConfigError(f"{' and '.join(targets)}: give exactly one; it decides when a step is complete")
    if targets:
        given.tables["target"] = {}  # the flag replaces all of the file's [target]
    read_flags(args, ServerSettings, given, without=("folder",))
    return given


def _check_given(tables: dict[str, Any]) -> None:
    """Raise for missing settings, naming the flags: a newcomer does not know the keys of the file."""
    flags = {
        "folder": "the run's FOLDER, or --log and --storage",
        "packing": "--ranks and --seq-len",
        "target": f"one of {', '.join(f'--{kind}-per-step' for kind in _TARGETS)}",
    }
    if {"log", "storage"} <= tables.keys():
        del flags["folder"]
    missing = [flag for name, flag in flags.items() if name not in tables]
    if missing:
        raise MissingWords(f"not enough to start a plane: give {'; '.join(missing)}; or --config FILE")


def _write_config(path: Path) -> int:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template(EXAMPLE, title=TITLE))
    except FileExistsError:
        raise ConfigError(f"{path}: exists; remove it first, or write to another file") from None
    print(f"{path}: written; edit it, then: penstock serve --config {path}")
    return 0


def _say(ready: Ready) -> None:
    lines = [f"penstock: run {ready.run!r} in {ready.folder}, process {ready.pid}, next step {ready.next_step}"]
    lines += [f"  listening   {url}" for url in ready.urls]
    lines += [f"  metrics     {ready.metrics}"] if ready.metrics else []
    lines += _http_lines(ready) if ready.http else []
    lines += [f"  a rank      {_rank_line(ready)}", f"  a worker    {_worker_line(ready)}"]
    print("\n".join(lines), flush=True)


def _http_lines(ready: Ready) -> list[str]:
    lines = [f"  http        {ready.http}/v1/groups, described in {ready.http}/openapi.json"]
    return lines + ([f"  its token   {ready.http_token}"] if ready.http_token else [])


def _say_json(ready: Ready) -> None:
    lines = {"rank": _rank_line(ready), "worker": _worker_line(ready)}
    sys.stdout.write(json.dumps(asdict(ready) | lines) + "\n")
    sys.stdout.flush()


def _rank_line(ready: Ready) -> str:
    replica = f", replica=REPLICA, replicas={ready.replicas}" if ready.replicas > 1 else ""
    return f"source = ps.connect({_arguments(ready)}, rank=RANK, world={ready.ranks}{replica})"


def _worker_line(ready: Ready) -> str:
    return f"plane = ps.open({_arguments(ready)})"


def _arguments(ready: Ready) -> str:
    """Return the first address as another host writes it, and the keys argument if it needs one."""
    url = (
        ready.urls[0]
        .replace("//0.0.0.0:", f"//{socket.gethostname()}:")
        .replace("//[::]:", f"//{socket.gethostname()}:")
    )
    keys = ', keys="FOLDER"' if ready.secured and url.startswith("tcp://") else ""
    return f'"{url}"{keys}'

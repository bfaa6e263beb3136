"""Run a keeper: it keeps the frames of this node for a plane that has keepers, and gives ranks their samples.

  penstock serve runs/demo --copies 2 --listen tcp://0.0.0.0:7440 --keys runs/keys ...    the plane, on one host
  penstock keep --plane tcp://head:7440 --folder /local/penstock --keys keys --listen tcp://0.0.0.0:*    on each node
  penstock keep --plane tcp://127.0.0.1:7440 --folder /tmp/frames --node a                a second one on this host

Workers and ranks need nothing new: the plane tells them where keepers are, their own node's first. A keeper that is
started again on its folder goes on with what it has. Beyond loopback it needs keeper.key, keeper.secret and plane.key
of `penstock keys`. SIGTERM ends it; nothing that was acknowledged is lost.

Exit codes: 0 ended by SIGTERM or Ctrl-C; 1 did not start, or the plane refused it; 2 bad command line; 3 failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from types import FrameType

from penstock.config import Given, add_flags, build, read_flags
from penstock.errors import ConfigError, PenstockError
from penstock.serve.keepers import KeeperServer, KeeperSettings
from penstock.serve.process.log_format import LineFormatter
from penstock.serve.process.watchdog import die_with_parent

logger = logging.getLogger("penstock.process")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, which started us, ends")
    parser.add_argument("--json", action="store_true", help="print where it listens as one line of JSON")
    add_flags(parser, KeeperSettings)


def run(args: argparse.Namespace) -> int:
    given = Given()
    read_flags(args, KeeperSettings, given)
    for name, example in (("plane", "tcp://HOST:7440"), ("folder", "/local/penstock")):
        if name not in given.tables:
            raise ConfigError(f"--{name}: missing; give one, such as --{name} {example}")
    settings = build(KeeperSettings, given)
    os.umask(0o077)
    if args.parent is not None and not die_with_parent(args.parent, signal.SIGTERM):
        raise ConfigError(f"parent {args.parent}: this process was started by {os.getppid()}; name that one")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger("penstock")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        return _serve(KeeperServer(settings), as_json=args.json)
    finally:
        root.removeHandler(handler)


def _serve(server: KeeperServer, *, as_json: bool) -> int:
    def end(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: ending", signal.Signals(number).name)
        server.stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    ready = {"pid": os.getpid(), "name": server.name, "node": server.settings.node_name, "url": server.url}
    words = f"keeper {server.name} listens at {server.url}, for the plane at {server.settings.plane}"
    print(json.dumps(ready) if as_json else words, flush=True)
    try:
        server.run()
    except PenstockError:
        raise  # said in one sentence
    except Exception:
        logger.exception("the keeper failed")
        return 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    logger.info("ended")
    return 0

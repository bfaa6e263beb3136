"""Create CURVE keys for a plane that other hosts can reach: only their owners may connect.

  penstock keys runs/keys                          a pair for the plane and one for its clients
  penstock keys runs/keys --client trainer --client workers --writer loader
  penstock serve runs/demo --keys runs/keys --listen tcp://0.0.0.0:7440 ...

In a folder that already has the plane's pair, only the named keys are added. Existing keys are never replaced.
With a writer's key a trusted worker writes frames to storage itself, and the plane trusts the metadata it sends. With
a client's key a process sends its frames to the plane, which checks them: use that for workers that run generated
code. To revoke a client, remove its file from allowed/ (a writer's: from writers/) and restart the plane.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from penstock.errors import ConfigError
from penstock.transport import make_keys

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the key folder")
    parser.add_argument("--client", action="append", metavar="NAME", help='default: one pair, named "client"')
    parser.add_argument("--writer", action="append", metavar="NAME", help="a pair for a trusted process; default: none")
    parser.add_argument("--json", action="store_true", help="print the files as one JSON object")


def run(args: argparse.Namespace) -> int:
    clients, writers = tuple(args.client or ()), tuple(args.writer or ())
    for flag, names in (("--client", clients), ("--writer", writers)):
        for name in names:
            if not _NAME.fullmatch(name) or name == "plane":
                raise ConfigError(f"{flag} {name!r}: must be letters, digits, and _ . - inside; 'plane' is reserved")
    both = sorted(set(clients) & set(writers))
    if both:
        raise ConfigError(f"--writer {both[0]!r}: a client has the same name; choose another")
    has_plane = (args.folder / "plane.secret").exists()
    if has_plane and not clients and not writers:
        how = "name the clients to add with --client NAME, writers with --writer NAME"
        raise ConfigError(f"{args.folder}: already has keys; {how}")
    if not has_plane:
        clients = clients or ("client",)
    try:
        made = make_keys(args.folder, clients, writers=writers, plane=not has_plane)
    except OSError as error:
        raise ConfigError(f"{args.folder}: {error.strerror}; give a folder that can be created and written") from None
    print(json.dumps({"made": [str(path) for path in made]}) if args.json else _text(args.folder, made))
    return 0


def _text(folder: Path, made: list[Path]) -> str:
    clients = sorted(path.stem for path in made if path.parent.name in ("allowed", "writers"))
    lines = [f"{path.relative_to(folder)!s:<28}{path.stat().st_mode & 0o777:o}" for path in made]
    give = [f"  to {name}: plane.key, {name}.key, {name}.secret" for name in clients]
    other = [name for name in clients if name != "client"]
    rename = ["  (a process looks for client.key and client.secret: rename them in its own copy of the folder)"]
    return "\n".join(
        [
            f"keys in {folder}",
            *(f"  {line}" for line in lines),
            "Give, over a safe channel:",
            *give,
            *(rename if other else []),
            "plane.secret stays with the plane.",
        ]
    )

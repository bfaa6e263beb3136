"""What a keeper is told when it starts."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from penstock.config import check
from penstock.errors import ConfigError
from penstock.send.copies import NAME
from penstock.send.timeouts import Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """Everything a keeper is told."""

    folder: Annotated[
        str, Meta(min_length=1, description="where frames are kept: on a disk of this node", extra={"path": True})
    ]
    plane: Annotated[str, Meta(description="the plane's address, tcp://HOST:PORT")] = ""
    node: Annotated[str, Meta(description="this node's name; empty: the host's")] = ""
    listen: Annotated[
        str, Meta(description="where producers, ranks and other keepers connect; other hosts need keys")
    ] = "tcp://127.0.0.1:*"
    host: Annotated[
        str, Meta(description="the name or address that others are told; empty: as in `listen`, or this host's")
    ] = ""
    keys: Annotated[
        str | None,
        Meta(
            description="folder with keeper.key, keeper.secret and plane.key, of `penstock keys`", extra={"path": True}
        ),
    ] = None
    quota_bytes: Annotated[
        int | None, Meta(ge=1, description="bytes of frames it may keep; beyond, puts wait; none: what the disk has")
    ] = None
    run: Annotated[str, Meta(description="the run that the plane must have; empty: whichever it has")] = ""
    timeouts: Annotated[Timeouts, Meta(description="how long anybody may be silent")] = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        check(self)
        if NAME.fullmatch(self.node_name) is None:
            raise ConfigError(f"node: {self.node_name!r}; letters, digits and _ . - are allowed, at most 100")

    @property
    def node_name(self) -> str:
        return self.node or this_node()


def this_node() -> str:
    """What this host is called."""
    return socket.gethostname().replace(" ", "-") or "node"

"""What one unit of work takes, measured on one machine: the numbers that a simulated cluster is made of.

`calibrate.py` measures them; `constants.json` has those of the machine that they ship with, with date and name. All
seconds are of one core, but for `Disk`, which is wall time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, InvalidInput

SHIPPED = Path(__file__).with_name("constants.json")
KINDS = ("text", "r3", "topk")
"""What a token carries: ids and log-probabilities; beside them experts of 48 layers, or 64 likely ids of a teacher."""


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost that grows with the tokens of what is worked on."""

    base_s: float
    """For a call."""
    token_s: float
    """For each token."""

    def of(self, tokens: float) -> float:
        return self.base_s + self.token_s * tokens


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What groups of 16 with these columns cost."""

    frame_bytes: float
    """Per token, as it is kept; what samples of a group share is stored once."""
    taken_bytes: float
    """Per token, as it is sent to ranks."""
    encode: Line
    """A worker encodes a group."""
    keep: Line
    """A keeper reads and checks a group, and makes its facts."""
    take: Line
    """A keeper gathers what one rank wants of it."""
    fill: Line
    """A rank reads what it took, checks its digest and fills its micro-batches."""


class Plane(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plane that sees facts only."""

    accept_s: float
    """For a group."""
    sample_s: float
    """To plan one sample."""
    rank_s: float
    """To plan one rank."""
    protocol_s: float
    """Messages of one rank and step."""
    facts_bytes: float
    """Of a group of 16."""


class Disk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where frames and the log are kept."""

    sync_s: float
    write_bytes_s: float
    """Bytes per second."""


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that was measured, when, and on what."""

    date: str
    machine: dict[str, Any]
    kinds: dict[str, Kind]
    plane: Plane
    disk: Disk
    send_byte_s: float
    """A process sends or receives one byte over a socket."""
    call_s: float
    """A message, whatever its size: packed, sent, received, read."""


def read_constants(path: Path = SHIPPED) -> Constants:
    """The constants of a file; ConfigError names the key that is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Constants)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}; write one: penstock simulate calibrate --out FILE") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; write it anew with `penstock simulate calibrate --out FILE`") from None


def write_constants(constants: Constants, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(constants), indent=1) + b"\n")

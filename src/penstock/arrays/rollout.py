"""A rollout's data beside its tokens: metrics, info, outcome, seconds, and the role of each token.

A sample carries it as one short text, the JSON of a `RolloutInfo`, so frames, exports and files store it like a name.
The text is ASCII and bounded, because it travels with a group's metadata, which must stay small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.errors import InvalidInput

MAX_METRICS_BYTES = 4096
MAX_INFO_BYTES = 4096
MAX_ROLES_BYTES = 16384
"""Roles of about 2,500 turns."""
MAX_ROLLOUT_BYTES = 32768
"""Limit for the complete text."""
MAX_ERROR = 500
"""Characters kept of an error."""


class Roles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The role of each token of a sample, as runs.

    >>> roles = Roles.of([("user", 3), ("assistant", 2), ("user", 1)])
    >>> roles.names, roles.runs, list(roles)
    (('user', 'assistant'), (0, 3, 1, 2, 0, 1), [('user', 3), ('assistant', 2), ('user', 1)])
    """

    names: tuple[str, ...]
    runs: tuple[int, ...]
    """For each turn the index of its name, then its number of tokens."""

    @staticmethod
    def of(turns: Iterable[tuple[str, int]]) -> Roles:
        found = [(name, count) for name, count in turns if count]
        names = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in found))}
        return Roles(tuple(names), tuple(number for name, count in found for number in (names[name], count)))

    def __iter__(self) -> Any:
        """(name, tokens) of each turn."""
        return ((self.names[i], count) for i, count in zip(self.runs[::2], self.runs[1::2], strict=True))

    def is_valid(self) -> bool:
        """Return whether every run names a role and has tokens."""
        return len(self.runs) % 2 == 0 and all(
            0 <= i < len(self.names) and count > 0 for i, count in zip(self.runs[::2], self.runs[1::2], strict=True)
        )


class RolloutInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Data of one rollout. Fields mean what they do in `Trajectory`."""

    metrics: dict[str, float | None] = {}
    """None for a number that is not finite."""
    info: dict[str, Any] = {}
    stop_condition: str = ""
    truncated: bool = False
    error: str = ""
    agent: str = ""
    seconds: float | None = None
    roles: Roles | None = None

    def to_text(self, where: str) -> str:
        """Return the text that a sample carries, or "" if nothing is known."""
        if self == _NOTHING:
            return ""
        fields = msgspec.to_builtins(self)
        check_size(fields.get("roles", {}), f"{where}.roles", MAX_ROLES_BYTES)
        return _dumps(fields)


_NOTHING = RolloutInfo()
_DECODER = msgspec.json.Decoder(RolloutInfo)


def read_rollout(text: str) -> RolloutInfo:
    """Parse a sample's rollout text.

    >>> read_rollout('{"seconds":1.5,"metrics":{"format":0.5}}').metrics
    {'format': 0.5}
    """
    return _DECODER.decode(text) if text else _NOTHING


def rollout_text(given: object, where: str) -> str:
    """Return the checked text of a mapping, a `RolloutInfo` or a text. Raises InvalidInput."""
    if isinstance(given, RolloutInfo):
        return given.to_text(where)
    if isinstance(given, Mapping):
        given = _dumps(dict(given), where)
    if not isinstance(given, str):
        raise InvalidInput(f"{where}: a {type(given).__name__}; must be a mapping, or its JSON")
    problem = text_problem(given)
    if problem:
        raise InvalidInput(f"{where}: {problem}")
    return given


def text_problem(text: str) -> str:
    """Return why a sample cannot carry this text, or ""."""
    if not text:
        return ""
    if len(text) > MAX_ROLLOUT_BYTES:
        return f"{len(text):,} bytes; at most {MAX_ROLLOUT_BYTES:,}"
    if not (text.isascii() and text.isprintable()):
        return "must be JSON in printable ASCII, with other characters escaped"
    try:
        found = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"not the JSON of a RolloutInfo: {error}"
    if found.roles is not None and not found.roles.is_valid():
        return "roles: each run is the index of a name and a number of tokens"
    if found.seconds is not None and not 0 <= found.seconds < math.inf:
        return f"seconds: {found.seconds}; must be a number of at least 0"
    return ""


def check_metrics(metrics: Any, where: str) -> dict[str, float | None]:
    """Return metrics in stored form. Raises InvalidInput for values that are not numbers, and for too many."""
    out: dict[str, float | None] = {}
    for name, value in _mapping(metrics, where).items():
        try:
            number = math.nan if value is None else float(value)
        except OverflowError:  # an int that no float holds
            number = math.inf
        except (TypeError, ValueError):
            raise InvalidInput(f"{where}[{name!r:.60}]: {value!r:.60}; must be a number") from None
        out[str(name)] = number if math.isfinite(number) else None
    check_size(out, where, MAX_METRICS_BYTES)
    return out


def check_info(info: Any, where: str) -> dict[str, Any]:
    """Return info in stored form. Raises InvalidInput for values that JSON cannot express, and for too many."""
    found = _mapping(info, where)
    check_size(found, where, MAX_INFO_BYTES)
    plain: dict[str, Any] = json.loads(_dumps(found))  # a copy, so the caller may change its own later
    return plain


def check_seconds(seconds: Any, where: str) -> float | None:
    if seconds is None:
        return None
    try:
        number = float(seconds)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidInput(f"{where}: {seconds!r:.60}; must be a number of at least 0, or None")
    return number


def check_size(value: Any, where: str, limit: int) -> None:
    """Raise unless a value's JSON has at most `limit` bytes."""
    size = len(_dumps(value, where))
    if size > limit:
        raise InvalidInput(f"{where}: {size:,} bytes as JSON; at most {limit:,} are kept, keep the rest elsewhere")


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{where}: a {type(given).__name__}; must be a mapping")
    return dict(given)


def _dumps(value: Any, where: str = "rollout") -> str:
    """Return JSON in plain ASCII, so nothing in it can be a control character."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain).replace("\x7f", "\\u007f")
        if "\\ud" in text:  # half of a surrogate pair: Python writes it, and no other reader takes it
            json.dumps(value, ensure_ascii=False, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: {error}; give values that JSON has") from None
    return text


def _plain(value: Any) -> Any:
    """Convert numpy scalars to Python numbers."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"a {type(value).__name__}")

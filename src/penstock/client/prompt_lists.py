"""Reads prompts for `plane.tasks`: names or small JSON objects, from a list, an iterable or a file of JSON lines."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.protocol import MAX_ARMS, MAX_PROMPTS, check_prompt

if TYPE_CHECKING:
    from penstock.replay import Curriculum

Prompt: TypeAlias = str | Mapping[str, Any]
"""A name, or an object with a `name` and whatever a worker needs."""
_MAX_SHOWN = 200
"""Characters of a path in an error."""
_ENCODE = msgspec.json.Encoder(order="deterministic")


def read_prompts(prompts: str | os.PathLike[str] | Iterable[Prompt]) -> list[tuple[str, bytes]]:
    """Return names and payloads. A text or a path is a file with one JSON value in each line.

    >>> read_prompts(["a", {"name": "b", "question": "1 + 1?"}])
    [('a', b''), ('b', b'{"name":"b","question":"1 + 1?"}')]
    """
    if not isinstance(prompts, (str, os.PathLike, Iterable)):
        raise InvalidInput(f"prompts: {prompts!r:.60}; give a list of prompts, or a file with one in each line")
    items = _lines(Path(prompts)) if isinstance(prompts, (str, os.PathLike)) else enumerate(prompts)
    found: dict[str, bytes] = {}
    places: dict[str, object] = {}
    for place, item in items:
        name, payload = _read(item, place)
        if name in found:
            raise InvalidInput(f"prompts[{place}]: {name!r} is also the name of prompts[{places[name]}]; use each once")
        found[name], places[name] = payload, place
        if len(found) > MAX_PROMPTS:
            raise InvalidInput(f"prompts: more than {MAX_PROMPTS:,}; use several lists")
    if not found:
        raise InvalidInput("prompts: none; give at least one")
    return list(found.items())


def _read(item: object, place: object) -> tuple[str, bytes]:
    if isinstance(item, str):
        name, payload = item, b""
    elif isinstance(item, Mapping) and isinstance(item.get("name"), str):
        name = item["name"]
        try:
            payload = _ENCODE.encode(dict(item))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"prompts[{place}]: {name[:40]!r} is not JSON: {error}") from None
        if b"null" in payload and _holds_nan(item):
            raise InvalidInput(f"prompts[{place}]: {name[:40]!r} holds NaN or an infinite number; JSON has neither")
    else:
        raise InvalidInput(
            f"prompts[{place}]: {str(item)[:80]!r}; give a name, or an object with one: "
            '{"name": "math-17", "question": ...}'
        )
    try:
        check_prompt(name, payload)
    except InvalidInput as error:
        raise InvalidInput(f"prompts[{place}]: {error}") from None
    return name, payload


def _holds_nan(value: object) -> bool:
    """Return whether a JSON value holds a number that would be written as null."""
    if isinstance(value, Mapping):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_nan, value))
    return isinstance(value, float) and not math.isfinite(value)


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    try:
        is_file = path.is_file()
    except OSError:  # no file has such a name
        is_file = False
    if not is_file:
        shown = str(path) if len(str(path)) <= _MAX_SHOWN else f"...{str(path)[-_MAX_SHOWN:]}"
        raise InvalidInput(f"prompts: {shown!r} is no file; give a file of JSON lines, or a list of names")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidInput(f"{path}, line {number}: not JSON: {error}") from None


def order_fields(order: Curriculum | None, names: Sequence[str]) -> dict[str, Any]:
    """Return what an offer of a list says about its order.

    The plane runs no code of a worker: it gets the name of a class that it knows, and parameters."""
    if order is None:
        return {"shuffle": True}
    from penstock.replay import DifficultyPools, Sequential, Thompson  # only for workers that choose an order

    if isinstance(order, Sequential):
        return {"shuffle": order.shuffle}
    if not isinstance(order, (DifficultyPools, Thompson)):
        raise InvalidInput(
            f"tasks: order: {type(order).__name__}; give ps.Sequential, ps.DifficultyPools or ps.Thompson. The plane "
            "runs no code of a worker: choose prompts by a class of your own where you call plane.group"
        )
    fields: dict[str, Any] = {"shuffle": True, "order": type(order).__name__, "parameters": order.parameters()}
    if isinstance(order, Thompson) and order.arms is not None:
        found = [order.arm_of(name) for name in names]
        arms = {arm: i for i, arm in enumerate(dict.fromkeys(found))}
        if len(arms) > MAX_ARMS:
            raise InvalidInput(f"tasks: order: Thompson with {len(arms):,} arms; give at most {MAX_ARMS:,}")
        fields |= {"arms": tuple(arms), "arm_of": np.array([arms[arm] for arm in found], "<u2").tobytes()}
    return fields

"""`ray://NAME`: create the plane of that name in the cluster, or find it; a client's end that moves with it."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from penstock.config import Given, build, keywords_of, nested, template
from penstock.errors import ConfigError, PenstockError, PlaneLost
from penstock.ray import calls
from penstock.ray.calls import actor_of, address_in
from penstock.ray.plane_actor import PlaneActor, new_keys
from penstock.send.resolving import Address, ResolvingClient
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.handles import Handle
from penstock.serve.clients.plane import Plane
from penstock.serve.settings import ClusterSettings

SCHEME = "ray://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_START_S = 120.0
"""A plane that does not listen after this long is not waited for; starting a Ray worker takes seconds."""
_LOOK_S = 0.1
_CALLERS = ("timeouts",)
"""Settings that a client may have otherwise than the plane."""
_NOT_HERE = {
    "keys": "the plane makes its own and hands them out",
    "listen": "the plane listens at its node's address",
}


_ANY = {"packing": {"ranks": 1, "seq_len": 1}, "target": {"groups": 1}}
"""What a plane's settings must have, where only others are looked at."""


class RayPlane(Plane):
    """A line to a plane of a Ray cluster."""

    def __init__(self, name: str, *, run: str, timeouts: Timeouts) -> None:
        self._name = name
        address = f"{SCHEME}{name}"
        handle = Handle.of(address, run, None, timeouts)
        super().__init__(partial(client, name), url=address, run=run, timeouts=timeouts, handle=handle)

    def kill(self) -> None:
        """End the plane for everybody. The run stays in its folder."""
        self.close()
        actor = actor_of(self._name)
        with suppress(PlaneLost):  # it may be one that is being started, or never was
            calls.ask(actor, "stop")
        calls.end(actor)


def open_ray(address: str, given: Mapping[str, Any]) -> Plane:
    """The plane at an address, started if there is none and settings are given."""
    return open_given(address, nested(ClusterSettings, given, address))  # names that nobody knows are refused as such


def open_given(address: str, given: Given, *, node: str | None = None) -> Plane:
    """`open_ray` for settings as a file or a command line has them. A plane with a shared `log` begins on `node`, by
    its id; None: on the node of this process."""
    name, tables = name_of(address), given.tables
    for unusable, reason in _NOT_HERE.items():
        if tables.get(unusable):
            raise ConfigError(f"{address}: {unusable}: {tables[unusable]!r}; {reason}; leave it out")
    calls.attach()
    if set(tables) - {"timeouts", "run", *_NOT_HERE}:
        _create_or_check(name, address, given, node)
    elif calls.find(actor_of(name), anew=True) is None:
        raise ConfigError(
            f"{address}: the cluster has no such plane; give ranks, seq_len and one of groups_per_step, "
            "samples_per_step, tokens_per_step to start it"
        )
    _wait_until_it_listens(name)
    timeouts = build(ClusterSettings, {**_ANY, "timeouts": tables.get("timeouts", {})}, address).timeouts
    return RayPlane(name, run=tables.get("run", ""), timeouts=timeouts)


def connect_ray(address: str) -> ResolvingClient:
    """A client's end, for a rank's source."""
    name = name_of(address)
    calls.attach()
    return client(name)


def name_of(address: str) -> str:
    name = address.removeprefix(SCHEME)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"address {address!r}: must be ray://NAME, of letters, digits, _ . and -")
    return name


def client(name: str) -> ResolvingClient:
    """Connected where the plane is now, if it can be asked; else as soon as it can."""
    try:
        first: Address | None = where(name)
    except PlaneLost:
        first = None
    return ResolvingClient(partial(where, name), first=first)


def where(name: str) -> Address:
    """Where the plane listens, as its actor says; PlaneLost while it does not."""
    return address_in(f"{SCHEME}{name}", calls.ask(actor_of(name), "place"))


def _create_or_check(name: str, address: str, given: Given, node: str | None) -> None:
    if calls.find(actor_of(name), anew=True) is None:
        settings = _absolute(name, build(ClusterSettings, given))
        text = template(settings, title=f"The plane {address}.", all_values=True)
        pinned = "log" not in given.tables
        head = next((found.id for found in calls.nodes() if found.is_head), None)
        begins = head if pinned else node or calls.my_node()
        calls.start(PlaneActor, actor_of(name), name, text, new_keys(), node=begins, stays=pinned)
    tables = tomllib.loads(_settings(name))
    theirs = build(ClusterSettings, tables, address)
    merged = replace(given, tables=_merged(tables, given.tables))
    _check_same(address, given, _absolute(name, build(ClusterSettings, merged)), theirs)


def _merged(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """What the running plane has, changed by what was given; a step's target is one thing."""
    return {
        **theirs,
        **{
            name: {**theirs[name], **value}
            if isinstance(value, dict) and isinstance(theirs.get(name), dict) and name != "target"
            else value
            for name, value in mine.items()
        },
    }


def _absolute(name: str, settings: ClusterSettings) -> ClusterSettings:
    """With a folder that means the same in every process."""
    folder = Path.home() / ".penstock" / name / "log" if settings.log is None else Path(settings.log).resolve()
    return replace(settings, log=str(folder))


def _settings(name: str) -> str:
    """Of the plane that runs, also one that is being started."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return str(calls.ask(actor_of(name), "settings"))
        except PlaneLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)


def _check_same(address: str, given: Given, mine: ClusterSettings, theirs: ClusterSettings) -> None:
    """Refuse what was asked for otherwise than the running plane has it."""
    for keyword in keywords_of(ClusterSettings):
        if keyword.path in _CALLERS or not _is_given(given.tables, keyword.path):
            continue
        here, there = (reduce(getattr, keyword.path.split("."), settings) for settings in (mine, theirs))
        if here != there:
            raise ConfigError(
                f"{address}: {given.name(keyword.path)}: {here!r} here, {there!r} in the plane that runs there; leave "
                "it out, kill that plane, or use another name"
            )


def _is_given(tables: Mapping[str, Any], path: str) -> bool:
    table, _, name = path.rpartition(".")
    return name in (tables.get(table, {}) if table else tables)


def _wait_until_it_listens(name: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            where(name)
        except PlaneLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)
        except PenstockError:
            calls.end(actor_of(name))  # it never served anybody
            raise
        else:
            return

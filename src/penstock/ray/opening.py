"""`ray://NAME`: create the plane of that name in the cluster, or find it; a client's end that moves with it."""

from __future__ import annotations

import logging
import re
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from penstock.client import Handle, Plane
from penstock.config import Given, build, keywords_of, nested, template
from penstock.errors import ConfigError, PenstockError, PlaneLost
from penstock.plane import ClusterSettings
from penstock.protocol import Timeouts
from penstock.ray import calls
from penstock.ray.calls import actor_of, address_in, record_name
from penstock.ray.placing import absolute, is_movable
from penstock.ray.plane_actor import PlaneActor, new_keys, record_of
from penstock.transport import Address, ResolvingClient

logger = logging.getLogger("penstock.ray")
SCHEME = "ray://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_START_S = 120.0
"""A plane that does not listen after this long is not waited for; starting a Ray worker takes seconds."""
_LOOK_S = 0.1
_SAY_S = 5.0
"""A wait says its reason after this long, and again."""
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
        end_ray(f"{SCHEME}{self._name}")


def end_ray(address: str) -> None:
    """End a plane for everybody, also one that cannot be reached. The run stays in its folder."""
    name = name_of(address)
    calls.attach()
    with suppress(PlaneLost):  # it may be one that is being started, or never was
        calls.ask(actor_of(name), "stop")
    for actor in (actor_of(name), record_name(name)):
        calls.end(actor)


def open_ray(address: str, given: Mapping[str, Any]) -> Plane:
    """The plane at an address, started if there is none and settings are given."""
    return open_given(address, nested(ClusterSettings, given, address))  # names that nobody knows are refused as such


def open_given(address: str, given: Given, *, node: str | None = None) -> Plane:
    """`open_ray` for settings as a file or a command line has them. The plane begins on `node`, by its id; None: on the
    node of this process, or on the head node if it is pinned and no folder is given."""
    name, tables = name_of(address), given.tables
    for unusable, reason in _NOT_HERE.items():
        if tables.get(unusable):
            raise ConfigError(f"{address}: {unusable}: {tables[unusable]!r}; {reason}; leave it out")
    calls.attach()
    if set(tables) - {"timeouts", "run", *_NOT_HERE}:
        _create_or_check(name, address, given, node)
    elif _find(name) is None:
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
    """Where the plane listens, as its actor says; PlaneLost while it does not, with the reason."""
    try:
        return address_in(f"{SCHEME}{name}", calls.ask(actor_of(name), "place"))
    except PlaneLost as error:
        raise _lost_host(name) or error from None


def _lost_host(name: str) -> PlaneLost | None:
    """The error to raise if the plane is pinned to a host that is gone; else None."""
    try:
        record = record_of(name)
    except PlaneLost:
        return None
    if record is None or not record.pinned or any(node.ip == record.ip for node in calls.nodes()):
        return None
    log = f"its log is in {record.log}" if record.log else f"its log is in {record.folder} there"
    storage = f" and its frames in {record.storage or record.folder} there" if record.log or record.storage else ""
    return PinnedHostLost(
        f"the plane {SCHEME}{name} is pinned to node {record.node[:12]} (host {record.host}, {record.ip}), which is "
        f"gone: {log}{storage}; bring the node back, and the plane goes on there; or give log=postgresql://... and "
        "storage=FOLDER that every node sees, to let it move"
    )


class PinnedHostLost(PlaneLost):
    """The plane's host is gone, and its run with it: waiting is of no use."""


def _find(name: str) -> object | None:
    """The actor of a plane; None if there is none. Raises PlaneLost if there was one and its host is gone."""
    found = calls.find(actor_of(name), anew=True)
    if found is None and (lost := _lost_host(name)) is not None:
        raise lost
    return found


def _create_or_check(name: str, address: str, given: Given, node: str | None) -> None:
    if _find(name) is None:
        settings = absolute(address, build(ClusterSettings, given))
        _start(name, address, settings, node)
    tables = tomllib.loads(_settings(name))
    theirs = build(ClusterSettings, tables, address)
    merged = replace(given, tables=_merged(tables, given.tables))
    _check_same(address, given, absolute(address, build(ClusterSettings, merged)), theirs)


def _start(name: str, address: str, settings: ClusterSettings, node: str | None) -> None:
    text = template(settings, title=f"The plane {address}.", all_values=True)
    pinned = not is_movable(settings)
    if node is None:
        node = calls.head_node() if pinned and not settings.folder else calls.my_node()
    host = next((found.ip for found in calls.nodes() if found.id == node), None) if pinned else None
    calls.start(PlaneActor, actor_of(name), name, text, new_keys(), pinned, node=node, pinned_to=host)


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


def _settings(name: str) -> str:
    """Of the plane that runs, also one that is being started."""
    wait = Wait(f"{SCHEME}{name}", _START_S)
    while True:
        try:
            return str(calls.ask(actor_of(name), "settings"))
        except PlaneLost as error:
            wait.on(_lost_host(name) or error)


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
    wait = Wait(f"{SCHEME}{name}", _START_S)
    while True:
        try:
            where(name)
        except PlaneLost as error:
            wait.on(error)
        except PenstockError:
            if record_of(name) is None:
                calls.end(actor_of(name))  # it never served anybody
            raise
        else:
            return


class Wait:
    """A wait with a deadline, and a reason that is logged while it lasts."""

    def __init__(self, what: str, patience_s: float) -> None:
        self._what, self._patience_s = what, patience_s
        self._began = time.monotonic()
        self._said_at = self._began

    def on(self, reason: PlaneLost) -> None:
        """Sleep a little, because of `reason`; raises it when the deadline has passed, or waiting is of no use."""
        now = time.monotonic()
        waited = now - self._began
        if isinstance(reason, PinnedHostLost) or waited > self._patience_s:
            raise reason
        if now - self._said_at > _SAY_S:
            self._said_at = now
            logger.warning("%s: waiting (%.0f of %.0f s): %s", self._what, waited, self._patience_s, reason)
        time.sleep(_LOOK_S)

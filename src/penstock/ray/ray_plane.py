"""Opens `ray://NAME`: starts the plane of that name in the cluster, or finds it, and connects a client that follows it.

A plane may move to another host if its log and its storage are seen from there. Otherwise it is pinned to the host that
has its folder.
"""

from __future__ import annotations

import logging
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeVar

from penstock.client import Handle, Plane
from penstock.config import Given, build, keywords_of, nested, settings_of, template
from penstock.errors import ConfigError, PenstockError, PlaneLost
from penstock.plane import ClusterSettings
from penstock.protocol import Timeouts
from penstock.ray import calls
from penstock.ray.calls import actor_of, address_in, record_name
from penstock.ray.plane_actor import PlaneActor, new_keys, record_of
from penstock.storage import address_of, is_object_url, is_shared
from penstock.transport import Address, ResolvingClient

logger = logging.getLogger("penstock.ray")
SCHEME = "ray://"
T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_START_S = 120.0
"""How long to wait for a plane to listen. Starting a Ray worker takes seconds."""
_LOOK_S = 0.1
_SAY_S = 5.0
"""How often a wait logs its reason."""
_CALLERS = ("timeouts",)
"""Settings in which a client may differ from the plane."""
_NOT_HERE = {
    "keys": "the plane makes its own and hands them out",
    "listen": "the plane listens at its node's address",
}
_ANY = {"packing": {"ranks": 1, "seq_len": 1}, "target": {"groups": 1}}
"""Stands in for the required settings when only the others are read."""
_SESSION = re.compile(r"/session_\d[^/]*/")
"""Part of Ray's temporary folder, which is removed with the cluster; a job's working folder is removed with the job."""


class RayPlane(Plane):
    """A connection to a plane of a Ray cluster."""

    def __init__(self, name: str, *, run: str, timeouts: Timeouts) -> None:
        self._name = name
        address = f"{SCHEME}{name}"
        handle = Handle.of(address, run, None, timeouts)
        super().__init__(partial(client, name), url=address, run=run, timeouts=timeouts, handle=handle)

    def kill(self) -> None:
        """End the plane for all clients. The run stays in its folder."""
        self.close()
        end_ray(f"{SCHEME}{self._name}")


def end_ray(address: str) -> None:
    """End a plane for all clients, even one that cannot be reached. The run stays in its folder."""
    name = name_of(address)
    calls.attach()
    with suppress(PlaneLost):  # it may be starting, or never have existed
        calls.ask(actor_of(name), "stop")
    for actor in (actor_of(name), record_name(name)):
        calls.end(actor)


def open_ray(address: str, given: Mapping[str, Any]) -> Plane:
    """Open the plane at an address. Starts it if there is none and settings are given."""
    return open_given(address, nested(ClusterSettings, given, address))


def open_given(address: str, given: Given, *, node: str | None = None) -> Plane:
    """`open_ray` with settings from a file or a command line. The plane starts on the node with id `node`; None means
    the node of this process, or the head node if the plane is pinned and has no folder."""
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
    """Return a client transport, for a rank's source."""
    name = name_of(address)
    calls.attach()
    return client(name)


def name_of(address: str) -> str:
    name = address.removeprefix(SCHEME)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"address {address!r}: must be ray://NAME, of letters, digits, _ . and -")
    return name


def client(name: str) -> ResolvingClient:
    """Return a client connected to the plane's current address, or one that connects as soon as it is known."""
    try:
        first: Address | None = where(name)
    except PlaneLost:
        first = None
    return ResolvingClient(partial(where, name), first=first)


def where(name: str) -> Address:
    """Ask the plane's actor where it listens. Raises PlaneLost with the reason while it does not listen."""
    try:
        return address_in(f"{SCHEME}{name}", calls.ask(actor_of(name), "place"))
    except PlaneLost as error:
        raise _lost_host(name) or error from None


def _lost_host(name: str) -> PlaneLost | None:
    """Return the error to raise if the plane is pinned to a host that is gone, else None."""
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
    """The plane's host is gone, and its run with it. Waiting does not help."""


def _find(name: str) -> object | None:
    """Return a plane's actor, or None if there is none. Raises PlaneLost if there was one and its host is gone."""
    found = calls.find(actor_of(name), refresh=True)
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
    # Without a folder the plane uses one in its host's home. The head node is the one that stays.
    if node is None:
        node = calls.head_node() if pinned and not settings.folder else calls.my_node()
    host = next((found.ip for found in calls.nodes() if found.id == node), None) if pinned else None
    calls.start(PlaneActor, actor_of(name), name, text, new_keys(), pinned, node=node, pinned_to=host)


def _merged(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the running plane's settings, changed by those given. A step's target is replaced as one value."""
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
    """Return the settings of the plane that runs or is starting."""

    def ask() -> str:
        try:
            return str(calls.ask(actor_of(name), "settings"))
        except PlaneLost as error:
            raise _lost_host(name) or error from None

    return _waited(name, ask)


def _check_same(address: str, given: Given, mine: ClusterSettings, theirs: ClusterSettings) -> None:
    """Raise ConfigError for a given setting that differs from the running plane's."""
    for keyword in keywords_of(ClusterSettings):
        if keyword.path in _CALLERS or not _is_given(given.tables, keyword.path):
            continue
        here, there = (reduce(getattr, keyword.path.split("."), settings) for settings in (mine, theirs))
        if here != there:
            raise ConfigError(
                f"{address}: {given.name(keyword.path)}: {here!r} here, {there!r} in the plane that runs there; leave "
                "it out, end that plane, or use another name"
            )


def _is_given(tables: Mapping[str, Any], path: str) -> bool:
    table, _, name = path.rpartition(".")
    return name in (tables.get(table, {}) if table else tables)


def _wait_until_it_listens(name: str) -> None:
    try:
        _waited(name, partial(where, name))
    except PlaneLost:
        raise
    except PenstockError:
        if record_of(name) is None:
            calls.end(actor_of(name))  # it never served a client: the next attempt may have other settings
        raise


def _waited(name: str, ask: Callable[[], T]) -> T:
    """Ask until there is an answer. Logs what it waits for every few seconds, and raises it after `_START_S`."""
    began = logged_at = time.monotonic()
    while True:
        try:
            return ask()
        except PinnedHostLost:
            raise  # waiting does not help
        except PlaneLost as reason:
            now = time.monotonic()
            if now - began > _START_S:
                raise
            if now - logged_at > _SAY_S:
                logged_at = now
                logger.warning("%s%s: waiting (%.0f of %.0f s): %s", SCHEME, name, now - began, _START_S, reason)
        time.sleep(_LOOK_S)


# ------------------------------------------------------------------ where a plane may run


def absolute(address: str, settings: ClusterSettings) -> ClusterSettings:
    """Return settings with absolute paths and addresses. Raises ConfigError for a path that Ray will remove."""
    paths: dict[str, Any] = {}
    for setting in settings_of(ClusterSettings):
        given = getattr(settings, setting.name)
        if setting.extra.get("path") and given:
            paths[setting.name] = path = address_of(given)
            if _SESSION.search(path):
                raise ConfigError(
                    f"{address}: {setting.name}: {path} is in a folder that Ray removes when the job or the cluster "
                    "ends; give an absolute path outside Ray's temporary folder"
                )
    return replace(settings, **paths)


def is_movable(settings: ClusterSettings) -> bool:
    """Return whether the plane may be started on another host: its log and its storage are seen from there.

    >>> from penstock.packing import Packing
    >>> from penstock.plane.settings import Target
    >>> plane = ClusterSettings(packing=Packing(ranks=1, seq_len=16), target=Target(groups=1), storage="/tmp/frames")
    >>> is_movable(plane), is_movable(replace(plane, log="postgresql://db/runs", movable=True))
    (False, True)
    """
    if settings.movable is not None:
        return settings.movable
    is_folder_shared = bool(settings.folder) and is_shared(settings.folder)
    is_log_shared = settings.log is not None or is_folder_shared
    if settings.storage is None:
        return is_log_shared and is_folder_shared
    return is_log_shared and (is_object_url(settings.storage) or is_shared(settings.storage))

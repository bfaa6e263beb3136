"""Tasks over HTTP, for workers in other languages. A worker leases, renews, and puts a group with the task's id.

    POST /v1/leases          {"list": "prompts", "count": 1, "worker": "sampler-3", "lease_s": 60}: tasks, or why none
    POST /v1/leases/renew    {"leases": [number, ...]}: those whose result can no longer be used, with the reason
    POST /v1/leases/return   {"leases": [number, ...], "reason": ""}: for another worker

The list is opened by a Python process, with `plane.tasks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.protocol import GiveBack, LeaseTasks, Renew, Renewed, TasksLeased
from penstock.server.http_scoring import read_body

if TYPE_CHECKING:
    from penstock.client import Plane

MAX_BODY_BYTES = 1 << 20


class WantedTasks(msgspec.Struct, kw_only=True):
    """Asks for tasks of a list. Answered when there are some, or after a heartbeat."""

    list: str = "prompts"
    count: int = 1
    worker: str = "http"
    """A name of the worker, for messages."""
    lease_s: float = 60.0
    """Seconds without a renewal after which the tasks return."""


class NamedLeases(msgspec.Struct, kw_only=True):
    """Leases to renew or to return."""

    leases: list[int]
    reason: str = ""
    """Why the work on them failed. Empty: it did not, another worker should go on."""


class HttpTask(msgspec.Struct, kw_only=True):
    lease: int
    id: str
    """The id that its group must have."""
    prompt: str
    payload: Any
    """The prompt's object as it was listed, or null."""
    epoch: int
    attempt: int


class HttpTasks(msgspec.Struct, kw_only=True):
    """Leased tasks, or why there are none."""

    tasks: list[HttpTask]
    waiting_for: str
    ended: bool
    """Every task of the list is completed."""
    policy_version: int | None


class CancelledLeases(msgspec.Struct, kw_only=True):
    """Leases whose result can no longer be used, with the reason. The others are renewed."""

    cancelled: dict[str, str]


# Made at import: msgspec crashes when two threads are the first to decode a type.
_WANTED, _NAMED = msgspec.json.Decoder(WantedTasks), msgspec.json.Decoder(NamedLeases)


async def answer_tasks(plane: Plane, what: str, body: bytes) -> dict[str, Any]:
    """Answer a request. `what` is lease, renew or return."""
    if what == "lease":
        return await _lease(plane, read_body(_WANTED, body))
    named: NamedLeases = read_body(_NAMED, body)
    leases = tuple(named.leases)
    if what == "return":
        await plane.arequest(lambda ticket: GiveBack(ticket=ticket, leases=leases, reason=named.reason))
        return {}
    answer = await plane.arequest(lambda ticket: Renew(ticket=ticket, leases=leases))
    assert isinstance(answer, Renewed)
    return {"cancelled": {str(lease): reason for lease, reason in answer.cancelled}}


async def _lease(plane: Plane, wanted: WantedTasks) -> dict[str, Any]:
    answer = await plane.arequest(
        lambda ticket: LeaseTasks(
            ticket=ticket,
            list=wanted.list,
            count=wanted.count,
            worker=wanted.worker,
            lease_s=wanted.lease_s,
        )
    )
    assert isinstance(answer, TasksLeased)
    tasks = [
        {
            "lease": one.lease,
            "id": one.group,
            "prompt": one.prompt,
            "payload": msgspec.json.decode(one.payload) if one.payload else None,
            "epoch": one.epoch,
            "attempt": one.attempt,
        }
        for one in answer.tasks
    ]
    return {
        "tasks": tasks,
        "waiting_for": answer.waiting_for,
        "ended": answer.ended,
        "policy_version": answer.policy_version,
    }

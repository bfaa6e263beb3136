"""Leases over HTTP, for judges and workers in other languages: samples that lack a column, and tasks of a list.

A judge leases groups that lack a column and attaches values. A lease lasts `lease_s` seconds; if it is not renewed, its
groups go to another judge. Attaching needs no lease, so a slow judge loses nothing but its head start.

A worker leases tasks, renews, and puts a group with the task's id. The list is opened by a Python process, with
`plane.tasks`.

    POST /v1/lacking         {"column": "rewards", "groups": 8}: samples, and the lease of each group
    POST /v1/attach          {"column": "rewards", "values": {group: {sample: 1.0}}}: how many were new
    POST /v1/leases          {"list": "prompts", "count": 1, "worker": "sampler-3", "lease_s": 60}: tasks, or why none
    POST /v1/leases/renew    {"leases": [number, ...]}: those whose result can no longer be used, with the reason
    POST /v1/leases/return   {"leases": [number, ...], "reason": ""}: for another worker
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from penstock.arrays import Sample
from penstock.client import LeaseRequest, Plane
from penstock.errors import InvalidInput
from penstock.protocol import GiveBack, LeaseTasks, Renew, Renewed, TasksLeased

MAX_WAIT_S = 300.0
MAX_BODY_BYTES = 1 << 20


def read_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a JSON body. Raises InvalidInput."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"body: {error}; see /openapi.json") from None
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"body: not JSON: {error}") from None


# ------------------------------------------------------------------ late columns


class AskedLease(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Asks for groups that lack a column."""

    column: str
    groups: Annotated[int, Meta(description="at most 256")] = 8
    lease_s: Annotated[float, Meta(description="seconds without a renewal until the groups go to another judge")] = 60.0
    timeout: Annotated[float, Meta(ge=0, le=MAX_WAIT_S, description="seconds to wait for groups")] = 20.0


class LeasedSample(msgspec.Struct, kw_only=True):
    """A sample that lacks the column."""

    id: str
    group: str
    prompt: str
    env: str
    token_ids: list[int]
    loss_mask: Annotated[list[bool], Meta(description="which tokens the model sampled")]
    rollout: Annotated[str, Meta(description="what is known of the rollout, as JSON")]
    policy_version: int | None


class Leased(msgspec.Struct, kw_only=True):
    """Leased samples; none if no group lacked the column in time."""

    samples: list[LeasedSample]
    leases: Annotated[dict[str, int], Meta(description="the lease of each group, to renew or return it")]


LateNumbers: TypeAlias = float | list[Any] | dict[str, list[Any]]
"""A number, a list with one entry per token, or such lists by column where columns go together."""


class AskedAttach(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Values of a column, by group and sample."""

    column: str
    values: Annotated[
        dict[str, dict[str, LateNumbers]],
        Meta(description="a number per sample, or of a column with values per token a list with one entry per token"),
    ] = {}
    errors: Annotated[dict[str, dict[str, str]], Meta(description="samples that could not be scored, and why")] = {}


class AttachedCounts(msgspec.Struct, kw_only=True):
    """The result of an attach, in samples."""

    new: int
    known: Annotated[int, Meta(description="had the same value already")]
    late: Annotated[int, Meta(description="of groups that were dropped, or trained without the value")]


# Made at import: msgspec crashes when two threads are the first to decode a type.
_LEASE, _ATTACH = msgspec.json.Decoder(AskedLease), msgspec.json.Decoder(AskedAttach)


async def lease(plane: Plane, body: bytes) -> Leased:
    """Lease groups, and return their samples."""
    asked = read_body(_LEASE, body)
    request = LeaseRequest(asked.column, asked.groups, None, asked.lease_s, asked.timeout)
    leases, samples = await plane.alease_once(request)
    return Leased(samples=[_sample(one) for one in samples], leases=leases)


async def attach(plane: Plane, body: bytes) -> AttachedCounts:
    """Attach values."""
    asked = read_body(_ATTACH, body)
    found = await plane.aattach(asked.column, asked.values, errors=asked.errors)
    return AttachedCounts(new=found.new, known=found.known, late=found.late)


def _sample(sample: Sample) -> LeasedSample:
    return LeasedSample(
        id=sample.id,
        group=sample.group,
        prompt=sample.prompt,
        env=sample.env,
        token_ids=sample.token_ids.tolist(),
        loss_mask=sample.loss_mask.tolist(),
        rollout=sample.rollout,
        policy_version=sample.policy_version,
    )


# ------------------------------------------------------------------ tasks


class WantedTasks(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Asks for tasks of a list. Answered when there are some, or after a heartbeat."""

    list: str = "prompts"
    count: int = 1
    worker: str = "http"
    """A name of the worker, for messages."""
    lease_s: float = 60.0
    """Seconds without a renewal after which the tasks return."""


class NamedLeases(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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


_WANTED, _NAMED = msgspec.json.Decoder(WantedTasks), msgspec.json.Decoder(NamedLeases)


async def answer_tasks(plane: Plane, what: str, body: bytes) -> dict[str, Any]:
    """Answer a request. `what` is lease, renew or return."""
    if what == "lease":
        return await _lease_tasks(plane, read_body(_WANTED, body))
    named: NamedLeases = read_body(_NAMED, body)
    leases = tuple(named.leases)
    if what == "return":
        await plane.arequest(lambda ticket: GiveBack(ticket=ticket, leases=leases, reason=named.reason))
        return {}
    answer = await plane.arequest(lambda ticket: Renew(ticket=ticket, leases=leases))
    assert isinstance(answer, Renewed)
    return {"cancelled": {str(lease): reason for lease, reason in answer.cancelled}}


async def _lease_tasks(plane: Plane, wanted: WantedTasks) -> dict[str, Any]:
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

"""Late columns over HTTP, for judges in other languages: lease groups that lack a column, attach values.

A lease lasts `lease_s` seconds and is renewed with `POST /v1/leases/renew`, as that of a task. If it is not, its groups
go to another judge. Attaching needs no lease, so a slow judge loses nothing but its head start.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from penstock.arrays import Sample
from penstock.client import LeaseRequest, Plane
from penstock.errors import InvalidInput

MAX_WAIT_S = 300.0


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
    """What became of the values, in samples."""

    new: int
    known: Annotated[int, Meta(description="had the same value already")]
    late: Annotated[int, Meta(description="of groups that were dropped, or trained without the value")]


# Made at import: msgspec crashes when two threads are the first to decode a type.
_LEASE, _ATTACH = msgspec.json.Decoder(AskedLease), msgspec.json.Decoder(AskedAttach)


def read_body(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a JSON body. Raises InvalidInput."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"body: {error}; see /openapi.json") from None
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"body: not JSON: {error}") from None


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

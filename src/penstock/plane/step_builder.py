"""Plan a step from metadata, and build what each rank is sent from the plan.

Nothing here keeps state, so it runs on a worker thread. The same metadata and settings give the same plan and digests
in any process at any time, and the same frames give the same samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import step_digest
from penstock.errors import PenstockError
from penstock.frames import GroupMetadata, join_metadata, late_digests, mask_stale
from penstock.packing import Packing, plan
from penstock.plane.manifest import GroupSummaries
from penstock.plane.priorities import names_clash
from penstock.protocol import Buffer, Frames, PickedGroup, Staged, StepPicks
from penstock.storage import Pick, Storage, gather_picks

PART_S = 0.02
"""Seconds of gathering after which the ranks whose samples are ready get them."""
_NO_SUMMARIES = GroupSummaries()
PIECE_BYTES = 1 << 30
"""Payloads are sent in pieces of at most this size: a message part of more than 2 GiB cannot be sent."""


@dataclass(frozen=True, slots=True)
class Place:
    """A group of a step, and where its frame is stored."""

    group: str
    location: str
    num_samples: int
    metadata: bytes = b""
    """Its metadata, as the log stores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan of a step, in lengths and indices."""

    rank_plans: tuple[bytes, ...]
    """The plan of each rank, as it is sent. It numbers only the samples that the rank receives."""
    needs: tuple[bytes, ...]
    """Per rank, the ascending numbers of its samples within the step, as int32."""
    digests: tuple[str, ...]
    """Per rank, the digest of its plan and samples."""
    loss_tokens: int = 0
    masked: tuple[int, int] = (0, 0)
    """Trained tokens that are too old and left out of the loss, and the samples that have some."""
    summaries: GroupSummaries = _NO_SUMMARIES
    names_clash: bool = False
    """Whether a sample's id also names another group of the step, or one of its samples."""


Ready: TypeAlias = Callable[[Staged], None]
"""Called with a step whose bytes are gathered for some ranks, so that these need not wait for the others."""


class Builder(Protocol):
    """Plans and builds steps. Planes use `StepBuilder`, simulations a smaller one."""

    def plan(self, metadata: Sequence[GroupMetadata], oldest_version: int = 0) -> PlannedStep:
        """Plan a step of these groups. Tokens that an earlier version sampled are left out of the loss."""

    def unpackable(self, metadata: Sequence[GroupMetadata]) -> dict[int, str]:
        """Return the groups that cannot be planned even alone, by position, with the reason."""

    def build(
        self, step: int, planned: PlannedStep, groups: Sequence[Place], inline: Collection[int], ready: Ready
    ) -> Staged:
        """Build a planned step: locations of all samples, and the bytes for ranks that cannot read storage
        (`inline`). While that takes long, call `ready` with what there is."""


@dataclass(slots=True)
class StepBuilder:
    """Plans with the packer, builds from storage."""

    packing: Packing
    storage: Storage

    def plan(self, metadata: Sequence[GroupMetadata], oldest_version: int = 0) -> PlannedStep:
        made = plan(mask_stale(join_metadata(metadata), metadata, oldest_version), self.packing)
        digests = [digest for group in metadata for digest in late_digests(group.digests, group.late.arrays())]
        needs = [rank_plan.needs for rank_plan in made.rank_plans]
        packed = [rank_plan.relative().to_bytes() for rank_plan in made.rank_plans]
        return PlannedStep(
            rank_plans=tuple(packed),
            needs=tuple(need.astype("<i4").tobytes() for need in needs),
            digests=tuple(
                step_digest(data, [digests[i] for i in need.tolist()]) for data, need in zip(packed, needs, strict=True)
            ),
            loss_tokens=made.totals.step.loss_tokens,
            masked=(made.accounting.stale_loss_tokens, made.accounting.stale_samples),
            summaries=GroupSummaries.of(metadata),
            names_clash=names_clash(metadata),
        )

    def unpackable(self, metadata: Sequence[GroupMetadata]) -> dict[int, str]:
        found: dict[int, str] = {}
        for i, group in enumerate(metadata):
            try:
                plan(join_metadata([group]), self.packing)
            except PenstockError as error:
                found[i] = str(error)
            except Exception as error:  # noqa: BLE001 - whatever a group provokes, it is that group that is bad
                found[i] = f"{type(error).__name__}: {error}"
        return found

    def build(
        self, step: int, planned: PlannedStep, groups: Sequence[Place], inline: Collection[int], ready: Ready
    ) -> Staged:
        requests = picks_of([np.frombuffer(need, "<i4") for need in planned.needs], groups)
        known = {place.location: GroupMetadata.from_bytes(place.metadata) for place in groups}
        staged = Staged(
            step=step,
            plans=list(planned.rank_plans),
            payloads=[None] * len(requests),
            digests=list(planned.digests),
            picks=[_step_picks(request, known).to_bytes() for request in requests],
        )
        payloads: list[Frames | None] = [None] * len(requests)
        # Gathering takes about a third of a millisecond for each rank. The first rank must not wait for the last.
        due = time.monotonic() + (PART_S if len(inline) == len(requests) else 0.0)
        for rank, payload in zip(inline, gather_picks(self.storage, [requests[r] for r in inline]), strict=True):
            payloads[rank] = pieces_of(payload)
            if time.monotonic() >= due:
                ready(replace(staged, payloads=list(payloads)))
                due = time.monotonic() + PART_S
        return replace(staged, payloads=payloads)


def _step_picks(request: Sequence[Pick], known: Mapping[str, GroupMetadata]) -> StepPicks:
    """Return what one rank reads, with the digests it must find."""
    groups = []
    for pick in request:
        metadata = known[pick.location]
        digests = tuple(metadata.digests[row] for row in pick.rows)
        late = {name: values.tobytes() for name, values in metadata.late.arrays(pick.rows).items()}
        groups.append(
            PickedGroup(
                group=pick.group,
                location=pick.location,
                rows=pick.rows,
                front=metadata.front,
                digests=digests,
                late=late,
            )
        )
    return StepPicks(groups=tuple(groups))


def picks_of(needs: Sequence[NDArray[np.int32]], groups: Sequence[Place]) -> list[list[Pick]]:
    """Return for each rank the groups that it reads, with the rows of its samples.

    Groups of 3 and 2 samples have the edges 0, 3, 5. A rank that needs samples 1, 2, 4 of the step gets rows 1, 2 of
    the first group (group_of is 0, 0, 1) and row 4 - 3 = 1 of the second."""
    edges = np.concatenate([[0], np.cumsum([place.num_samples for place in groups])])
    requests = []
    for need in needs:
        group_of = np.searchsorted(edges, need, side="right") - 1
        starts = np.flatnonzero(np.diff(group_of, prepend=-1)).tolist()
        request = []
        for a, b in pairwise([*starts, len(need)]):  # a rank with only dummy micro-batches needs no sample
            k = int(group_of[a])
            rows = tuple((need[a:b] - edges[k]).tolist())
            request.append(Pick(groups[k].location, groups[k].group, rows))
        requests.append(request)
    return requests


def pieces_of(payload: Buffer) -> Frames:
    """Split a payload into message parts. An empty payload is one empty part."""
    return [payload[at : at + PIECE_BYTES] for at in range(0, max(len(payload), 1), PIECE_BYTES)]

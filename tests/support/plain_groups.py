"""Groups that are only a name, and steps of them: cheap enough to simulate thousands of runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import xxhash

from penstock.arrays.digests import step_digest
from penstock.errors import CorruptFrame
from penstock.frames import EvalMetadata, GroupMetadata
from penstock.plane.engine import Engine
from penstock.plane.intake import Incoming, Intake
from penstock.plane.pipeline import Pipeline
from penstock.plane.step_builder import Place, PlannedStep, Ready
from penstock.plane.workers import Workers
from penstock.protocol.messages import Buffer, Frames
from penstock.protocol.picks import PickedGroup, StepPicks
from penstock.protocol.steps import Staged
from penstock.storage import DamagedFrame, Storage

RUNS = ("a", "b")
"""Each group belongs to one of them, by its name."""


class PlainIntake(Intake):
    """Takes groups that are nothing but a name, so that thousands of runs can be simulated."""

    def names_of(self, frame: Buffer) -> tuple[str, str]:
        name, _, _ = msgspec.msgpack.decode(frame, type=tuple[str, int, int])
        return run_of_group(name), ""

    def check(self, group: str, frame: Buffer) -> GroupMetadata:
        return plain_metadata(group, frame)

    def _metadata_of(self, group: Incoming) -> GroupMetadata:
        metadata = GroupMetadata.from_bytes(group.raw_metadata)
        if metadata.group != group.id:
            raise CorruptFrame(f"group {group.id!r}: the metadata is of group {metadata.group!r}")
        return metadata

    def _check_metadata(self, metadata: GroupMetadata) -> None:
        """There is nothing in a name that a plane could have something against."""

    def check_evaluation(self, group: str, frame: Buffer) -> tuple[GroupMetadata, EvalMetadata]:
        return self.check(group, frame), EvalMetadata()


def plain_metadata(group: str, frame: Buffer) -> GroupMetadata:
    """Metadata of a group that is only a name."""
    name, samples, version = msgspec.msgpack.decode(frame, type=tuple[str, int, int])
    if name != group:
        raise CorruptFrame(f"group {group!r}: holds {name!r}")
    zeros = bytes(8 * samples)
    return GroupMetadata(
        group=group,
        prompt="",
        run=run_of_group(group),
        seq_len=64,
        num_tokens=10 * samples,
        policy_version=version,
        kinds={},
        columns=(),
        ids=tuple(f"{group}/{i}" for i in range(samples)),
        modes=("rl",),
        lengths=zeros,
        kept=zeros,
        loss_tokens=zeros,
        kept_loss_tokens=zeros,
        patches=zeros,
        stub=zeros,
        stub_patches=zeros,
        term_tokens=b"",
        modality=b"",
        has=b"",
        parents=(),
        shared=(),
        versions=(),
        digests=(xxhash.xxh3_128_digest(frame),),
    )


def run_of_group(group: str) -> str:
    """Each group belongs to a run, by its name."""
    return RUNS[sum(group.encode()) % len(RUNS)]


class PlainBuilder:
    """Deals groups to ranks without splitting them."""

    def __init__(self, ranks: int, storage: Storage) -> None:
        self._ranks, self._storage = ranks, storage

    def plan(self, metadata: Sequence[GroupMetadata], oldest_version: int = 0) -> PlannedStep:
        plans = [f"{rank}:{[f.group for f in metadata[rank :: self._ranks]]}".encode() for rank in range(self._ranks)]
        digests = [
            step_digest(plan, [f.digests[0] for f in metadata[rank :: self._ranks]]) for rank, plan in enumerate(plans)
        ]
        return PlannedStep(rank_plans=tuple(plans), needs=(b"",) * self._ranks, digests=tuple(digests), loss_tokens=1)

    def unpackable(self, metadata: Sequence[GroupMetadata]) -> dict[int, str]:
        return {}

    def build(
        self, step: int, planned: PlannedStep, groups: Sequence[Place], inline: Collection[int], _ready: Ready
    ) -> Staged:
        parts = [groups[rank :: self._ranks] for rank in range(self._ranks)]
        return Staged(
            step=step,
            plans=list(planned.rank_plans),
            payloads=[list(map(self._frame, part)) if rank in inline else None for rank, part in enumerate(parts)],
            digests=list(planned.digests),
            picks=[_picks_of(part).to_bytes() for part in parts],
        )

    def _frame(self, place: Place) -> Buffer:
        try:
            found = self._storage.read(place.location)[0]
        except CorruptFrame as error:
            raise DamagedFrame(place.group, str(error)) from None
        if wrong := _wrong_with(found, place.metadata):
            raise DamagedFrame(place.group, wrong)
        return found


def _picks_of(groups: Sequence[Place]) -> StepPicks:
    return StepPicks(
        groups=tuple(
            PickedGroup(
                group=place.group,
                location=place.location,
                rows=(0,),
                front=b"",
                digests=GroupMetadata.from_bytes(place.metadata).digests,
            )
            for place in groups
        )
    )


def _wrong_with(frame: Buffer, metadata: bytes) -> str:
    """What is wrong with a stored frame; empty if nothing is."""
    is_same = xxhash.xxh3_128_digest(frame) == GroupMetadata.from_bytes(metadata).digests[0]
    return "" if is_same else "not the frame that was put"


def plain_look(storage: Storage, location: str, metadata: bytes) -> CorruptFrame | None:
    """How the plane looks at a frame that a rank could not read."""
    try:
        wrong = _wrong_with(storage.read(location)[0], metadata)
    except CorruptFrame as error:
        return error
    return CorruptFrame(wrong) if wrong else None


def plain_pipeline(engine: Engine, workers: Workers) -> Pipeline:
    """How groups that are only names go in, and steps of them come out."""
    builder = PlainBuilder(engine.settings.packing.ranks, engine.storage)
    return Pipeline(engine, PlainIntake(engine.settings, engine.writer), builder, workers)


def plain_digests(frames: Frames) -> list[bytes]:
    """The digests of what a rank was sent."""
    return [xxhash.xxh3_128_digest(frame) for frame in frames]

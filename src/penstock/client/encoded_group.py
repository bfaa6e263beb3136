"""An encoded group, ready to put: its frame in pieces, and its metadata if the frame is written to storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import xxhash

from penstock.arrays import Own, Sample, check_priority
from penstock.convert import Group
from penstock.errors import InvalidInput, PenstockError
from penstock.frames import (
    UNCUT,
    Buffer,
    EvalMetadata,
    FramePieces,
    Limits,
    check_group,
    encode_group,
    join,
    metadata_for_evaluation,
    metadata_of_pieces,
    read_head,
)
from penstock.protocol import PutRequest

_LARGE_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
"""Frames below this size are joined at once: copying one takes less than hashing and writing it in pieces."""
_ANY_SIZE = Limits(max_samples=1 << 16, max_tokens=1 << 40, max_bytes=1 << 50)
"""No limits here: the plane enforces its own and reports what exceeds them."""


def check_evaluation(value: object) -> None:
    """Raise InvalidInput unless the keyword `evaluation` is a bool."""
    if not isinstance(value, bool):
        raise InvalidInput(f"evaluation: {repr(value)[:40]}; must be True or False")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    """A group's id, its frame and the options of its put."""

    name: str
    pieces: Sequence[Buffer]
    """The buffers that make its frame. Large ones are views of the samples' arrays."""
    size: int
    run: Callable[[], str]
    """Returns the tenant of its samples. Called only if needed: for a frame it parses the head."""
    evaluation: bool
    env: Callable[[], str] = str
    """Returns the environment of its samples."""
    made: FramePieces | None = None
    """The result of encoding, or None for a frame that was passed in encoded."""
    priority: float = 1.0
    group: Group | None = None
    """The group it was encoded from, if known."""
    advantage: str = ""
    """The advantage to compute when late rewards arrive."""
    filters: tuple[str, ...] = ()
    """Filters to apply then."""

    @staticmethod
    def of(
        group: Group | Sequence[Sample], *, evaluation: bool, columns: Callable[[], Own], priority: float = 1.0
    ) -> EncodedGroup:
        """Encode a group. `columns` returns the plane's own columns. Called only if a sample has such columns."""
        samples = samples_of(group)
        if not samples:
            raise InvalidInput("put: no samples; a group has at least one")
        if any(sample.own for sample in samples):
            samples = [sample.conformed(columns()) for sample in samples]
        run, env, known = samples[0].run, samples[0].env, group if isinstance(group, Group) else None
        name, made = samples[0].group if known is None else known.id, encode_group(samples)
        size = made.size
        return EncodedGroup(
            name=name,
            pieces=made.pieces if size >= _SMALL_BYTES else [b"".join(made.pieces)],
            size=size,
            run=lambda: run,
            env=lambda: env,
            evaluation=evaluation,
            priority=priority,
            made=made,
            group=known,
            advantage="" if known is None else known.late_advantage,
            filters=() if known is None else known.late_filters,
        )

    @staticmethod
    def of_frame(name: str, frame: Buffer, *, evaluation: bool, priority: float = 1.0) -> EncodedGroup:
        _check_frame(name, frame)
        return EncodedGroup(
            name=name,
            pieces=[frame],
            size=len(frame),
            run=partial(_name_in, frame, "run"),
            env=partial(_name_in, frame, "env"),
            evaluation=evaluation,
            priority=priority,
        )

    def frame(self) -> Buffer:
        """Return the complete frame."""
        if len(self.pieces) == 1:
            return self.pieces[0]
        # `join` uses huge pages for large frames, where `bytes.join` spends more time on new pages than on copying.
        return b"".join(self.pieces) if self.size < _LARGE_BYTES else join(self.pieces)

    def metadata(self, seq_len: int, *, drop: bool) -> tuple[bytes, bytes]:
        """Return the metadata, and for an evaluation group what is shown of it. Validates a frame that was passed in
        encoded. With `drop`, samples longer than `seq_len` are dropped, not truncated."""
        if self.made is None and self.evaluation:
            metadata, shown = metadata_for_evaluation(self.name, self.pieces[0], _ANY_SIZE)
            return metadata.to_bytes(), shown.to_bytes()
        if self.made is None:
            metadata = check_group(self.pieces[0], group=self.name, seq_len=seq_len, limits=_ANY_SIZE, drop=drop)
            return metadata.to_bytes(), b""
        length = UNCUT if self.evaluation else seq_len
        metadata = metadata_of_pieces(self.made, group=self.name, seq_len=length, drop=drop and not self.evaluation)
        return metadata.to_bytes(), EvalMetadata.of(self.made.samples).to_bytes() if self.evaluation else b""

    def request(self, *, waits: bool, direct: bool = False) -> PutRequest:
        """Return the request that puts the group. With `direct`, the frame is written to storage once there is room."""
        check_priority(self.name, self.priority)
        check_evaluation(self.evaluation)
        frame = None if direct else self.frame()
        return PutRequest(
            group=self.name,
            digest=self._digest() if frame is None else xxhash.xxh3_128_digest(frame),
            frame=frame,
            size=self.size,
            run=self.run,
            env=self.env,
            waits=waits,
            evaluation=self.evaluation,
            priority=float(self.priority),
            advantage=self.advantage,
            filters=self.filters,
        )

    def _digest(self) -> bytes:
        state = xxhash.xxh3_128()
        for piece in self.pieces:
            state.update(piece)
        return state.digest()


def samples_of(group: object) -> Sequence[Sample]:
    """Return the samples of a group or list. Raises InvalidInput for anything else."""
    if isinstance(group, Group):
        return group.samples
    if not isinstance(group, Sequence) or isinstance(group, (str, bytes)):
        raise InvalidInput(f"put: a {type(group).__name__}; put a group's samples as a list: plane.put([sample, ...])")
    for i, sample in enumerate(group):
        if not isinstance(sample, Sample):
            raise InvalidInput(
                f"put: samples[{i}] is a {type(sample).__name__}; put samples, or trajectories with plane.group(...)"
            )
    return group


def waits_with(group: object, *, by_env: bool) -> str:
    """Return what decides where a group waits: its environment or its tenant. Returns "" for one that cannot be put:
    encoding it reports why."""
    if isinstance(group, EncodedGroup):
        return group.env() if by_env else group.run()
    try:
        return next((sample.env if by_env else sample.run for sample in samples_of(group)), "")
    except PenstockError:
        return ""


def _name_in(frame: Buffer, what: str) -> str:
    """Return the tenant or environment of a frame's samples."""
    try:
        return read_head(frame).text.get(what, ("",))[0]
    except PenstockError:
        return ""  # the plane will report what is wrong with the frame


def _check_frame(name: object, frame: object) -> None:
    if not isinstance(name, str) or not isinstance(frame, bytes | bytearray | memoryview):
        given = f"{type(name).__name__}, {type(frame).__name__}"
        raise InvalidInput(f"put_frame({given}); give a group's id as text, and its frame as bytes: ps.encode(...)")

"""A group ready to be sent: its frame, and what the question to the plane says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import xxhash

from penstock.arrays import Sample
from penstock.arrays.own_columns import Own
from penstock.convert import Group
from penstock.encode import read_head
from penstock.encode.layout import Buffer
from penstock.encode.writing import encode_to_send
from penstock.errors import InvalidInput, PenstockError
from penstock.send.producer import ProducerSession
from penstock.serve.clients.producer_line import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    name: str
    frame: Buffer
    run: Callable[[], str]
    """Of its samples; looked up when it matters."""
    evaluation: bool
    group: Group | None = None
    """What it was made of, where that is known."""

    @staticmethod
    def of(group: Group | Sequence[Sample], *, evaluation: bool, columns: Callable[[], Own]) -> EncodedGroup:
        """`columns` says which ones the plane was told of; it is asked only for samples that have such."""
        samples = samples_of(group)
        if not samples:
            raise InvalidInput("put: no samples; a group has at least one")
        if any(sample.own for sample in samples):
            samples = [sample.conformed(columns()) for sample in samples]
        run, known = samples[0].run, group if isinstance(group, Group) else None
        name, frame = samples[0].group if known is None else known.id, encode_to_send(samples)
        return EncodedGroup(name=name, frame=frame, run=lambda: run, evaluation=evaluation, group=known)

    @staticmethod
    def of_frame(name: str, frame: Buffer, *, evaluation: bool) -> EncodedGroup:
        return EncodedGroup(name=name, frame=frame, run=partial(_run_of, frame), evaluation=evaluation)

    def question(self, session: ProducerSession, timeout: float | None) -> Question:
        """Asks the plane to take it."""
        digest, waits = xxhash.xxh3_128_digest(self.frame), timeout is None or timeout > 0
        return lambda now: session.put(
            self.name, self.frame, digest, now, run=self.run, waits=waits, evaluation=self.evaluation
        )


def samples_of(group: object) -> Sequence[Sample]:
    """Return the samples of what is put; raise InvalidInput for anything else."""
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


def _run_of(frame: Buffer) -> str:
    """The run a group's samples belong to, as its frame says."""
    try:
        return read_head(frame).text.get("run", ("",))[0]
    except PenstockError:
        return ""  # the plane will say what is wrong with it

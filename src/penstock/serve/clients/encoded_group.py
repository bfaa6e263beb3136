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
from penstock.serve.decisions.priorities import check_priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGroup:
    name: str
    frame: Buffer
    run: Callable[[], str]
    """Of its samples; looked up when it matters."""
    evaluation: bool
    priority: float = 1.0
    group: Group | None = None
    """What it was made of, where that is known."""

    @staticmethod
    def of(
        group: Group | Sequence[Sample], *, evaluation: bool, columns: Callable[[], Own], priority: float = 1.0
    ) -> EncodedGroup:
        """`columns` says which ones the plane was told of; it is asked only for samples that have such."""
        samples: Sequence[Sample] = group.samples if isinstance(group, Group) else group
        if not samples:
            raise InvalidInput("put: no samples; a group has at least one")
        if any(sample.own for sample in samples):
            samples = [sample.conformed(columns()) for sample in samples]
        run, known = samples[0].run, group if isinstance(group, Group) else None
        name, frame = samples[0].group if known is None else known.id, encode_to_send(samples)
        return EncodedGroup(
            name=name, frame=frame, run=lambda: run, evaluation=evaluation, priority=priority, group=known
        )

    @staticmethod
    def of_frame(name: str, frame: Buffer, *, evaluation: bool, priority: float = 1.0) -> EncodedGroup:
        run = partial(_run_of, frame)
        return EncodedGroup(name=name, frame=frame, run=run, evaluation=evaluation, priority=priority)

    def question(self, session: ProducerSession, timeout: float | None) -> Question:
        """Asks the plane to take it."""
        check_priority(self.name, self.priority)
        digest, waits = xxhash.xxh3_128_digest(self.frame), timeout is None or timeout > 0
        return lambda now: session.put(
            self.name,
            self.frame,
            digest,
            now,
            run=self.run,
            waits=waits,
            evaluation=self.evaluation,
            priority=self.priority,
        )


def _run_of(frame: Buffer) -> str:
    """The run a group's samples belong to, as its frame says."""
    try:
        return read_head(frame).text.get("run", ("",))[0]
    except PenstockError:
        return ""  # the plane will say what is wrong with it

"""What goes wrong on one rank, or in the plane, is the same error for all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.arrays.digests import sample_digests, step_digest
from penstock.client.source import Source
from penstock.client.source_settings import SourceSettings
from penstock.errors import Overloaded, PeerError, PlaneLost, StepAborted, StorageError
from penstock.frames import decode
from penstock.plane.intake import Intake
from penstock.plane.step_builder import PlannedStep, StepBuilder
from penstock.protocol.message_header import pack_message, read_from_plane
from penstock.protocol.messages import Deliver
from penstock.transport.interface import ClientTransport, Envelope
from tests.plane.test_plane import close, put, sources, steps_of, together
from tests.support.groups import named_group
from tests.support.pace import pace
from tests.support.planes import FAST, OpenPlane


def same_words(found: list[object]) -> str:
    assert all(isinstance(error, StepAborted) for error in found), found
    assert len({str(error) for error in found}) == 1
    return str(found[0])


def test_a_rank_that_fails_stops_all_with_the_same_words(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=3)
    put(plane, "a", "b")
    ranks = sources(plane, 3)
    steps_of(together(*(source.step for source in ranks)))
    ranks[1].fail("out of memory")
    began = time.monotonic()
    words = same_words(together(*(source.step for source in ranks)))
    assert words == "step 1: rank 1: out of memory"
    assert time.monotonic() - began < FAST.peer_s
    close(ranks)


class NonsenseClient:
    """A line that hands over steps with a plan nobody can follow, under the right digest."""

    def __init__(self, inner: ClientTransport) -> None:
        self._inner = inner
        self.send, self.wake, self.close = inner.send, inner.wake, inner.close

    def receive(self, timeout_s: float) -> Envelope | None:
        got = self._inner.receive(timeout_s)
        message = read_from_plane(got[0]) if got else None
        if got and isinstance(message, Deliver):
            digest = step_digest(b"nonsense", sample_digests(decode(got[1][0])))
            return pack_message(msgspec.structs.replace(message, plan=b"nonsense", digest=digest)), got[1]
        return got


def test_a_step_one_rank_cannot_unpack_is_given_to_none(open_plane: OpenPlane) -> None:
    plane = open_plane()
    good = plane.source(0, world=2, resume_step=1)
    bad = Source(NonsenseClient(plane._connect()), SourceSettings(rank=1, world=2, timeouts=FAST))
    put(plane, "a", "b")
    assert "step 1: rank 1: CorruptFrame: rank plan" in same_words(together(good.step, bad.step))
    close([good, bad])


class Panic(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


class PanickingSource(Source):
    """A rank whose storage panics."""

    def _read(self, arrived: Any) -> Any:
        raise Panic("index out of bounds")


def test_a_panic_on_one_rank_stops_all(open_plane: OpenPlane) -> None:
    plane = open_plane()
    good = plane.source(0, world=2, resume_step=1)
    bad = PanickingSource(plane._connect(), SourceSettings(rank=1, world=2, timeouts=FAST))
    put(plane, "a", "b")
    found = together(partial(good.step, timeout=60), partial(bad.step, timeout=60))
    assert "step 1: rank 1: Panic: index out of bounds" in same_words(found)
    close([good, bad])


class PanickingBuilder(StepBuilder):
    def plan(self, metadata: Any, oldest_version: int = 0) -> PlannedStep:
        raise Panic("in the packer")


def test_a_panic_in_the_packer_is_told_to_every_rank_and_quarantines_nothing(open_plane: OpenPlane) -> None:
    plane = open_plane()
    assert plane._server is not None
    pipeline, settings = plane._server._pipeline, plane._server.settings
    honest = pipeline._builder
    pipeline._builder = PanickingBuilder(settings.packing, plane._server.engine.storage)
    put(plane, "a", "b")
    ranks = sources(plane)
    assert "Panic: in the packer" in same_words(together(*(partial(rank.step, timeout=60) for rank in ranks)))
    close(ranks)
    assert plane.ledger.quarantined == 0
    pipeline._builder = honest
    ranks = sources(plane)
    steps_of(together(*(rank.step for rank in ranks)))
    close(ranks)


class PanickingIntake(Intake):
    def take(self, groups: Any) -> None:
        raise Panic("while writing")


def test_a_panic_while_a_group_is_stored_is_that_puts_error(open_plane: OpenPlane) -> None:
    plane = open_plane()
    assert plane._server is not None
    pipeline = plane._server._pipeline
    honest, pipeline._intake = pipeline._intake, PanickingIntake(plane._server.settings, plane._server.engine.writer)
    with pytest.raises(StorageError, match="group 'a': Panic: while writing; the plane could not store it"):
        plane.put(named_group("a"), timeout=60)
    pipeline._intake = honest
    assert plane.put(named_group("a"), timeout=60)


def test_an_exception_in_a_ranks_block_reaches_the_others(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, "a", "b")
    ranks = sources(plane)
    steps_of(together(*(source.step for source in ranks)))
    with pytest.raises(RuntimeError), ranks[0]:
        raise RuntimeError("nan in the loss")
    with pytest.raises(StepAborted, match="rank 0: RuntimeError: nan in the loss"):
        ranks[1].step(timeout=120)
    close(ranks)


def test_a_rank_that_left_stops_those_who_want_more_and_nobody_else(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, "a", "b", "c", "d")
    ranks = sources(plane)
    steps_of(together(*(source.step for source in ranks)))
    for source in ranks:
        source.commit(1)
    ranks[0].close()
    ranks[1].flush(120)
    with pytest.raises(StepAborted, match="rank 0: left"):
        while True:
            ranks[1].commit(ranks[1].step(timeout=120))
    close(ranks)
    assert plane.ledger.committed == 4


def test_ranks_that_resume_at_different_steps_get_one_error(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, *(f"g{i}" for i in range(8)))
    ranks = sources(plane)
    for number in (1, 2, 3):
        steps_of(together(*(source.step for source in ranks)))
        for source in ranks:
            source.commit(number)
    close(ranks)
    mixed = [plane.source(0, world=2, resume_step=2), plane.source(1, world=2, resume_step=3)]
    words = same_words(together(*(lambda s=s: s.step(timeout=120) for s in mixed)))
    assert "resume all from one checkpoint" in words
    close(mixed)


def test_a_rank_that_restarts_alone_stops_the_others_and_then_all_go_on(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, "a", "b")
    ranks = sources(plane)
    first = [step.digest for step in steps_of(together(*(source.step for source in ranks)))]
    again = plane.source(0, world=2, resume_step=1)
    with pytest.raises(StepAborted, match=r"rank 0: its process .* opened a second"):
        ranks[1].step(timeout=120)
    with pytest.raises(StepAborted, match=r"rank 0: its process .* opened a second"):
        ranks[0].step(timeout=120)
    other = plane.source(1, world=2, resume_step=1)
    assert [step.digest for step in steps_of(together(again.step, other.step))] == first
    close([*ranks, again, other])


@pytest.mark.parametrize(
    ("rank", "settings", "words"),
    [
        (0, {"world": 3}, "world: this process says 3, the plane has 2"),
        (0, {"world": 2, "run": "other"}, "run: this process says 'other', the plane has 'run'"),
        (0, {"world": 2, "replicas": 4}, "replicas: this process says 4, the plane has 1"),
    ],
)
def test_who_does_not_fit_is_refused_with_both_values(
    open_plane: OpenPlane, rank: int, settings: dict[str, int], words: str
) -> None:
    plane = open_plane()
    source = Source(plane._connect(), SourceSettings(rank=rank, timeouts=FAST, **settings))  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=words):
        source.step(timeout=120)
    source.close()


def test_a_resume_beyond_the_run_is_one_error_for_all(open_plane: OpenPlane) -> None:
    plane = open_plane()
    ranks = sources(plane, resume_step=7)
    assert "the last step that was delivered is 0" in same_words(
        together(*(lambda s=s: s.step(timeout=120) for s in ranks))
    )
    close(ranks)


def test_a_plane_that_is_gone_is_an_error_with_a_bound(tmp_path: Path) -> None:
    impatient = replace(FAST, plane_s=FAST.plane_s / 5)
    source = ps.connect(f"ipc://{tmp_path}/nobody", rank=0, world=1, timeouts=impatient)
    began = time.monotonic()
    with pytest.raises(PlaneLost, match="heard nothing from the plane"):
        source.step()
    assert time.monotonic() - began < impatient.plane_s + 2 * pace()
    source.close()


def test_a_step_that_can_never_be_filled_is_an_error_and_not_a_wait(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=50, max_held_bytes=3000)
    (source,) = sources(plane, 1)
    with pytest.raises(Overloaded):
        for i in range(50):
            plane.put(named_group(f"g{i}"), timeout=0)
    full = r"can never be filled: the plane is full and the step waits for generation: .*; raise max_held_bytes"
    with pytest.raises(StepAborted, match=full):
        source.step(timeout=120)
    close([source])

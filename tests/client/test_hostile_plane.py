"""A plane that means harm to its clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PeerError
from penstock.protocol import (
    Accepted,
    Attach,
    FromClient,
    FromPlane,
    GroupStates,
    OpenSegment,
    PromptsOffered,
    Pulse,
    SegmentOpened,
    Status,
)
from penstock.protocol.messages import Put, Trace
from penstock.storage.custody import Marker
from tests.support.fake_plane import RUN, FakePlane, attached
from tests.support.groups import named_group
from tests.support.pace import eventually

pytestmark = pytest.mark.process


@pytest.mark.parametrize("segment", ["../../victim/evil", "{victim}/evil", "a\0b", "", "0123456789ABCDEF"])
def test_a_segment_that_leads_out_of_the_storage_is_rejected(tmp_path: Path, segment: str) -> None:
    storage, victim = tmp_path / "storage", tmp_path / "victim"
    (storage / "segments").mkdir(parents=True)
    victim.mkdir()
    (storage / "marker").write_bytes(Marker(run_id=RUN.hex(), epoch=1, commits=0).to_bytes())

    def answer(message: FromClient) -> Sequence[FromPlane]:
        if isinstance(message, Attach):
            return [attached(message.ticket, storage=str(storage))]
        if isinstance(message, OpenSegment):
            return [SegmentOpened(ticket=message.ticket, segment=segment.format(victim=victim))]
        return [Accepted(ticket=message.ticket)] if isinstance(message, Put) else []

    with (
        FakePlane(answer) as fake,
        ps.open(fake.url) as plane,
        pytest.raises(PeerError, match=r"opened segment .*; a name has 16 hexadecimal digits"),
    ):
        plane.put(named_group("a"), timeout=60)
    assert not list(victim.iterdir()) and not list((storage / "segments").iterdir())


@pytest.mark.parametrize("storage", ["/" + "x" * 5000, "/a\0b", "/dev/null", "s3://key:secret@bucket/x", "../.."])
def test_a_storage_that_cannot_be_is_not_used(storage: str) -> None:
    def answer(message: FromClient) -> Sequence[FromPlane]:
        if isinstance(message, Attach):
            return [attached(message.ticket, storage=storage)]
        return [Accepted(ticket=message.ticket)] if isinstance(message, Put) else []

    with FakePlane(answer) as fake, ps.open(fake.url) as plane:
        assert plane.put(named_group("a"), timeout=60)


def test_a_put_that_a_living_plane_does_not_answer_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.producer_connection._LONG_S", 0.0)

    def has_said() -> bool:
        return any("alive and has not answered a put" in record.getMessage() for record in caplog.records)

    def answer(message: FromClient) -> Sequence[FromPlane]:
        if isinstance(message, Attach):
            return [attached(message.ticket)]
        if isinstance(message, Trace) and has_said():
            return [Accepted(ticket=message.ticket)]
        return [Pulse(epoch=1, session=0, waiting_for="nothing")]

    with (
        caplog.at_level(logging.WARNING),
        FakePlane(answer) as fake,
        ps.open(fake.url) as plane,
        ThreadPoolExecutor() as pool,
    ):
        put = pool.submit(plane.put, named_group("a"), timeout=0.5)
        eventually(has_said)
        assert put.result(120)
    assert len([record for record in caplog.records if "has not answered" in record.getMessage()]) == 1


NONSENSE: list[tuple[str, Callable[[ps.Plane], object], Callable[[int], FromPlane]]] = [
    ("another answer to status", lambda plane: plane.status(), lambda ticket: Accepted(ticket=ticket)),
    ("status that is no JSON", lambda plane: plane.status(), lambda ticket: Status(ticket=ticket, text=b"\xff{")),
    ("status that is a list", lambda plane: plane.status(), lambda ticket: Status(ticket=ticket, text=b"[]")),
    ("no ledger", lambda plane: plane.ledger, lambda ticket: Status(ticket=ticket, text=b"{}")),
    ("a ledger of text", lambda plane: plane.ledger, lambda ticket: Status(ticket=ticket, text=b'{"ledger": "x"}')),
    ("no columns", lambda plane: plane.columns, lambda ticket: Status(ticket=ticket, text=b"{}")),
    ("no ranks", lambda plane: plane.source(0), lambda ticket: Status(ticket=ticket, text=b'{"ranks": "x"}')),
    ("another answer to has", lambda plane: plane.has(["a"]), lambda ticket: Accepted(ticket=ticket)),
    ("too few states", lambda plane: plane.has(["a", "b"]), lambda t: GroupStates(ticket=t, states=(("held", ""),))),
    ("another answer to feedback", lambda plane: list(plane.feedback()), lambda ticket: Accepted(ticket=ticket)),
    ("another answer to tasks", lambda plane: list(plane.tasks(["a"])), lambda ticket: Accepted(ticket=ticket)),
    ("another answer to a lease", lambda plane: next(plane.lacking("rewards")), lambda t: Accepted(ticket=t)),
    (
        "a part of a prompt list that there is not",
        lambda plane: list(plane.tasks(["a"])),
        lambda ticket: PromptsOffered(ticket=ticket, missing=(7,)),
    ),
]


@pytest.mark.parametrize(("ask", "make"), [row[1:] for row in NONSENSE], ids=[row[0] for row in NONSENSE])
def test_an_answer_that_no_plane_gives_is_a_peer_error(
    ask: Callable[[ps.Plane], object], make: Callable[[int], FromPlane]
) -> None:
    def answer(message: FromClient) -> Sequence[FromPlane]:
        ticket = getattr(message, "ticket", 0)
        return [attached(ticket)] if isinstance(message, Attach) else [make(ticket)] if ticket else []

    with FakePlane(answer) as fake, ps.open(fake.url) as plane, pytest.raises(PeerError, match="the plane"):
        ask(plane)

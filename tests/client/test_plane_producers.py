"""What producers see of a plane: room that is waited for, runs that stay apart, versions, and stale groups."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.plane import Plane
from penstock.convert.filters import Truncated
from penstock.errors import Fenced, InvalidInput, Overloaded, PeerError
from penstock.frames import encode
from penstock.protocol.message_header import read_from_client
from penstock.protocol.messages import AskRoom, Frames, Put
from penstock.transport.interface import ClientTransport, Envelope
from tests.support.groups import named_group
from tests.support.pace import pace
from tests.support.planes import FAST, OpenPlane


class CountingClient:
    """A connection that counts the groups sent over it."""

    def __init__(self, inner: ClientTransport) -> None:
        self._inner = inner
        self.wake, self.close = inner.wake, inner.close
        self.puts = self.asks = self.messages = self.payload_bytes = 0

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self.messages += 1
        message = read_from_client(header)
        self.asks += isinstance(message, AskRoom)
        if isinstance(message, Put):
            self.puts += 1
            self.payload_bytes += sum(map(len, frames))
        self._inner.send(header, frames)

    def receive(self, timeout_s: float) -> Envelope | None:
        return self._inner.receive(timeout_s)


def counted_line(plane: ps.Plane) -> tuple[Plane, CountingClient]:
    client = CountingClient(plane._connect())
    return Plane(lambda: client, url="memory:", timeouts=FAST), client


def train(plane: ps.Plane, steps: int, policy_version: int | None = None) -> None:
    with plane.source(0) as source:
        for _ in range(steps):
            source.commit(source.step(timeout=60), policy_version=policy_version)
        source.flush()


# ------------------------------------------------------------------ room


def test_a_plane_with_plenty_of_room_is_sent_groups_without_a_question(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    producer, line = counted_line(plane)
    assert plane.put(named_group("other"))
    for number in range(20):
        assert producer.put(named_group(f"g{number}"))
    assert (line.puts, line.asks) == (20, 0)
    producer.close()


def test_a_producer_that_waits_for_room_sends_its_group_once_and_again_when_there_is_room(
    open_plane: OpenPlane,
) -> None:
    large = named_group("large", samples=16, tokens=20_000)
    frame = encode(large)
    plane = open_plane(ranks=1, seq_len=32_768, groups_per_step=1, max_held_bytes=int(len(frame) * 1.5))
    plane.put(named_group("first", samples=16, tokens=20_000))
    producer, line = counted_line(plane)
    with pytest.raises(Overloaded, match="'large'"):
        producer.put(large, timeout=5 * FAST.heartbeat_s)
    assert line.puts == 0
    with ThreadPoolExecutor() as pool:
        groups = [named_group(f"g{i}", samples=16, tokens=20_000) for i in range(2)]
        waiting = [pool.submit(producer.put, group, timeout=60) for group in groups]
        until(lambda: plane.status()["producers_waiting"] == 2)
        assert line.puts == 0  # there is no room, so it asked
        train(plane, 2)
        assert [future.result(60) for future in waiting] == [True, True]
    assert line.puts == 2
    assert plane.status()["counts"]["puts_overloaded"] == 0
    producer.close()


def until(done: object, seconds: float = 120.0) -> None:
    """Wait for what another thread does."""
    assert callable(done)
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_a_put_that_does_not_wait_takes_no_place_among_those_that_do(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, capacity=1)
    plane.put(named_group("a"))
    for _ in range(3):
        with pytest.raises(Overloaded):
            plane.put(named_group("b"), timeout=0)
        with pytest.raises(Overloaded):
            plane.put(named_group("b"), timeout=0.05)
    assert plane.status()["producers_waiting"] == 0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(plane.put, named_group("c"), timeout=60)
        until(lambda: plane.status()["producers_waiting"] == 1)
        train(plane, 1)
        assert waiting.result(60)


def test_a_group_put_from_bytes_waits_for_the_room_of_its_run(open_plane: OpenPlane) -> None:
    frames = {name: encode(named_group(name, run=name[0])) for name in ("a1", "a2", "b1")}
    size = max(map(len, frames.values()))
    plane = open_plane(ranks=1, groups_per_step=1, shares={"a": 1.0, "b": 1.0}, max_held_bytes=int(size * 3))
    plane.put_frame("a1", frames["a1"])
    producer, line = counted_line(plane)
    with pytest.raises(Overloaded, match="'a2'"):
        producer.put_frame("a2", frames["a2"], timeout=3 * FAST.heartbeat_s)
    assert line.puts == 0
    assert producer.put_frame("b1", frames["b1"], timeout=0)  # the other run has room
    producer.close()


# ------------------------------------------------------------------ runs stay apart


def test_a_producer_that_names_another_run_is_refused_with_both_names(open_plane: OpenPlane, tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/plane.sock"
    plane = open_plane(ranks=1, run="A", listen=[url])
    with ps.open(url, run="B", timeouts=FAST) as other:
        for ask in (lambda: other.put(named_group("a")), other.status):
            with pytest.raises(PeerError, match="run: this process says 'B', the plane has 'A'"):
                ask()
    with ps.open(url, run="A", timeouts=FAST) as mine:
        assert mine.put(named_group("a"))
    assert plane.ledger.accepted == 2


@pytest.mark.parametrize("kind", ["ipc", "file"])
def test_nothing_of_an_old_run_is_accepted_by_a_new_one_at_its_address(tmp_path: Path, kind: str) -> None:
    url = f"file://{tmp_path}/mail" if kind == "file" else f"{kind}://{tmp_path}/plane.sock"
    settings = {"ranks": 1, "seq_len": 64, "groups_per_step": 1, "timeouts": FAST, "listen": [url]}
    old = ps.open(tmp_path / "run", **settings)  # type: ignore[arg-type]
    producer = ps.open(url, timeouts=FAST)
    source = ps.connect(url, rank=0, world=1, timeouts=FAST)
    assert producer.put(named_group("a"))
    assert source.step(timeout=120).number == 1
    old.close()
    shutil.rmtree(tmp_path / "run")
    with ps.open(tmp_path / "run", **settings) as new:  # type: ignore[arg-type]
        with pytest.raises(Fenced, match=r"belongs to run .* of an earlier plane"):
            producer.put(named_group("b"))
        with pytest.raises(Fenced, match=r"belongs to run .* of an earlier plane"):
            source.step(timeout=120)
        assert new.ledger.accepted == 0
        assert new.status()["counts"]["messages_foreign"] >= 2
        with ps.open(url, timeouts=FAST) as fresh:
            assert fresh.put(named_group("b"))
    producer.close()
    source.close()


@pytest.mark.deep
def test_a_put_left_in_a_mail_folder_is_not_taken_by_a_plane_of_another_run(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mail"
    settings = {"ranks": 1, "seq_len": 64, "groups_per_step": 1, "timeouts": FAST}
    old = ps.open(tmp_path / "run", listen=[url], **settings)  # type: ignore[arg-type]
    producer = ps.open(url, timeouts=replace(FAST, plane_s=FAST.plane_s / 3))
    assert producer.put(named_group("a"))
    old.close()
    with ThreadPoolExecutor() as pool:
        left = pool.submit(producer.put, named_group("b"))  # nobody reads it
        with pytest.raises(ps.PenstockError):
            left.result(60)
    shutil.rmtree(tmp_path / "run")
    with ps.open(tmp_path / "run", listen=[url], **settings) as new:  # type: ignore[arg-type]
        until(lambda: new.status()["counts"].get("messages_foreign", 0) > 0)
        assert new.ledger.accepted == 0
    producer.close()


def test_a_run_keeps_its_identity_when_its_plane_is_opened_again(open_plane: OpenPlane, tmp_path: Path) -> None:
    first = open_plane(tmp_path / "run", ranks=1)
    known = first.status()["run_id"]
    first.close()
    assert open_plane(tmp_path / "run", ranks=1).status()["run_id"] == known
    assert open_plane(ranks=1).status()["run_id"] not in ("", known)


def test_settings_of_a_plane_are_refused_for_a_line_to_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="groups_per_step, sampler: the plane there has its own settings"):
        ps.open(f"ipc://{tmp_path}/x", run="A", groups_per_step=7, sampler=ps.Uniform())


# ------------------------------------------------------------------ versions


def test_a_producer_hears_which_version_was_published(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    assert plane.policy_version == 0
    plane.put(named_group("a"))
    train(plane, 1, policy_version=7)
    plane.put(named_group("b"))
    assert plane.policy_version == 7


@pytest.mark.deep
def test_groups_that_are_too_old_are_said_to_the_producer_and_to_waiting_ranks(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_staleness=1)
    plane.put(named_group("first", policy_version=0))
    train(plane, 1, policy_version=9)
    with caplog.at_level(logging.WARNING, "penstock.producer"):
        for number in range(3):
            assert plane.put(named_group(f"old{number}", policy_version=1))
    assert plane.num_stale == 3
    assert "too old for max_staleness" in caplog.text
    assert "version 9 is published" in caplog.text
    with plane.source(0) as source, pytest.raises(ps.PenstockError, match=r"the last 3 groups .* dropped as stale"):
        source.step(timeout=2 * pace())
    plane.put(named_group("new", policy_version=9))
    assert "stale" not in plane.status()["waiting_for"]
    assert plane.ledger.dropped == {"stale": 6}


@pytest.mark.parametrize("version", [-1, 2**53 + 1, 2**63 + 5])
def test_a_version_beyond_what_can_be_counted_is_refused_at_commit(open_plane: OpenPlane, version: int) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    plane.put(named_group("a"))
    with plane.source(0) as source:
        step = source.step(timeout=120)
        with pytest.raises(InvalidInput, match=f"policy_version: {version}; must be"):
            source.commit(step, policy_version=version)
        source.commit(step, policy_version=2**53)
        source.flush()
    assert plane.policy_version == 2**53


# ------------------------------------------------------------------ what was filtered out


def test_what_was_filtered_out_is_counted_once_however_often_the_group_is_put(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, capacity=1)
    plane.put(named_group("first"))

    def turns() -> list[ps.Turn]:
        return [ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])]

    group = plane.group("p", id="g", filters=[Truncated()], timeout=0.05)
    for reward in (0.0, 1.0, 2.0):
        group.add(ps.Trajectory(turns=turns(), reward=reward, truncated=reward == 1.0))
    for _ in range(4):
        with pytest.raises(Overloaded):
            group.put()
    assert dict(plane.ledger.discarded) == {"truncated": 1}


def test_reasons_for_which_samples_are_discarded_are_bounded(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    for number in range(300):
        plane.discard(f"reason {number}", 1)
    found = plane.ledger.discarded
    assert (len(found), sum(found.values()), found["other reasons"]) == (257, 300, 44)


def test_a_producer_that_never_waits_is_let_in_again_when_there_is_room(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, capacity=2)
    for name in "ab":
        plane.put(named_group(name), timeout=0)
    for _ in range(3):
        with pytest.raises(Overloaded):
            plane.put(named_group("c"), timeout=0)
    train(plane, 1)
    assert plane.put(named_group("c"), timeout=0)


class BrokenClient:
    """A transport whose other end times out, as a file on a hung network filesystem does."""

    def send(self, header: bytes, frames: Frames = ()) -> None:
        raise TimeoutError(110, "Connection timed out")

    def receive(self, timeout_s: float) -> Envelope | None:
        time.sleep(min(timeout_s, 0.01))
        return None

    def wake(self) -> None: ...

    def close(self) -> None: ...


def test_a_transport_that_times_out_ends_a_waiting_call() -> None:
    with pytest.raises(TimeoutError, match="Connection timed out"):
        Plane(BrokenClient, url="broken:").status()

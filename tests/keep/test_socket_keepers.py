"""The conformance suite over a keeper's sockets, and what only a keeper with a process of its own must do."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import Conflict, DiskFull
from penstock.keep import Keeper
from penstock.keep.numbered import NumberedFrames
from penstock.send.timeouts import Timeouts
from penstock.testing.cluster import Cluster
from penstock.testing.keepers import KeeperSuite, kept_frame
from penstock.testing.pace import pace, stretched
from penstock.testing.socket_keeper import SocketKeeper
from tests.serve.processes import wait_until

TIMES = stretched(Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2), pace())


def joined(cluster: Cluster, node: str) -> SocketKeeper:
    """A line to one of its keepers, once that has joined the plane."""
    server = cluster.keepers[node].server
    wait_until(lambda: server.session.is_ready)
    return SocketKeeper(server.url, server.session.run_id, lambda: server._frames.num_bytes)


class TestSocketKeeper(KeeperSuite):
    @pytest.fixture(autouse=True)
    def _cluster(self, tmp_path: Path) -> object:
        with Cluster(tmp_path / "cluster", nodes="a", copies=1, timeouts=TIMES) as cluster:
            self.cluster = cluster
            yield

    def keeper(self, folder: Path) -> Keeper:
        return joined(self.cluster, "a")

    def damage(self, keeper: Keeper, location: str) -> None:
        kept = self.cluster.keepers["a"].server._frames.get(int(location.partition(":")[0]))
        assert kept is not None
        segment, offset, size = kept.location.split(":")
        with (self.cluster.folder / "a" / "frames" / segment).open("r+b") as file:
            file.seek(int(offset) + int(size) // 2)
            octet = file.read(1)[0]
            file.seek(int(offset) + int(size) // 2)
            file.write(bytes([octet ^ 1]))

    def test_a_question_that_is_asked_twice_keeps_one_frame(self, tmp_path: Path) -> None:
        keeper = joined(self.cluster, "a")
        first, second = keeper.copy(kept_frame("a"), times=2)
        assert first == second
        assert keeper.num_bytes == len(kept_frame("a"))
        (third,) = keeper.keep([kept_frame("a")])  # another put of it: a number of its own
        assert third != first
        keeper.close()


def test_a_keeper_that_is_full_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes="", copies=1, timeouts=TIMES) as cluster:
        cluster.start_keeper("a", quota_bytes=len(kept_frame("a")) + 10)
        keeper = joined(cluster, "a")
        (a,) = keeper.keep([kept_frame("a")])
        with pytest.raises(DiskFull, match="group 'b': its quota is full; nothing was kept"):
            keeper.keep([kept_frame("b")])
        assert bytes(keeper.read(a)) == kept_frame("a")
        keeper.close()


def test_a_folder_that_is_open_elsewhere_is_refused_by_its_index_too(tmp_path: Path) -> None:
    """As when its lock does not reach from host to host: the frames are there, and nobody must throw them away."""
    first = NumberedFrames(tmp_path)
    (a,) = first.keep([("a", b"1" * 16, kept_frame("a"))])
    with pytest.raises(Conflict, match="another keeper has it open; stop it"):
        NumberedFrames(tmp_path)
    assert bytes(first.read(a)) == kept_frame("a")
    first.close()


def test_a_folder_goes_on_where_it_was_and_never_uses_a_number_twice(tmp_path: Path) -> None:
    first = NumberedFrames(tmp_path)
    a, b = first.keep([("a", b"1" * 16, kept_frame("a")), ("b", b"2" * 16, kept_frame("b"))])
    first.forget([b])
    first.close()
    second = NumberedFrames(tmp_path)
    assert (second.id, second.life, second.numbers, second.last) == (first.id, 2, [a], b)
    (c,) = second.keep([("c", b"3" * 16, kept_frame("c"))])
    assert c > b
    assert [bytes(second.read(number)) for number in (a, c)] == [kept_frame("a"), kept_frame("c")]
    assert second.num_bytes == len(kept_frame("a")) + len(kept_frame("c"))
    second.close()


def test_a_frame_without_a_number_is_swept_by_the_next_life(tmp_path: Path) -> None:
    first = NumberedFrames(tmp_path)
    first.keep([("a", b"1" * 16, kept_frame("a"))])
    first._keeper.keep([kept_frame("orphan")])  # killed before its number was written down
    first.close()
    second = NumberedFrames(tmp_path)
    assert second.num_bytes == len(kept_frame("a"))
    second.close()

"""Whatever a client says to a keeper, or a keeper to the plane: both go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.keep.facts import check_group
from penstock.send.keeper_messages import CopyFrame, Enlist, KeeperBeat, PutFacts, Take, Taken
from penstock.send.keys import ClientKeys, make_keys
from penstock.send.lines import Lines
from penstock.send.message_header import pack_message, read_from_plane
from penstock.send.messages import Accepted, Frames, FromClient, FromPlane, Put, Refused, Rejected, Trace
from penstock.testing.cluster import Cluster
from penstock.testing.groups import named_group
from penstock.testing.keepers import kept_frame
from tests.serve.conftest import FAST
from tests.serve.processes import wait_until

TIMES = replace(FAST, keeper_s=600.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, timeouts=TIMES, nodes="a", copies=1, ranks=1, groups_per_step=1) as found:
        found.plane.put(named_group("a"), timeout=60)
        yield found


class Client:
    """Says anything to anybody."""

    def __init__(self, url: str, run_id: bytes, keys: ClientKeys | None = None) -> None:
        self._lines, self._run_id = Lines(), run_id
        self._lines.connect("it", url, keys)

    def say(self, message: FromClient, frames: Frames = ()) -> None:
        self._lines.send("it", pack_message(message, self._run_id), frames)

    def hear(self, kind: type) -> FromPlane:
        found: list[FromPlane] = []

        def heard() -> bool:
            self._lines.poll(0.05)
            found.extend(read_from_plane(header) for _, header, _ in self._lines.receive())
            return any(isinstance(message, kind) for message in found)

        wait_until(heard)
        return next(message for message in found if isinstance(message, kind))

    def close(self) -> None:
        self._lines.close()


def goes_on(cluster: Cluster) -> None:
    """A group can still be put and trained."""
    cluster.plane.put(named_group("b"), timeout=60)
    with cluster.rank(0) as source:
        for _ in range(2):
            source.commit(source.step(timeout=60))
        source.flush()


PICKS: list[Any] = [
    [(1, "a", (5,))],
    [(1, "a", (0, 1 << 40))],
    [(1, "a", (1, 0))],
    [(1, "a", (0, 0))],
    [(1, "a", (-1,))],
    [(1, "a", (0,)), (1, "a", (0,))],
    [(1, "b", (0,))],
    [(99, "a", (0,)), (1, "a", ())],
    [(-1, "", ())],
    [],
]


def test_a_keeper_survives_whatever_is_asked_of_it(cluster: Cluster) -> None:
    server = cluster.keepers["a"].server
    client = Client(server.url, server.session.run_id)
    for ticket, picks in enumerate(PICKS, start=1):
        client.say(Take(ticket=ticket, picks=tuple(picks)))
        answer = client.hear(Taken)
        assert isinstance(answer, Taken)
        assert len(answer.missing) == len(picks), (picks, answer)
    for frames in ((), (b"",), (b"nonsense",), (b"a", b"b")):
        client.say(Put(ticket=50, group="c", digest=b""), frames)
        client.say(CopyFrame(ticket=51, group="c", digest=b"x"), frames)
        client.say(Trace(ticket=52, group="c", digest=b""), frames)
    client.say(KeeperBeat(incarnation="x", number=1, num_bytes=1, num_groups=1))
    client.close()
    goes_on(cluster)


def test_the_plane_survives_what_a_keeper_may_say(cluster: Cluster) -> None:
    server = cluster.keepers["a"].server
    client = Client(cluster.url, server.session.run_id)
    facts = check_group(kept_frame("f"), group="f", seq_len=64).to_bytes()
    bad: list[Any] = [(), (("", 1),), (("a#1,b", 1),), (("x", -1),), (("x", 1), ("x", 2)), (("nobody.1", 1),)]
    for ticket, copies in enumerate(bad, start=1):
        client.say(PutFacts(ticket=ticket, group="f", digest=b"d", size=1, facts=facts, copies=copies))
    for ticket, data in enumerate((b"", b"\xc1", facts[:-1]), start=20):
        client.say(PutFacts(ticket=ticket, group="f", digest=b"d", size=-1, facts=data, copies=((server.name, 1),)))
    assert isinstance(client.hear(Rejected), Rejected)
    about = Enlist(name="../x", node="n", url="tcp://x", key=b"", incarnation="1", last=0, life=1)
    client.say(about, [b"odd"])
    assert isinstance(client.hear(Refused), Refused)
    client.close()
    assert cluster.plane.ledger.accepted == len(named_group("a"))
    goes_on(cluster)


@pytest.mark.parametrize("who", ["client", "keeper"])
def test_facts_count_with_a_keepers_key_and_with_no_other(tmp_path: Path, who: str) -> None:
    folder = tmp_path / "keys"
    make_keys(str(folder), keepers=("keeper",))
    settings: Any = {"nodes": "a", "copies": 1, "ranks": 1, "groups_per_step": 1, "keys": str(folder)}
    with Cluster(tmp_path, timeouts=TIMES, **settings) as cluster:
        cluster.plane.put(named_group("a"), timeout=60)
        server = cluster.keepers["a"].server
        liar = Client(cluster.url, server.session.run_id, ClientKeys.load(str(folder), who))
        facts = check_group(kept_frame("f"), group="f", seq_len=64).to_bytes()
        liar.say(PutFacts(ticket=1, group="f", digest=b"d", size=1, facts=facts, copies=((server.name, 99),)))
        if who == "client":
            answer = liar.hear(Rejected)
            assert isinstance(answer, Rejected)
            assert (answer.kind, "only keepers may vouch" in answer.reason) == ("InvalidInput", True)
            liar.say(Enlist(name="n.1", node="n", url="tcp://x", key=b"", incarnation="1", last=0, life=1), [b""])
            refused = liar.hear(Refused)
            assert isinstance(refused, Refused) and "only keepers may vouch" in refused.reason
            assert cluster.plane.ledger.accepted == len(named_group("a"))
        else:
            assert isinstance(liar.hear(Accepted), Accepted)  # whoever has that key is believed
        liar.close()

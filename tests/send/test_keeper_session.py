"""A keeper's line to its plane: what is not a message counts as lost, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.send.copies import numbers_to_bytes
from penstock.send.keeper_events import ForgetNumbers
from penstock.send.keeper_messages import Enlist, Enlisted, KeeperAt, KeeperPulse
from penstock.send.keeper_session import KeeperSession
from penstock.send.messages import Attached
from penstock.send.timeouts import Timeouts

TERMS = Enlisted(epoch=1, copies=1, is_shared=False, seq_len=64, max_tokens=1, max_bytes=1, max_samples=1)


@dataclass
class Numbers:
    """A store of frames that are only numbers."""

    numbers: list[int] = field(default_factory=lambda: [1, 2, 3])
    last: int = 3
    num_bytes: int = 0

    def __len__(self) -> int:
        return len(self.numbers)


def attached() -> KeeperSession:
    about = Enlist(name="a.1", node="a", url="", key=b"", incarnation="i", last=0, life=1)
    session = KeeperSession(about, Numbers(), timeouts=Timeouts())
    session.start(0.0)
    session.on_message(Attached(ticket=0, run_id=b"r" * 16, run="", epoch=1, ranks=1, copies=1), (), 0.0)
    return session


def test_an_answer_whose_numbers_are_damaged_is_as_if_it_were_lost() -> None:
    session = attached()
    for payload in ([b"1234567"], [b"", b""]):
        assert session.on_message(TERMS, payload, 1.0) == []
        assert not session.is_ready and session.terms is None
    assert ForgetNumbers((2,)) in session.on_message(TERMS, [numbers_to_bytes([2])], 2.0)
    assert session.is_ready


def test_a_pulse_whose_numbers_are_damaged_is_as_if_it_were_lost() -> None:
    session = attached()
    session.on_message(TERMS, [b""], 1.0)
    peers = (KeeperAt(name="b.1", node="b", url=""),)
    assert session.on_message(KeeperPulse(epoch=1, number=1, peers=peers, batch=1, forget=b"123"), (), 2.0) == []
    assert not session.peers
    whole = KeeperPulse(epoch=1, number=1, peers=peers, batch=1, forget=numbers_to_bytes([3]))
    assert session.on_message(whole, (), 3.0) == [ForgetNumbers((3,))]
    assert [at.name for at in session.peers] == ["b.1"]

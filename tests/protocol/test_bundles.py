"""Bundles: what was joined comes apart again, and a bundle that was made up is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptFrame
from penstock.protocol import Accepted, Bundle, Out, Put, answered, bundled, unbundled
from penstock.protocol.message_header import pack_message, read_from_client, read_from_plane
from penstock.protocol.messages import Answers, Ask, AskRoom, FromPlane, GiveUp, Rejected, Room, Trace
from penstock.transport.sockets import MAX_FRAMES

TICKETS = st.integers(0, 1 << 40)
MESSAGES = st.one_of(
    st.builds(Put, ticket=TICKETS, group=st.text(max_size=5), metadata=st.binary(max_size=20)),
    st.builds(AskRoom, ticket=TICKETS, tenant=st.text(max_size=5), size=st.integers(0, 1 << 50)),
    st.builds(GiveUp, ticket=TICKETS),
    st.builds(Trace, ticket=TICKETS, group=st.text(max_size=5), digest=st.binary(max_size=16)),
    st.builds(Ask, ticket=TICKETS),
)
SIZES = st.sampled_from([0, 1, 100, 200_000, 600_000, 2_000_000])
OUTS = st.lists(st.builds(Out, MESSAGES, st.lists(SIZES.map(bytes), max_size=2)), max_size=30)


@given(outs=OUTS)
def test_every_message_arrives_once_and_in_order_among_its_kind(outs: list[Out]) -> None:
    found: list[tuple[object, list[bytes]]] = []
    for out in bundled(outs):
        assert len(out.frames) + 2 <= MAX_FRAMES
        if isinstance(out.message, Bundle):
            assert len(out.message.messages) > 1
            assert sum(map(len, out.frames)) <= (1 << 20)
        message = read_from_client(pack_message(out.message))
        found += [(one, list(map(bytes, frames))) for one, frames in unbundled(message, list(out.frames))]
    for has_payload in (False, True):
        wanted = [(out.message, list(out.frames)) for out in outs if bool(out.frames) == has_payload]
        joined = [one for one in wanted if not isinstance(one[0], Ask)]
        mine = [one for one in found if bool(one[1]) == has_payload]
        assert [one for one in mine if not isinstance(one[0], Ask)] == joined
        assert len(mine) == len(wanted)


@pytest.mark.parametrize("payloads", [(1,), (1, 2), (2, -1), (1, 1, 0), (0, 0)])
def test_a_bundle_whose_payloads_do_not_add_up_is_rejected(payloads: tuple[int, ...]) -> None:
    bundle = Bundle(messages=(GiveUp(ticket=1), Put(ticket=2, group="g")), payloads=payloads)
    with pytest.raises(CorruptFrame, match="bundle of 2"):
        unbundled(bundle, [b"x"] if payloads != (1, 1, 0) else [b"x", b"y"])


def test_answers_to_one_client_travel_together() -> None:
    many: list[FromPlane] = [Accepted(ticket=1), Rejected(ticket=2, kind="Conflict", reason="other"), Room(ticket=3)]
    (found,) = answered(list(many))
    assert isinstance(found, Answers)
    assert list(found.answers) == many and read_from_plane(pack_message(found)) == found
    assert list(answered([many[0]])) == [many[0]]
    assert sum(len(one.answers) for one in answered(many * 200) if isinstance(one, Answers)) == 600

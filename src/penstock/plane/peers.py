"""Clients as the loop knows them: a transport, and an address on it."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from penstock.plane.workers import Threads, Workers
from penstock.protocol import MAX_NAME, Peer
from penstock.transport import PlaneTransport


def writer_of(peer: Peer) -> str:
    """Name a client as the writer of segments, for as long as its connection lasts."""
    assert isinstance(peer, tuple)  # as made in `turn`
    transport, address = peer
    return f"{transport.url} {address!r}"[:MAX_NAME]


def may_write(peer: Peer) -> bool:
    assert isinstance(peer, tuple)  # as made in `turn`
    transport, address = peer
    return bool(transport.is_writer(address))


def poller_of(transports: Sequence[PlaneTransport], workers: Workers) -> zmq.Poller:
    """Make a poller for transports with a descriptor and for results of workers."""
    poller = zmq.Poller()
    for transport in transports:
        pollable = transport.pollable()
        if pollable is not None:
            poller.register(pollable, zmq.POLLIN)
    if isinstance(workers, Threads):
        poller.register(workers.wake.descriptor, zmq.POLLIN)
    return poller

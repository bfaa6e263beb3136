"""A bad network between two processes of one host: a TCP proxy that stalls, slows, delays, alters and cuts.

    with Proxy(plane.url) as proxy:
        source = ps.connect(proxy.url, rank=0, world=2)
        proxy.stall()            # a partition: connections stay, nothing passes
        proxy.heal()
        proxy.down.bytes_per_s = 2_000_000   # what comes from the plane is slow

A connection's bytes are kept in order, as TCP does; nothing is lost without the connection being cut. Buffers are
kept small, so that a slow link is slow for the sender as well.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from typing import Any, Self

_BUFFER = 1 << 16
_CHUNK = 1 << 14
_CATCH_UP_S = 0.25
"""On a busy machine a wait ends late; what was lost may be made up for, so that a link has the speed it is given."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST, and bytes in flight are lost."""


class Direction:
    """What happens to bytes in one direction, of all connections together. Set it at any time."""

    def __init__(self) -> None:
        self.stalled = False
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")
        self.flips = 0
        """Number of the next large chunks that get one bit flipped. A large one lies within a payload."""
        self.passed = 0
        """Bytes so far."""
        self._free_at = 0.0

    async def passes(self, data: bytes) -> bytes:
        """Wait for the bytes' turn; returns what arrives."""
        while self.stalled:
            await asyncio.sleep(0.005)
        self._free_at = max(self._free_at, time.monotonic() - _CATCH_UP_S) + len(data) / self.bytes_per_s
        wait = self._free_at - time.monotonic()
        if wait > 0.001:
            await asyncio.sleep(wait)
        self.passed += len(data)
        if self.flips and len(data) == _CHUNK:
            self.flips -= 1
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        return data


class Proxy:
    """Connections to `proxy.url` reach a plane at `url`, for better or worse; runs in a thread of its own."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.up, self.down = Direction(), Direction()
        """To the plane, and from it."""
        self.connections = 0
        """Made so far."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-proxy", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._connect, sock=self._listener, limit=_BUFFER))

    def stall(self, *, up: bool = True, down: bool = True) -> None:
        """Nothing passes any more, in these directions."""
        self.up.stalled, self.down.stalled = up, down

    def heal(self) -> None:
        """As if nothing had been."""
        for way in (self.up, self.down):
            way.stalled, way.delay_s, way.bytes_per_s, way.flips = False, 0.0, float("inf"), 0

    def reset(self) -> None:
        """Cut every connection; new ones may be made."""
        self._do(self._cut())

    def close(self) -> None:
        self.heal()
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- in the loop's thread

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            end = await _narrow(self._target)
            far_reader, far_writer = await asyncio.open_connection(sock=end, limit=_BUFFER)
        except OSError:
            _abort(writer)
            return
        pair = {writer, far_writer}
        self._open |= pair
        ways = [(reader, far_writer, self.up), (far_reader, writer, self.down)]
        await _first([_pump(*way) for way in ways])
        self._open -= pair
        for end_writer in pair:
            _abort(end_writer)

    async def _cut(self) -> None:
        for writer in self._open:
            _abort(writer)

    async def _end(self) -> None:
        self._server.close()
        while self._open:  # each connection's own work ends when it is cut
            await self._cut()
            await asyncio.sleep(0.001)


async def _narrow(target: tuple[str, int]) -> socket.socket:
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, target)
    return end


def _abort(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
    """Move bytes until an end is closed or cut."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

    async def take() -> None:
        while data := await reader.read(_CHUNK):
            await under_way.put((time.monotonic() + way.delay_s, await way.passes(data)))

    async def give() -> None:
        while True:
            due, data = await under_way.get()
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            while way.stalled:
                await asyncio.sleep(0.005)
            writer.write(data)
            await writer.drain()

    await _first([take(), give()])


async def _first(works: list[Coroutine[Any, Any, None]]) -> None:
    """Until one of them ends or fails, which ends all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""A plain reference for the wait queue of `penstock.protocol.rooms`: one list, searched from the front each time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Waiter:
    """A put that waits, or that has room reserved."""

    client: str
    number: int
    size: int
    heard: float
    is_reserved: bool = False


class PlainLine:
    """A table that holds `capacity` groups and `limit` bytes, and the queue of clients waiting for room in it."""

    def __init__(self, capacity: int, limit: int, peer_s: float) -> None:
        self.capacity, self.limit, self.peer_s = capacity, limit, peer_s
        self.held: list[int] = []
        self.everybody: list[Waiter] = []
        self.closed: set[tuple[str, int]] = set()
        self.time = 0.0

    def find(self, client: str, number: int) -> Waiter | None:
        return next((w for w in self.everybody if (w.client, w.number) == (client, number)), None)

    def fits(self, size: int, beside: list[Waiter]) -> bool:
        used = sum(self.held) + sum(waiter.size for waiter in beside)
        return used + size <= self.limit and len(self.held) + len(beside) < self.capacity

    def reserved(self) -> list[Waiter]:
        return [waiter for waiter in self.everybody if waiter.is_reserved]

    def waiting(self) -> list[Waiter]:
        return [waiter for waiter in self.everybody if not waiter.is_reserved]

    def remind(self, client: str, number: int) -> None:
        waiter = self.find(client, number)
        if waiter is not None:
            waiter.heard = self.time

    def ask(self, client: str, number: int, size: int) -> None:
        self.remind(client, number)
        if self.find(client, number) is None and (client, number) not in self.closed:
            self.everybody.append(Waiter(client, number, size, self.time))

    def put(self, client: str, number: int, size: int) -> bool:
        """Whether the put is accepted; else it waits."""
        self.remind(client, number)
        waiter = self.find(client, number)
        before = self.waiting()[:1]
        may_pass = (waiter is not None and waiter.is_reserved) or not before or before == [waiter]
        if may_pass and self.fits(size, [other for other in self.reserved() if other is not waiter]):
            self.close(client, number)
            self.held.append(size)
            return True
        self.closed.discard((client, number))
        self.ask(client, number, size)
        return False

    def close(self, client: str, number: int) -> None:
        self.everybody = [w for w in self.everybody if (w.client, w.number) != (client, number)]
        self.closed.add((client, number))

    def gone(self, client: str) -> None:
        self.everybody = [waiter for waiter in self.everybody if waiter.client != client]

    def offer(self, seconds: float) -> list[tuple[str, int]]:
        """Let time pass. Returns the clients that may send now."""
        self.time += min(seconds, self.peer_s / 4)
        self.everybody = [waiter for waiter in self.everybody if self.time - waiter.heard <= self.peer_s]
        granted = []
        for waiter in self.waiting():
            if not self.fits(waiter.size, self.reserved()):
                break
            waiter.is_reserved = True
            granted.append((waiter.client, waiter.number))
        return granted

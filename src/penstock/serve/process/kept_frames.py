"""Frames as they were put, asked of the keepers that have them: for the archive of a plane that sees facts only."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress

from penstock.encode.layout import Buffer
from penstock.errors import CorruptFrame, StorageError
from penstock.send.copies import copies_of
from penstock.send.keeper_messages import KeeperAt, Take, Taken
from penstock.send.keys import ClientKeys, PlaneKeys
from penstock.send.lines import Lines
from penstock.send.message_header import pack_message, read_from_plane
from penstock.send.roster import Roster

ANSWER_S = 10.0
"""How long a keeper may take to answer; then the next copy is asked for."""


class KeptFrames:
    """Used by one thread. Of the roster, which the plane's loop owns, it only looks up where keepers are."""

    def __init__(self, roster: Roster, run_id: bytes, keys: PlaneKeys | None) -> None:
        self._roster, self._run_id, self._keys = roster, run_id, keys
        self._lines: Lines | None = None
        self._tickets = itertools.count(1)

    def read(self, location: str, group: str) -> Buffer:
        """A group's frame. Raises CorruptFrame if nobody will ever have it, StorageError while nobody gives it."""
        silent = []
        for name, number in copies_of(location):
            at = next(iter(self._roster.addresses([name])), None)
            found = None if at is None or not at.url else self._ask(at, number, group)
            if found is None:
                silent.append(name)
            elif len(found):
                return found
        if not silent or self._roster.lost(location):
            raise CorruptFrame(f"group {group!r}: no keeper has its frame any more")
        raise StorageError(f"group {group!r}: no answer from keeper {' or '.join(silent)}; it is asked again")

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _ask(self, at: KeeperAt, number: int, group: str) -> Buffer | None:
        """What a keeper has of it; empty if nothing, None if it does not answer."""
        lines = self._lines = self._lines or Lines()
        lines.connect(at.name, at.url, self._towards(at))
        message = Take(ticket=next(self._tickets), picks=((number, group, ()),))
        lines.send(at.name, pack_message(message, self._run_id))
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            lines.poll(0.1)
            for _, header, payload in lines.receive():
                with suppress(CorruptFrame):  # as if it had been lost
                    answer = read_from_plane(header)
                    if isinstance(answer, Taken) and answer.ticket == message.ticket:
                        return b"" if answer.missing or not payload else payload[0]
        return None

    def _towards(self, at: KeeperAt) -> ClientKeys | None:
        keys = self._keys
        return None if keys is None else ClientKeys(public=keys.public, secret=keys.secret, plane=at.key)

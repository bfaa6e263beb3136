"""Stream changes of watched runs as server-sent events: new steps, new metrics, run states.

    event: overview    runs, finished steps and states, when any of them changed
    event: rows        metrics one run has written since the last such event

A page that loses its connection reconnects and sends its position (`Last-Event-ID`), so it misses nothing. Files are
checked by size, and only new bytes are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.view.library import Library, runs_of
from penstock.view.run_files import Places, as_columns, rows_since

LOOK_S = 0.4
_REST = 20
"""Pause between looks at all runs, as a multiple of the duration of a look: a long log must not keep a CPU busy."""
_ALIVE_EVERY = 25
"""Looks without changes after which a comment keeps the connection open."""
Read = dict[str, Places]
"""By export and run: how far its files have been read."""
# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(Read)


class Watch:
    """Remembers what was sent, and returns what changed."""

    def __init__(self, library: Library, read: Read | None = None) -> None:
        self._library = library
        self._read: Read = dict(read or {})
        self._overview, self._due = b"", 0.0

    def look(self, *, at_all: bool = False) -> list[bytes]:
        """Return events for changes since the last look. `at_all` looks at all runs even before that is due."""
        found = [*self._look_at_runs()] if at_all or time.monotonic() >= self._due else []
        for export, opened in self._library.exports.items():
            for run in runs_of(opened):
                found += self._rows(export, run)
        return found

    def _look_at_runs(self) -> Iterator[bytes]:
        began = time.monotonic()
        found = self._library.overview()
        overview, known = msgspec.json.encode(found), msgspec.json.encode(_without_times(found))
        now = time.monotonic()
        self._due = now + _REST * (now - began)
        if known != self._overview:
            self._overview = known
            yield _event("overview", overview, self._read)

    def _rows(self, export: str, run: str) -> Iterator[bytes]:
        key = f"{export}\n{run}"
        if key not in self._read:  # no page has requested its curves yet
            return
        rows, now = rows_since(self._library.home(export, run), self._read[key])
        if now == self._read[key]:
            return
        self._read[key] = now
        if rows:
            data: dict[str, Any] = {"export": export, "run": run, "metrics": as_columns(rows)}
            yield _event("rows", msgspec.json.encode(data), self._read)


def _without_times(overview: dict[str, Any]) -> list[Any]:
    """Return the part of an overview whose changes are sent. A page learns of new metrics from the rows."""
    runs = [(one["name"], run) for one in overview["exports"] for run in one["runs"]]
    return [(name, {key: value for key, value in run.items() if key != "last"}) for name, run in runs]


async def events(library: Library, read: Read, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield events until the client disconnects or the server shuts down."""
    watch, quiet, is_last = Watch(library, read), 0, False
    yield b"retry: 1000\n\n"
    while not is_last:
        is_last = is_over()  # checked before the last look, so that a run's end is sent before the stream closes
        try:
            found = await asyncio.to_thread(watch.look, at_all=is_last)
        except (PenstockError, OSError):  # a step is being rewritten or a folder is not there yet: try again
            found = []
        for event in found:
            yield event
        quiet = 0 if found else quiet + 1
        if quiet >= _ALIVE_EVERY:
            quiet = 0
            yield b": still here\n\n"
        if not is_last:
            await asyncio.sleep(LOOK_S)


def parse_read(text: str) -> Read:
    """Parse a page's position. Malformed text counts as the start."""
    try:
        return _READ.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _event(name: str, data: bytes, read: Read) -> bytes:
    place = msgspec.json.encode(read)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place, name.encode(), data)

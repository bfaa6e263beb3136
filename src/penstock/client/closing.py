"""A plane in this process whose handle is gone is closed, so that its folder can be opened again.

The garbage collector may run in any thread, also in one that holds a lock which closing needs. So closing runs in a
thread of its own, and `open` waits for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.client.async_puts import AsyncPuts
from penstock.client.producer_connection import ProducerConnection

if TYPE_CHECKING:
    from penstock.plane import PlaneLoop

_PATIENCE_S = 20.0
_closing: set[threading.Thread] = set()


def close_when_collected(handle: object, close: Callable[[], None]) -> weakref.finalize[..., object]:
    """Call `close`, which must not refer to the handle, once the handle is collected; not when the process ends."""
    found = weakref.finalize(handle, _start, close)
    found.atexit = False
    return found


def await_closing() -> None:
    """Wait for planes whose handles were collected."""
    for thread in list(_closing):
        thread.join(_PATIENCE_S)


def _start(close: Callable[[], None]) -> None:
    def work() -> None:
        try:
            close()
        finally:
            _closing.discard(thread)

    thread = threading.Thread(target=work, name="penstock-closing", daemon=True)
    _closing.add(thread)
    thread.start()


def end(line: ProducerConnection, puts: AsyncPuts, server: PlaneLoop | None, thread: threading.Thread | None) -> None:
    """End a line; and the plane behind it, where that runs in this process."""
    if not line.is_mine:
        return
    line.close()
    puts.close()
    if server is not None and thread is not None:
        server.stop()
        thread.join(10)

"""Closes what a program dropped without `close`: a plane in this process, or a rank's source.

Their threads hold them only weakly, so that they can be garbage-collected. The collector may run in any thread, also in
one that holds a lock which closing needs. So closing runs in its own thread, and `open` waits for it (`await_closing`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_CLOSING_S = 20.0
_closing: set[threading.Thread] = set()
"""Threads that close what was garbage-collected."""


def close_if_dropped(owner: object, close: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Call `close` in its own thread when `owner` is garbage-collected. It must not refer to `owner`."""
    found = weakref.finalize(owner, _start_closing, close)
    found.atexit = False  # at exit the process ends anyway; closing then would wait for nothing
    return found


def weakly(method: Callable[P, T], otherwise: Callable[[], T]) -> Callable[P, T]:
    """Return a callable that does not keep the method's object alive. Once that is gone, it calls `otherwise`."""
    found = weakref.WeakMethod(method)

    def call(*words: P.args, **named: P.kwargs) -> T:
        bound = found()
        return otherwise() if bound is None else bound(*words, **named)

    return call


def _start_closing(close: Callable[[], None]) -> None:
    def work() -> None:
        try:
            close()
        finally:
            _closing.discard(thread)

    thread = threading.Thread(target=work, name="penstock-closing", daemon=True)
    _closing.add(thread)
    thread.start()


def await_closing() -> None:
    """Wait until collected planes are closed, so that their folders can be opened again."""
    for thread in list(_closing):
        thread.join(_CLOSING_S)

"""A bell another thread can ring: a file descriptor that becomes readable.

After `close` a late ring does nothing. Without the lock it would write to whatever file had been given the number.
"""

from __future__ import annotations

import os
import threading


class Wake:
    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed = False
        self._lock = threading.Lock()

    def call(self) -> None:
        """From any thread."""
        with self._lock:
            if not self.closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make it unreadable again."""
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                os.close(self.descriptor)

"""URLs that the plane signs for workers that write to an object store without credentials.

A worker gets URLs only for its own unsealed segments: to write objects, and to read back one whose answer was lost. It
may also read the marker, which tells whose storage it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.errors import InvalidInput, PenstockError, StorageError
from penstock.plane.engine import Engine
from penstock.plane.recorder import failure_text
from penstock.plane.workers import Workers
from penstock.protocol import MAX_NAME, Admission, Send, SignedUrls, SignFor, SignUrls
from penstock.storage import MARKER, ObjectStorage, segment_in


class UrlSigning:
    """Checks the owner on the loop's thread. Signs on a worker thread, because credentials may have to be fetched."""

    def __init__(self, engine: Engine, workers: Workers, admission: Admission, send: Callable[[Send], None]) -> None:
        self._engine, self._workers, self._admission, self._send = engine, workers, admission, send
        self._seconds = engine.settings.sign_puts_s or 0.0

    def sign(self, effect: SignFor, writer: str) -> None:
        message, storage = effect.message, self._engine.storage
        try:
            if not isinstance(storage, ObjectStorage):
                raise InvalidInput("signed URLs: the frames of this plane are in no object store")
            for name in message.names:
                self._check(message, name, writer)
        except PenstockError as error:
            self._send(self._admission.answer(effect.ticket, error))
            return
        job = partial(storage.sign, message.method, message.names, self._seconds)  # type: ignore[arg-type]
        self._workers.submit("sign", job, partial(self._signed, effect))

    def _check(self, message: SignUrls, name: str, writer: str) -> None:
        """Raise unless this writer may have a URL of this object."""
        if name == MARKER and message.method == "GET":
            return
        segment = segment_in(name)
        if not segment:
            raise InvalidInput(f"signed URLs: {message.method} of {name[:MAX_NAME]!r}; only objects of own segments")
        self._engine.segments.check_writer(segment, writer)

    def _signed(self, effect: SignFor, result: list[str] | Exception) -> None:
        """Send the URLs, or the error. Runs on the loop's thread."""
        if isinstance(result, list):
            self._engine.counts["urls_signed"] += len(result)
            signed = SignedUrls(ticket=effect.ticket[1], urls=tuple(result), seconds=self._seconds)
            self._send(Send(effect.ticket[0], signed))
            return
        error = result if isinstance(result, PenstockError) else StorageError(f"not signed: {failure_text(result)}")
        self._send(self._admission.answer(effect.ticket, error))

"""Every error Penstock raises, in one tree that shows whose fault it is.

    PenstockError
    ├── CallerError                 the caller passed something invalid
    │   ├── InvalidInput            a value: which record, which field, what it was, what it should be (ValueError)
    │   │   └── ConfigError         a setting, or two settings that cannot both hold (ValueError)
    │   ├── MissingExtra            a package that is not installed; names the extra that brings it (ImportError)
    │   ├── UnknownKey              an unknown key or name (KeyError)
    │   ├── Evicted                 a tenant that lost its share of the plane, with the reason (RuntimeError)
    │   └── Conflict                same identity, other content (ValueError)
    ├── PeerError                   the other side sent something invalid, or failed
    │   ├── CorruptFrame            bytes that are truncated, altered, oversized or of an unknown version (ValueError)
    │   ├── StepAborted             one rank or the plane failed, so every rank stops; `.step`, `.rank` (RuntimeError)
    │   ├── Fenced                  this process belongs to a session or run that is over; restart it (RuntimeError)
    │   └── PlaneLost               the plane did not answer in time (ConnectionError)
    ├── StorageError                the disk failed, or returned other bytes than were written (OSError)
    │   ├── DiskFull                no room; nothing was stored, and it may be put again
    │   ├── Away                    storage does not answer now; nothing is known to be lost, and it may be tried again
    │   ├── CorruptFile             a file that is truncated, altered or of an unknown version
    │   └── LogAway                 the log's database cannot be reached, or did not answer in time
    ├── AssetError                  an image or a reference to one cannot be used; `.status` and `.error_type`
    │   ├── ImageRefused            bytes, a data: URI or a file that is no supported image (CallerError, ValueError)
    │   ├── InvalidReference        a reference that breaks the grammar or leads outside (PeerError, ValueError)
    │   ├── IncompatibleAsset       made for another layout, grid or software version (PeerError, ValueError)
    │   ├── MissingAsset            nothing under that id in this run (StorageError)
    │   └── CorruptAsset            stored bytes that do not match their id, or do not decode (CorruptFile)
    ├── PutManyError                some groups of a batch were not accepted; `.results` has each one's error
    └── FlowError                   the data is fine, but cannot move now
        ├── Overloaded              held bytes are at their limit; `.retry_after_s` (RuntimeError)
        ├── Closed                  the table or connection was closed while you waited (RuntimeError)
        └── WaitTimeout             the deadline passed; names what was waited for (TimeoutError)

Each leaf is also the standard error a reader would expect, so `except ValueError` keeps working. Messages have one
form, `where: what was found; how to fix it`, and contain the values. Errors can be pickled by frameworks that send
exceptions between processes, because they hold only their message.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 3
"""Errors of a batch that its message shows."""


class PenstockError(Exception):
    """Base of everything Penstock raises on purpose."""


class CallerError(PenstockError):
    """The caller passed something invalid. Nothing of it was kept."""


class InvalidInput(CallerError, ValueError):
    """A value is wrong. The message names the record, the field, the value and the remedy."""


class ConfigError(InvalidInput):
    """A setting is wrong, or two settings cannot both hold."""


class MissingExtra(CallerError, ImportError):
    """A package is not installed. The message names the extra that provides it."""


class UnknownKey(CallerError, KeyError):
    """An unknown key or name."""

    def __str__(self) -> str:
        # KeyError shows repr(message), in quotes. Show the sentence itself.
        return str(self.args[0]) if self.args else ""


class Evicted(CallerError, RuntimeError):
    """The tenant lost its share of the plane, for the reason given."""


class Conflict(CallerError, ValueError):
    """The same identity arrived with other content."""


class PeerError(PenstockError):
    """The other side sent something invalid, or failed."""


class CorruptFrame(PeerError, ValueError):
    """Bytes that are truncated, altered, larger than allowed or of an unknown version."""


class StepAborted(PeerError, RuntimeError):
    """One rank or the plane failed at a step, so every rank stops there."""

    def __init__(self, message: str, step: int = 0, rank: int = -1) -> None:
        super().__init__(message, step, rank)
        self.step, self.rank = step, rank

    def __str__(self) -> str:
        return str(self.args[0])


class Fenced(PeerError, RuntimeError):
    """This process belongs to a session or run that is over. Restart it."""


class PlaneLost(PeerError, ConnectionError):
    """The plane did not answer in time."""


class StorageError(PenstockError, OSError):
    """The disk failed, or returned other bytes than were written."""


class DiskFull(StorageError):
    """No room for what was put. Nothing of it was stored, and it may be put again."""


class Away(StorageError):
    """Storage does not answer now. The bytes may well be there: try again."""


class CorruptFile(StorageError):
    """A file that is truncated, altered or of an unknown version."""


class LogAway(StorageError):
    """The database of a run's log cannot be reached, did not answer in time, or cannot be read again."""


class AssetError(PenstockError):
    """An image or a reference to one cannot be used. Carries the response of an inference server.

    >>> error = InvalidReference("mmraw: 3 parts; must be 8", error_type="invalid_mm_raw_ref")
    >>> error.status, error.answer()["error_type"]
    (400, 'invalid_mm_raw_ref')
    """

    error_type = "invalid_mm_asset"
    """The machine-readable name a client decides its retry on."""
    missing: tuple[dict[str, str], ...] = ()
    """What the client must send again in full: run_id, modality, mm_hash, fingerprint, and raw_image_id for source
    images."""

    def __init__(self, message: str = "", *, error_type: str = "", missing: tuple[dict[str, str], ...] = ()) -> None:
        super().__init__(message)
        if error_type:
            self.error_type = error_type
        if missing:
            self.missing = missing

    @property
    def status(self) -> int:
        """The HTTP status: 500 if our own storage failed, 400 if the request cannot be served as it is."""
        return 500 if self.error_type.startswith(("missing_", "corrupt_")) else 400

    def answer(self) -> dict[str, object]:
        """Return the body of the response: `{error_type, message, missing}`."""
        return {"error_type": self.error_type, "message": str(self), "missing": list(self.missing)}


class ImageRefused(AssetError, CallerError, ValueError):
    """Bytes that are no supported image: too large, truncated, of another type, or with trailing data."""

    error_type = "invalid_mm_image"


class InvalidReference(AssetError, PeerError, ValueError):
    """A reference that breaks the grammar, or a URL that leads outside the store."""

    error_type = "invalid_mm_raw_ref"


class IncompatibleAsset(AssetError, PeerError, ValueError):
    """Made for another layout, grid or software version than the reader's."""

    error_type = "incompatible_mm_raw_fingerprint"


class MissingAsset(AssetError, StorageError):
    """Nothing is stored under that id in this run."""

    error_type = "missing_mm_raw_image"


class CorruptAsset(AssetError, CorruptFile):
    """Stored bytes that do not match their id, or do not decode."""

    error_type = "corrupt_mm_raw_image"


class PutManyError(PenstockError):
    """Some groups of a batch were not accepted. The others are durable.

    >>> error = PutManyError.of([True, InvalidInput("group 'b': no samples"), False])
    >>> error.results[0], error.results[2], sorted(error.failed)
    (True, False, [1])
    """

    def __init__(self, message: str, results: tuple[bool | PenstockError, ...] = ()) -> None:
        super().__init__(message, results)
        self.results = results
        """Per group, in order: True if it is new and accepted, False if the plane already had it, or its error.

        `PlaneLost` means that there was no answer: the group may be accepted, and putting it again tells. It ends the
        batch: groups after the last one here were not sent."""

    @staticmethod
    def of(results: Sequence[bool | PenstockError]) -> PutManyError:
        failed = [(i, error) for i, error in enumerate(results) if isinstance(error, PenstockError)]
        shown = "; ".join(f"groups[{i}]: {type(error).__name__}: {error}" for i, error in failed[:_SHOWN])
        more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        message = f"put_many: {len(failed)} of {len(results)} groups failed, the others are durable: {shown}{more}"
        return PutManyError(message, tuple(results))

    @property
    def failed(self) -> dict[int, PenstockError]:
        """The errors, by position of the group."""
        return {i: error for i, error in enumerate(self.results) if isinstance(error, PenstockError)}

    def __str__(self) -> str:
        return str(self.args[0])


class FlowError(PenstockError):
    """The data is fine, but cannot move now."""


class Overloaded(FlowError, RuntimeError):
    """Held bytes are at their limit: the trainer is slower than generation."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class Closed(FlowError, RuntimeError):
    """The table or connection was closed, possibly while the caller waited."""


class WaitTimeout(FlowError, TimeoutError):
    """The deadline passed. The message names what was waited for."""


def shown(value: object) -> str:
    """Return a value as an error shows it: its first 60 characters, or an integer's size where Python prints none.

    >>> shown("x" * 100)[:4], shown(-5), shown(10**5000)
    ("'xxx", '-5', 'a number of 16,610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"
    return f"{value!r:.60}"

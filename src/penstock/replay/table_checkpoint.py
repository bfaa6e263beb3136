"""A table on disk: one file, written atomically, with every byte verified when it is read.

    magic | section | section | ... | footer | footer's offset, length, checksum | magic

Sections are the raw bytes of arrays, and of all items end to end. The footer (msgpack) lists each section's offset,
length, dtype, shape and checksum, and carries settings, counters and generator state. Nothing is padded, so a checksum
covers every byte of the file. The file is written beside its final name, synced, and renamed. Items are read back as
views into the memory-mapped file. No pickle: reading runs no code but ours.
"""

from __future__ import annotations

import dataclasses
import io
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.atomic import replacing
from penstock.errors import CorruptFile, InvalidInput, PenstockError, StorageError, UnknownKey
from penstock.replay.batch import Key
from penstock.replay.core import FREE, WIDTH, OnEvict, Store
from penstock.replay.table_settings import LIMITERS, SELECTORS, Settings

MAGIC = b"PSTABLE1"
FORMAT = 1
_TAIL = struct.Struct("<QQQ8s")
_TOGETHER = 32
"""Items that are joined and written with one call. Not more, because joining copies their bytes."""

Dump = Callable[[Any], bytes | bytearray | memoryview]
"""Converts an item to bytes."""
Load = Callable[[memoryview], Any]
"""Converts bytes back to the item. The bytes are a view into the file, valid as long as it is referenced."""

_ODD = (LookupError, ValueError, TypeError, ArithmeticError, SyntaxError, MemoryError, msgspec.MsgspecError)
"""Errors that reading raises for a file whose checksums are valid but that `write` did not write."""
_PARTS = {part.__name__: part for part in (*SELECTORS.values(), *LIMITERS.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A table's state at one moment. It shares only the items themselves with the table."""

    settings: Settings
    counters: dict[str, int]
    policy_version: int
    rng: dict[str, Any]
    keys: list[Key]
    items: list[Any]
    arrays: dict[str, NDArray[Any]]


class Section(msgspec.Struct, frozen=True):
    name: str
    offset: int
    length: int
    checksum: int
    dtype: str
    shape: list[int]


class Footer(msgspec.Struct, frozen=True):
    format: int
    settings: dict[str, Any]
    counters: dict[str, int]
    policy_version: int
    rng: dict[str, bytes | int]
    keys: list[str | int]
    sections: list[Section]


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(Footer)


# -- taking and writing ----------------------------------------------------------------------------------------


def take(store: Store) -> Snapshot:
    """Copy a store's state. Call with the table's lock held."""
    slots = store.slots
    held = np.flatnonzero(slots.handles[: slots.num_used] != FREE)
    arrays = {"rows": slots.table(), "free": np.array(slots.free, dtype=np.int64)}
    arrays |= {f"sampler/{name}": array for name, array in store.sampling.state().items()}
    if store.removing is not None:
        arrays |= {f"remover/{name}": array for name, array in store.removing.state().items()}
    return Snapshot(
        settings=store.settings,
        counters=store.counters.to_dict(),
        policy_version=store.policy_version,
        rng=dict(store.rng.bit_generator.state),
        keys=slots.keys[held].tolist(),
        items=slots.items[held].tolist(),
        arrays=arrays,
    )


def write(path: str | PathLike[str], snapshot: Snapshot, dump: Dump | None) -> None:
    """Write a snapshot so that after a crash the path holds either the old file or the new one."""
    try:
        with replacing(Path(path)) as file:
            _write(file, snapshot, dump)
    except OSError as error:
        raise StorageError(f"{path}: checkpoint not written ({error}); the previous one is untouched") from error


def to_bytes(snapshot: Snapshot, dump: Dump | None) -> bytes:
    """Return what `write` writes, to be stored elsewhere."""
    file = io.BytesIO()
    _write(file, snapshot, dump)
    return file.getvalue()


def _write(file: BinaryIO, snapshot: Snapshot, dump: Dump | None) -> None:
    file.write(MAGIC)
    sections = [_write_array(file, name, array) for name, array in snapshot.arrays.items()]
    items, lengths = _write_items(file, snapshot, dump)
    sections += [items, _write_array(file, "lengths", lengths)]
    footer = Footer(
        format=FORMAT,
        settings=_plain_settings(snapshot.settings),
        counters=snapshot.counters,
        policy_version=snapshot.policy_version,
        rng=_plain_rng(snapshot.rng),
        keys=snapshot.keys,
        sections=sections,
    )
    try:
        data = msgspec.msgpack.encode(footer)
    except OverflowError as error:
        raise InvalidInput(f"checkpoint: a number does not fit 64 bits ({error}); use keys that do") from error
    offset = file.tell()
    file.write(data)
    file.write(_TAIL.pack(offset, len(data), xxhash.xxh3_64_intdigest(data), MAGIC))


def _write_array(file: BinaryIO, name: str, array: NDArray[Any]) -> Section:
    offset = file.tell()
    data = np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b"")
    file.write(data)
    return Section(name, offset, len(data), xxhash.xxh3_64_intdigest(data), array.dtype.str, list(array.shape))


def _write_items(file: BinaryIO, snapshot: Snapshot, dump: Dump | None) -> tuple[Section, NDArray[np.int64]]:
    offset, digest = file.tell(), xxhash.xxh3_64()
    lengths = np.zeros(len(snapshot.items), dtype=np.int64)
    # A few at a time: a plane's snapshot has 50,000 items of 8 bytes, and writing each alone takes most of its time.
    for start in range(0, len(lengths), _TOGETHER):
        some = slice(start, start + _TOGETHER)
        items = snapshot.items[some] if dump is None else map(dump, snapshot.items[some])
        pieces = [_bytes_of(key, item) for key, item in zip(snapshot.keys[some], items, strict=True)]
        lengths[some] = [len(piece) for piece in pieces]
        joined = b"".join(pieces)
        digest.update(joined)
        file.write(joined)
    total = int(lengths.sum())
    return Section("items", offset, total, digest.intdigest(), "|u1", [total]), lengths


def _bytes_of(key: Key, data: Any) -> bytes | memoryview:
    if type(data) is bytes:
        return data
    try:
        view = memoryview(data)
    except TypeError:
        raise InvalidInput(
            f"checkpoint: item {key!r} is a {type(data).__name__}, not bytes; pass dump= to turn items into bytes"
        ) from None
    return view.cast("B") if view.nbytes else memoryview(b"")


def _plain_settings(settings: Settings) -> dict[str, Any]:
    """Return settings as plain values: numbers unchanged, a part as its name and fields."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in ("sampler", "remover", "limiter") and value is not None:
            ours = _PARTS.get(type(value).__name__) is type(value)
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)} if ours else {}
            value = [type(value).__name__, ours, fields]
        plain[field.name] = value
    return plain


def _plain_rng(state: Mapping[str, Any]) -> dict[str, bytes | int]:
    """Convert PCG64's state: its two numbers have 128 bits, more than msgpack's integers."""
    inner = state["state"]
    return {
        "state": int(inner["state"]).to_bytes(16, "little"),
        "inc": int(inner["inc"]).to_bytes(16, "little"),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


# -- reading ---------------------------------------------------------------------------------------------------


def read(path: str | PathLike[str], parts: Mapping[str, Any], load: Load | None, on_evict: OnEvict | None) -> Store:
    """Rebuild the store that a file was written from. Raises CorruptFile if anything differs."""
    try:
        with Path(path).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise StorageError(f"{path}: no checkpoint can be read ({error})") from error
    return _parse(path, data, parts, load, on_evict)


def from_bytes(data: bytes, parts: Mapping[str, Any], load: Load | None, on_evict: OnEvict | None) -> Store:
    """Rebuild the store that `to_bytes` was called on."""
    return _parse("bytes of a table", memoryview(data), parts, load, on_evict)


def _parse(
    path: str | PathLike[str], data: memoryview, parts: Mapping[str, Any], load: Load | None, on_evict: OnEvict | None
) -> Store:
    try:
        footer = _read_footer(path, data)
        arrays = {section.name: _read_section(path, data, section) for section in footer.sections}
        store = Store(_settings(path, footer.settings, parts), on_evict)
        _fill(store, footer, arrays, load)
    except PenstockError:
        raise
    except _ODD as error:
        found = f"{type(error).__name__}: {error!s:.200}"
        raise CorruptFile(f"{path}: sections do not fit together ({found}); use another checkpoint") from error
    return store


def _read_footer(path: str | PathLike[str], data: memoryview) -> Footer:
    if len(data) < len(MAGIC) + _TAIL.size or data[: len(MAGIC)] != MAGIC:
        raise CorruptFile(f"{path}: {len(data)} bytes that do not start as a table does; was it truncated?")
    end = len(data) - _TAIL.size
    offset, length, checksum, magic = _TAIL.unpack(data[end:])
    if magic != MAGIC or offset + length != end:
        raise CorruptFile(f"{path}: the end of the file is missing or altered; use another checkpoint")
    raw = data[offset:end]
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise CorruptFile(f"{path}: footer checksum differs; use another checkpoint")
    footer = _READ.decode(raw)
    if footer.format != FORMAT:
        raise CorruptFile(f"{path}: format {footer.format}, this version reads {FORMAT}; use a matching version")
    return footer


def _read_section(path: str | PathLike[str], data: memoryview, section: Section) -> NDArray[Any]:
    raw = data[section.offset : section.offset + section.length]
    if len(raw) != section.length or xxhash.xxh3_64_intdigest(raw) != section.checksum:
        raise CorruptFile(f"{path}: section {section.name!r} is altered; use another checkpoint")
    return np.frombuffer(raw, dtype=np.dtype(section.dtype)).reshape(section.shape)


def _settings(path: str | PathLike[str], plain: Mapping[str, Any], parts: Mapping[str, Any]) -> Settings:
    values = dict(plain)
    for role, given in parts.items():
        written = values[role]
        if written is None:
            continue
        name, ours, fields = written
        if given is not None and type(given).__name__ != name:
            raise InvalidInput(f"restore: {role} {given!r}, but {path} was written with {name}; pass a {name}")
        if given is None and not ours:
            raise UnknownKey(f"restore: {path} was written with the {role} {name}; pass {role}={name}(...)")
        values[role] = _PARTS[name](**fields) if given is None else given
    return Settings(**values)


def _fill(store: Store, footer: Footer, arrays: Mapping[str, NDArray[Any]], load: Load | None) -> None:
    rows = arrays["rows"].reshape(-1, 1 + WIDTH)
    items = _items(arrays["items"], arrays["lengths"], load)
    store.slots.restore(rows, arrays["free"].tolist(), footer.keys, items)
    store.counters.restore(footer.counters)
    store.advance(footer.policy_version)
    store.rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {name: int.from_bytes(footer.rng[name], "little") for name in ("state", "inc")},  # type: ignore[arg-type]
        "has_uint32": footer.rng["has_uint32"],
        "uinteger": footer.rng["uinteger"],
    }
    for role, index in (("sampler", store.sampling), ("remover", store.removing)):
        prefix = f"{role}/"
        if index is not None:
            index.restore({n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)})


def _items(data: NDArray[Any], lengths: NDArray[Any], load: Load | None) -> Sequence[Any]:
    view = data.data.cast("B") if data.size else memoryview(b"")
    ends = lengths.cumsum().tolist()
    pieces = [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return pieces if load is None else [load(piece) for piece in pieces]

"""Settings of earlier starts, which the log remembers: check that today's settings fit, log what changed.

Also here: what else a restart finds out, such as damage to the log and ranks that left the session.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import msgspec

from penstock.config import toml_values
from penstock.errors import ConfigError, CorruptFile, PenstockError
from penstock.frames import GroupMetadata
from penstock.log import Log, Lose, Record, Shorten, State
from penstock.plane.intake import NONE, OverLength, is_dropped, metadata_for
from penstock.plane.settings import PlaneSettings
from penstock.storage import Storage, address_of

if TYPE_CHECKING:
    from penstock.plane.recorder import Recorder

logger = logging.getLogger("penstock.plane")
SETTINGS = "settings "
"""Prefix of the log's names for settings. The number of the first decision made with them follows."""


def check_settings(settings: PlaneSettings, log: Log) -> None:
    """Reject settings that do not fit what is held or planned, with both values. Remember the others."""
    replay, began = repr(settings.replay), log.text("replay")
    if began and began != replay and log.has_steps():
        raise ConfigError(
            f"replay settings: the run began with {began}, now {replay}; a run's draws follow from them: open it with "
            "the same sampler, remover, limiter, capacity, max_times_sampled, max_staleness and seed"
        )
    if began and began != replay and settings.replay.remover is None:
        _check_capacity(settings.replay.capacity, log)
    tables_by = "env" if settings.env_weights else ""
    if log.last_op and log.text("tables_by") != tables_by:
        now = f"env_weights is {settings.env_weights or 'empty'}"
        raise ConfigError(
            f"{now}, and the run began {'without it' if tables_by else 'with some'}; its groups wait in other tables: "
            "open it as it began (weights may change), or begin a new folder"
        )
    _log_changes(settings, log)
    values: dict[str, int | str] = {
        "replay": replay,
        "storage": _storage(settings),
        "tables_by": tables_by,
    }
    _remember(log, values, as_toml(settings))


def _remember(log: Log, values: dict[str, int | str], settings: str) -> None:
    """Record what changed. Settings are stored with the number of the next decision, for `penstock rerun`."""
    changed = {name: value for name, value in values.items() if log.text(name) != str(value)}
    known = log.texts(SETTINGS)
    if not known or known[max(known)] != settings:
        changed[f"{SETTINGS}{log.last_op + 1:020}"] = settings
    if changed:
        with log.transaction():
            for name, value in changed.items():
                log.set_meta(name, value)


def _storage(settings: PlaneSettings) -> str:
    """Return where readers of the run's folder find its frames, or "" if in that folder."""
    return "" if settings.storage is None else address_of(settings.storage)


def as_toml(settings: PlaneSettings) -> str:
    """Return every setting of the plane as TOML without comments.

    Settings of the server process are left out, and so is the log's address: a rerun must not write there."""
    plane = PlaneSettings(**{one.name: getattr(settings, one.name) for one in fields(PlaneSettings)} | {"log": None})
    return toml_values(plane)


def keeps_all(settings: PlaneSettings, log: Log) -> bool:
    """Return whether the run frees nothing. The log remembers it: a later start without `retain="all"` keeps to it."""
    known = log.text("retain") == "all"
    if settings.retain == "all" and not known:
        with log.transaction():
            log.set_meta("retain", "all")
    elif settings.retain != "all" and known:
        logger.warning(
            '%s: this run keeps everything (retain="all") since an earlier start and continues to; '
            "`penstock storage forget` ends it",
            log.where,
        )
    return known or settings.retain == "all"


def _log_changes(settings: PlaneSettings, log: Log) -> None:
    """Log settings that changed since the last start and affect training, with both values."""
    now = {"run": settings.run, "seq_len": str(settings.packing.seq_len), "step": str(settings.target)}
    text = log.text("opened")
    before = msgspec.json.decode(text, type=dict[str, str]) if text else {}
    for name, value in now.items():
        if before.get(name, value) != value:
            logger.warning("%s: %s: was %s, is now %s", log.where, name, before[name], value)
    if now != before:
        with log.transaction():
            log.set_meta("opened", msgspec.json.encode(now).decode())


def _check_capacity(capacity: int, log: Log) -> None:
    held = max(Counter(row.run for row in log.groups_in(State.HELD)).values(), default=0)
    if held > capacity:
        raise ConfigError(f"capacity: {capacity}, but {held} groups are held; raise it")


@contextmanager
def damage_named(log: Log) -> Iterator[None]:
    """Turn any error that a damaged log provokes into CorruptFile with the log's location."""
    try:
        yield
    except PenstockError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, AssertionError) as error:
        where = log.where
        raise CorruptFile(
            f"{where}: the log cannot be read: {type(error).__name__}: {error}; restore the folder from a copy"
        ) from error


def members_left(settings: PlaneSettings, log: Log) -> dict[tuple[int, int], int]:
    """Return the members that left the session before this plane started, each with its last committed step."""
    session, found = log.meta("session", 0), {}
    for rank in range(settings.packing.ranks):
        for replica in range(settings.replicas):
            step = log.meta(left_name(session, rank, replica), -1)
            if step >= 0:
                found[rank, replica] = step
    return found


def left_name(session: int, rank: int, replica: int) -> str:
    return f"left {session} {rank} {replica}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a smaller `seq_len` takes from a group that waits for training."""

    op: int
    now: OverLength
    """In all."""
    further: OverLength
    """Beyond what it lost before."""
    is_dropped: bool
    """No sample is left."""


def note_seq_len(settings: PlaneSettings, recorder: Recorder, storage: Storage) -> None:
    """Count and log what a smaller `seq_len` than before cuts off groups that wait for training.

    They were accepted with the larger one, so they are truncated, or dropped if `over_length` says so; never
    rejected. Steps that are planned and not trained are planned again with what is left."""
    log, seq_len = recorder.log, settings.packing.seq_len
    before = log.meta("seq_len", seq_len)
    is_smaller, counted = seq_len < before, _counted_cuts(log)
    cuts = [*_further_cuts(settings, recorder, storage, counted)] if is_smaller else []
    records = _records_of(cuts, seq_len)
    op = recorder.state.op + 1
    if before != seq_len or not log.text("seq_len"):
        with recorder.transaction():
            log.set_meta("seq_len", seq_len)
            if is_smaller:
                kept = [(at, length) for at, length in counted if length < seq_len]
                log.set_meta(_CUTS, msgspec.json.encode([*kept, (op, seq_len)]).decode())
            for number, record in enumerate(records, start=op):
                log.add_record(number, record)
    for number, record in enumerate(records, start=op):
        recorder.state.redo(number, record)
    if further := OverLength.total(cut.further for cut in cuts) if cuts else NONE:
        recorder.counts.update(asdict(further))
        in_all = OverLength.total(cut.now for cut in cuts)
        empty = sum(cut.is_dropped for cut in cuts)
        left = f"; {empty} group{' is' if empty == 1 else 's are'} left empty and dropped" if empty else ""
        logger.warning("seq_len: now %d, before %d: of the waiting groups, %s%s", seq_len, before, in_all, left)


def _records_of(cuts: Sequence[_Cut], seq_len: int) -> list[Record]:
    """Return the decisions that count the cuts, and that drop groups left empty by them."""
    found = OverLength.total(cut.further for cut in cuts) if cuts else NONE
    records: list[Record] = [Shorten(**asdict(found))] if found else []
    if dropped := {cut.op: f"every sample is longer than seq_len {seq_len}" for cut in cuts if cut.is_dropped}:
        records.append(Lose(groups=dropped, reason="over_length"))
    return records


_CUTS = "seq_len cuts"
_READ_CUTS = msgspec.json.Decoder(list[tuple[int, int]])


def _counted_cuts(log: Log) -> list[tuple[int, int]]:
    """Return (op, seq_len) of earlier starts with a smaller `seq_len`: of groups before op, the cut to it is counted.

    A later cut to the same length or less takes the place of earlier ones, so lengths ascend:

        64 -> 32 at op 10, -> 16 at op 20         [(20, 16)]
        then 64 again, and -> 32 at op 30         [(20, 16), (30, 32)]    a group of op 15 has lost all beyond 16
    """
    try:
        return _READ_CUTS.decode(log.text(_CUTS) or "[]")
    except msgspec.MsgspecError as error:
        raise CorruptFile(f"{log.where}: {_CUTS}: {error}; restore it from a copy") from None


def _further_cuts(
    settings: PlaneSettings, recorder: Recorder, storage: Storage, counted: list[tuple[int, int]]
) -> Iterator[_Cut]:
    """Yield what each waiting group loses that is cut further than before."""
    state, seq_len = recorder.state, settings.packing.seq_len
    waiting = {row.op: row for row in map(state.row_of, recorder.tenant_tables)}
    waiting |= {op: state.rows[op] for op in state.late.waiting}
    planned = {op for step, found in state.steps.items() if step >= state.next_step for op in found.groups}
    drawn = {op: state.rows[op] for op in planned - waiting.keys() if op in state.rows}
    for row in [*waiting.values(), *drawn.values()]:
        data = recorder.log.metadata(row.op)
        if data is None:
            continue
        metadata = GroupMetadata.from_bytes(data)
        before = min((length for op, length in counted if row.op < op), default=metadata.seq_len)
        if before > seq_len and not metadata.fits(seq_len):
            # A damaged frame is found when a step is planned with it; its group is quarantined then.
            with suppress(PenstockError):
                frame = storage.read(row.location)[0]
                lost = metadata
                if before < metadata.seq_len:
                    lost = metadata_for(settings, metadata, frame, seq_len=before)
                made = metadata_for(settings, metadata, frame)
                now = OverLength.of(made)
                # A planned step keeps its groups, also those that have nothing to train.
                is_empty = row.op in waiting and is_dropped(settings, made)
                yield _Cut(row.op, now, now.since(OverLength.of(lost)), is_empty)

"""Memory made anew from the log: do again, in order, what it says was done since memory was last written down."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from penstock.errors import ConfigError, CorruptFile, WaitTimeout
from penstock.frames import EvalMetadata
from penstock.log import Log, State
from penstock.plane.evaluations import Evaluations
from penstock.plane.manifest import read_manifest
from penstock.plane.settings import Replay
from penstock.plane.snapshot import Saved
from penstock.plane.state import PlaneState


def rebuild(log: Log, replay: Replay, *, retain_steps: int, keeps_all: bool = False) -> PlaneState:
    """Do again, in order, what the log says was done since memory was last written down."""
    state = PlaneState(replay, retain_steps=retain_steps, keeps_all=keeps_all)
    found = log.snapshot()
    saved = None if found is None else Saved.from_bytes(found[1], repr(replay))
    try:
        rows = {} if saved is None else state.load(saved, log)
    except CorruptFile:  # tables in a form of another version
        state, rows = PlaneState(replay, retain_steps=retain_steps, keeps_all=keeps_all), {}
    since, recorded = state.op, list(log.steps(first=state.oldest_step))
    records = dict(log.records(after=since))
    steps = {op: (step, manifest, at) for step, op, manifest, at in recorded if op > since}
    rows |= {row.op: row for row in log.groups(after=since)}
    for op in sorted([*(op for op in rows if op > since), *records, *steps]):
        if op in rows and rows[op].state is State.EVALUATION:
            state.take_evaluation(rows[op], None)
        elif op in rows:
            state.take_in(replace(rows[op], state=State.HELD, reason=""))
        elif op in records:
            state.redo(op, records[op])
        else:
            _draw_again(state, op, *steps[op])
    evaluated = log.groups_in(State.EVALUATION)
    metadata = log.metadata_of([row.op for row in evaluated])
    state.evaluations = Evaluations((row, _eval_metadata(metadata.get(row.op))) for row in evaluated)
    state.begin_at(log.meta("next_step", 1))
    state.retire(log.meta("oldest_step", 1))
    # A run that keeps everything frees nothing, so what it holds need not be read: that grows with the run.
    frames = set() if keeps_all else log.with_frames()
    state.keep_differences(rows.values(), {step: at for step, _, _, at in recorded}, frames)
    _free_left(state, log, frames)
    return state


def _free_left(state: PlaneState, log: Log, frames: set[int]) -> None:
    """Free frames of groups that have ended: of a run that kept everything until `penstock storage forget`."""
    known = state.freeing.ops
    for row in log.groups_of(sorted(frames.difference(state.rows, state.quarantined, state.evaluations.ops, known))):
        state.freeing.add(row)


def _eval_metadata(data: bytes | None) -> EvalMetadata | None:
    return None if data is None else EvalMetadata.from_bytes(data)


def _draw_again(state: PlaneState, op: int, step: int, data: bytes, recorded: State) -> None:
    manifest = read_manifest(data)
    try:
        counts = Counter(state.rows[group].run for group in manifest.groups)
        drawn = state.draw(op, step, counts, one_by_one=manifest.one_by_one).groups
    except (WaitTimeout, KeyError):
        drawn = ()
    if drawn != manifest.groups:
        raise ConfigError(
            f"step {step}: drawing again gives other groups than were recorded; the replay settings (sampler, "
            "seed, capacity, max_times_sampled, max_staleness) are not those the run began with"
        )
    state.planned(step, manifest)
    state.set_step(step, recorded)

"""Export what the trainer did with every token, off the training thread.

The training thread copies a micro-batch and its terms to the host and puts them into a bounded queue. A writer thread
cuts them into records, writes and syncs them. `write` blocks while the queue is full; nothing is dropped silently.
Errors of the writer are raised by the next call.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsFloat

from penstock.errors import Closed, ConfigError, InvalidInput, PenstockError, StorageError, WaitTimeout
from penstock.extras import require
from penstock.packing import MicroBatch, Totals
from penstock.view.batch_records import BatchCopy
from penstock.view.folders import Done, PackedBatch, RankLock, all_done, make_folder, promote, reopen, step_folder
from penstock.view.jsonl import Jsonl
from penstock.view.record import COLUMNS, finite, place_fields
from penstock.view.step_files import Everything, Format, Keep, StepFile

if TYPE_CHECKING:
    from penstock.train import Terms


class NumberedStep(Protocol):
    """A step as a source returns it."""

    @property
    def number(self) -> int: ...
    @property
    def totals(self) -> Totals: ...


_OPTIONAL = tuple(name for name in COLUMNS if name not in ("token_ids", "loss_mask"))
_Key = tuple[str, int]
"""A run and the number of its step."""


class TokenExporter:
    """Writes one record per trained sequence, one file per step and rank.

    Call `write` for every micro-batch with the terms its loss returned, and `close_step` after the optimizer step.
    Readers see the step once all `world` ranks have closed it.

    >>> import tempfile, torch
    >>> from penstock import Sample, pack, to_torch
    >>> from penstock.train.loss import Sft
    >>> batch = pack([Sample(id="a", token_ids=[4, 5, 6], loss_mask=[0, 1, 1])], ranks=1, seq_len=8).ranks[0][0]
    >>> terms = Sft()(to_torch(batch), torch.tensor([0.0, -0.5, -1.5]))
    >>> folder = tempfile.mkdtemp()
    >>> with TokenExporter(folder) as exporter:
    ...     exporter.write(1, batch, terms)
    ...     exporter.close_step(1)
    >>> from penstock.view import Export
    >>> [record.fields["sample_id"] for record in Export(folder).step(1).records()]
    ['a']
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int = 0,
        world: int = 1,
        every: int = 1,
        keep: Keep | None = None,
        omit: Collection[str] = (),
        max_bytes: int | None = 4 << 30,
        queue_batches: int = 8,
        file_format: Format = Jsonl,
        attempt: str = "",
        barrier: Callable[[], None] | None = None,
    ) -> None:
        """Export into `folder` as global rank `rank` of `world`. With context parallelism, one rank of each group.

        `every` exports only steps whose number it divides; `keep` chooses records within a step; `omit` names columns
        that are left out (routed experts are hundreds of numbers per token); `max_bytes` limits the file of one step,
        and records left out are counted. `attempt` names this start of the run, the same on all ranks. Without it, a
        step may briefly be shown with old files of other ranks right after a restart, until these ranks begin it
        again. `barrier` makes `close_step` wait for all ranks instead.
        """
        if not isinstance(folder, str | Path):
            raise ConfigError(f"TokenExporter: {folder!r:.60}; give the folder of the run")
        if not 0 <= rank < world or every < 1 or queue_batches < 1:
            raise ConfigError(
                f"rank {rank} of world {world}, every {every}, queue_batches {queue_batches}: "
                "rank must be below world, the others at least 1"
            )
        unknown = set(omit) - set(_OPTIONAL)
        if unknown:
            raise ConfigError(f"omit: {', '.join(sorted(unknown))}; a record can do without {', '.join(_OPTIONAL)}")
        require("token export", file_format.needs)  # now, and not after the first step
        self.folder = Path(folder)
        self.rank, self.world, self.every = rank, world, every
        self._keep, self._format, self._max_bytes = keep or Everything(), file_format, max_bytes
        self._omit = frozenset(omit)
        self._attempt, self._barrier = attempt, barrier
        self._micro_steps: dict[int, int] = {}
        self._begun: dict[_Key, float | None] = {}
        """Open steps, and when the trainer step before each one ended."""
        self._closed_steps: set[_Key] = set()
        self._dummies: list[tuple[str, PackedBatch]] = []
        """Dummies since the last closed step, with their run or ""."""
        self._last_close: tuple[int, float] | None = None
        """The last closed trainer step, exported or not, and when."""
        self._error: BaseException | None = None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(queue_batches)
        """What the writer thread is to do; None ends it."""
        self._files: dict[_Key, StepFile] = {}
        """Open files. Only the writer thread uses them."""
        make_folder(self.folder)
        self._lock = RankLock(self.folder, rank)
        self._thread = threading.Thread(target=self._work, name=f"token-export-{rank}", daemon=True)
        self._thread.start()

    def write(
        self,
        step: NumberedStep | int,
        batch: MicroBatch,
        terms: Terms | None,
        *,
        policy_version: int | None = None,
        run_step: int | None = None,
    ) -> None:
        """Export one micro-batch. Call it for dummies too, so that micro-batches have the same numbers on all ranks.

        `terms` is None for samples that no loss has seen. Those without a trained token are exported too, then.

        `policy_version` is the version being trained, from which each sample's staleness follows. `run_step` is the
        step of the batch's run if that is counted separately from the trainer's.
        """
        number = _number_of(step, "write")
        if number % self.every:
            return
        self._check()
        _check_parts(batch, terms)
        micro_step = self._micro_steps.get(number, 0)
        self._micro_steps[number] = micro_step + 1
        packed = _describe(batch, number, micro_step)
        key = (batch.run, number if run_step is None else run_step)
        # A dummy has no record and may not know its run: it reopens an existing step but creates none.
        if not batch.is_dummy or step_folder(self.folder, *key).is_dir():
            self._begin(key, number)
        if batch.is_dummy:
            self._dummies.append((batch.run, packed))
            return
        fields = place_fields(number, export_step=key[1], rank=self.rank, micro_step=micro_step)
        # Passed by value: a closure over `terms` would keep tensors of the device alive while they wait in the queue.
        copy = BatchCopy.of(batch, terms, omit=self._omit)
        self._queue.put(partial(self._add, key, packed, copy, fields, policy_version, terms is None))

    def close_step(
        self,
        step: NumberedStep | int,
        *,
        runs: Mapping[str, int] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> None:
        """Declare that this rank has written all of the step. Does not wait for the disk unless there is a barrier.

        `runs` maps runs whose own step is complete to its number. By default that is every run of the step, with the
        trainer's number. `metrics` are stored with the step and drawn by the viewer, null if not finite. Call this for
        every step, exported or not: tokens per second are measured from one call to the next.
        """
        number = _number_of(step, "close_step")
        if number % self.every:
            self._last_close = (number, time.monotonic())
            return
        self._check()
        kept = _numbers(metrics or {})
        if runs is None:
            named = {run for run, at in self._begun if at == number}
            named |= set() if isinstance(step, int) else set(step.totals.tenants)
            runs = dict.fromkeys(sorted(named) or [""], number)
        now = time.monotonic()
        self._micro_steps.pop(number, None)
        for key in runs.items():
            self._begin(key, number)  # a rank without a sequence of this run still writes its marker
            before = self._begun.pop(key)
            self._closed_steps.add(key)
            seconds = None if before is None else now - before
            # A dummy without a run belongs to the only run. With several, its owner is unknown and it is not counted.
            dummies = [packed for run, packed in self._dummies if run == key[0] or (not run and len(runs) == 1)]
            self._queue.put(partial(self._finish, key, number, seconds, kept, dummies))
        if runs:
            self._dummies = []
        self._last_close = (number, now)
        if self._barrier is not None:
            self.flush()
            self._barrier()
            for run, at in runs.items():
                self._promote(step_folder(self.folder, run, at))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything passed so far is written. Closed steps are then on disk."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeout(
                        f"token export: {self._queue.unfinished_tasks} items not written in {timeout:g} s"
                    )
                self._queue.all_tasks_done.wait(left)
        self._check()

    def close(self) -> None:
        """Write what is queued and stop. Steps that were not closed stay invisible."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._lock.release()
        error, self._error = self._error, self._error or Closed("this exporter was closed")
        if error is not None and not isinstance(error, Closed):
            raise _as_ours(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise _as_ours(self._error)

    def _begin(self, key: _Key, number: int) -> None:
        """Remove the markers of an earlier attempt before a step's first record.

        Done here, not in the writer thread: once any rank is past its optimizer step, every rank has removed its own.
        """
        if key in self._begun:
            return
        if key in self._closed_steps:
            raise InvalidInput(f"token export: step {key[1]} of run {key[0]!r} was closed; write before close_step")
        reopen(step_folder(self.folder, *key), self.rank)
        last = self._last_close
        self._begun[key] = last[1] if last is not None and last[0] == number - 1 else None

    # ------------------------------------------------------------ the writer thread

    def _work(self) -> None:
        while True:
            act = self._queue.get()
            try:
                if act is None:
                    break
                if self._error is None:  # after an error the queue is only drained: `write` and `flush` must not block
                    act()
            except BaseException as error:  # noqa: BLE001 - raised on the training thread by the next call
                self._error = error
            finally:
                self._queue.task_done()
        for file in self._files.values():
            file.abandon()

    def _add(
        self,
        key: _Key,
        packed: PackedBatch,
        copy: BatchCopy,
        fields: dict[str, Any],
        policy_version: int | None,
        untrained: bool,
    ) -> None:
        """Write the records of a micro-batch; with `untrained`, also those without a trained token."""
        file = self._file(key, fields["step"])
        file.micro_batches.append(packed)
        file.add(copy.records(fields, policy_version, untrained=untrained))

    def _finish(
        self,
        key: _Key,
        step: int,
        seconds: float | None,
        metrics: dict[str, float | None],
        dummies: list[PackedBatch],
    ) -> None:
        """Finish the file of a step, and promote the step if all ranks have finished theirs."""
        file = self._file(key, step)
        del self._files[key]
        file.micro_batches = sorted((*file.micro_batches, *dummies), key=lambda one: (one.step, one.micro_step))
        file.finish(Done(rank=self.rank, world=self.world, attempt=self._attempt, seconds=seconds, metrics=metrics))
        if self._barrier is None:
            self._promote(file.folder)

    def _file(self, key: _Key, step: int) -> StepFile:
        if key not in self._files:
            self._files[key] = StepFile(
                folder=step_folder(self.folder, *key),
                rank=self.rank,
                format=self._format,
                choice=self._keep.start(),
                max_bytes=self._max_bytes,
            )
            self._files[key].open(step)
        return self._files[key]

    def _promote(self, folder: Path) -> None:
        if all_done(folder, self._attempt, self.world):
            promote(folder)


def _number_of(step: NumberedStep | int, what: str) -> int:
    number = step if isinstance(step, int) else getattr(step, "number", None)
    if not isinstance(number, int):
        raise InvalidInput(f"{what}: {type(step).__name__} {str(step)[:40]!r}; pass the step, or its number")
    return number


def _check_parts(batch: object, terms: object) -> None:
    if not isinstance(batch, MicroBatch) or not (terms is None or hasattr(terms, "loss")):
        wrong = f"{type(batch).__name__}, {type(terms).__name__}"
        raise InvalidInput(f"write({wrong}); pass a micro-batch of the step and the Terms that the loss returned")


def _describe(batch: MicroBatch, step: int, micro_step: int) -> PackedBatch:
    return PackedBatch(
        step=step,
        micro_step=micro_step,
        tokens=batch.num_tokens,
        padding=batch.padding,
        samples=batch.segments.lengths.tolist(),
        modality=batch.modality,
        is_dummy=batch.is_dummy,
    )


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Convert metrics to plain numbers, also from numpy and torch. None for NaN and infinity."""
    if not isinstance(metrics, Mapping):
        raise InvalidInput(f"metrics: a {type(metrics).__name__}; give a mapping of names to numbers")
    out: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            out[str(name)] = finite(float(value))
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"metrics[{name!r}]: {value!r:.80}; give a number") from None
    return out


def _as_ours(error: BaseException) -> BaseException:
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"token export: {error}; free the disk or export elsewhere")
    return error


@dataclass(frozen=True, slots=True)
class NoExport:
    """An exporter that does nothing, for training loops with export switched off."""

    folder: None = field(default=None, init=False)

    def write(self, *_args: object, **_options: object) -> None: ...
    def close_step(self, *_args: object, **_options: object) -> None: ...
    def flush(self, timeout: float | None = None) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

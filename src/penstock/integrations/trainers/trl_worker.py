"""`PlaneRolloutWorker`: train with TRL's `AsyncGRPOTrainer` from a plane, by two constructor arguments.

    worker = PlaneRolloutWorker("tcp://host:7440")
    trainer = AsyncGRPOTrainer(..., rollout_worker=worker, callbacks=[worker.position])

TRL takes samples one by one from a queue, packs them itself and reports nothing about them. So the worker keeps track:
which samples were handed over, in which order, and how many of them each optimizer step has trained.

    plane      step 7: a b c d        step 8: e f g h
    queue      a b c d e f g h                              in order, so the trained samples are a prefix of it
    TRL        [a b c] [d e f] ...                          three samples to an optimizer step
    checkpoint after [d e f]: step 7 is done, and 2 of step 8

A step of the plane is committed when all its samples are trained. The checkpoint holds the position, so a resumed run
begins with g. With `token_budget=0` TRL takes a fixed number of samples per optimizer step, and the position is exact.
With a token budget TRL does not report how many it took. The position is then what was handed over two optimizer steps
before, which is certainly trained, and a resumed run trains up to two steps of samples again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import numpy as np
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ImportError as error:
    from penstock.errors import MissingExtra
    from penstock.extras import install

    raise MissingExtra(f"PlaneRolloutWorker: needs {error.name or error}; {install('trl')}") from None

from penstock.arrays import Sample
from penstock.client import Plane, Source, Step, connect
from penstock.errors import ConfigError, InvalidInput, PenstockError, WaitTimeout
from penstock.integrations.trainers.trl_samples import rollout_fields
from penstock.protocol import Timeouts

CANNOT_CARRY = ("sampling_mask", "routed_experts", "rl_weights", "ce_weights", "ref_kl_weights", "teacher_logprobs")
"""Columns that change the training and that TRL's samples cannot hold."""
_LAG = 2
"""Optimizer steps after which all samples that TRL had fetched are trained: it reads one micro-batch and one sample
ahead."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A sample in the queue, and its position in the plane's steps."""

    step: int
    index: int
    """In its step, from 0."""
    is_last: bool
    sample: RolloutSample | None
    """None if the sample has nothing to train."""


class PlanePosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Reports TRL's progress to the worker, and stores the worker's position in the checkpoint."""

    def __init__(self, worker: PlaneRolloutWorker) -> None:
        self.worker = worker

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise ConfigError(
                f"checkpoint of step {state.global_step}: has no position at a plane, because it was written without "
                "worker.position; load its weights as the model instead of resuming"
            )
        self.worker.prepare(args, saved["attributes"])

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.worker.on_step_end(syncs=state.global_step % args.weight_sync_steps == 0)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": self.worker.progress.as_dict()}


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """The last step of the plane whose samples are all trained."""
    samples: int = 0
    """Trained samples of the step after it."""
    version: int = 0
    """Version of the weights."""

    def as_dict(self) -> dict[str, int]:
        return {"step": self.step, "samples": self.samples, "version": self.version}

    def passed(self, handed: Handed) -> bool:
        """Move past a sample. Returns whether its step is complete."""
        self.step, self.samples = (handed.step, 0) if handed.is_last else (handed.step - 1, handed.index + 1)
        return handed.is_last


class Buffer(queue.Queue[Handed]):
    """The queue that TRL takes samples from. Records what it takes."""

    def __init__(self, worker: PlaneRolloutWorker, size: int) -> None:
        super().__init__(size)
        self._worker = worker

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Return the next sample to train. Raises `queue.Empty` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            self._worker.raise_error()
            found = self._worker.taken(super().get(block, left))
            if found is not None:
                return found


class PlaneRolloutWorker:
    """Hands a plane's samples to `AsyncGRPOTrainer(rollout_worker=...)`; pass `worker.position` in `callbacks` too.

    `plane` is an address, or a `Plane` opened with `ranks=1`: TRL packs and distributes over its ranks itself. Columns
    that TRL cannot carry are rejected unless `drop` names them. The queue holds `size` samples.
    """

    def __init__(
        self,
        plane: str | Plane,
        *,
        run: str = "",
        keys: str | Path | None = None,
        timeouts: Timeouts | None = None,
        drop: Collection[str] = (),
        size: int = 256,
    ) -> None:
        self.rollout_buffer = Buffer(self, size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.position = PlanePosition(self)
        self.progress = Progress()
        self._plane, self._drop = plane, frozenset(drop)
        self._connection: dict[str, Any] = {"run": run, "keys": keys, "timeouts": timeouts}
        self._source: Source | None = None
        self._args: Any = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._handed: deque[tuple[Handed, bool]] = deque()
        """Samples taken by TRL and not known to be trained, each with whether it was handed out or dropped."""
        self._given = 0
        self._marks: deque[int] = deque()
        """Samples handed out before each of the last few optimizer steps, which may not be trained yet."""
        self._complete: list[int] = []
        """Trained steps that are not committed yet."""
        self._model_version = self._first_version = 0
        self._groups = 0
        self._alive_at = time.monotonic()

    # -------------------------------------------------------------- called by TRL

    def start(self) -> None:
        """Start from the checkpoint's position."""
        if self._args is None:
            raise ConfigError(
                "PlaneRolloutWorker: does not learn what was trained; pass callbacks=[worker.position] to the trainer"
            )
        first = self.progress.step + 1
        if isinstance(self._plane, Plane):
            self._source = self._plane.source(0, world=1, resume_step=first)
        else:
            self._source = connect(self._plane, rank=0, world=1, resume_step=first, **self._connection)
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(self._source,), name="penstock-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._source is not None:
            if self._error is None:
                with suppress(PenstockError):  # unconfirmed steps are served again
                    self._source.flush()
            self._source.close()
        if self._thread is not None:
            self._thread.join(10)

    def update_model_version(self, model_version: int) -> None:
        """Record the version of weights that TRL has sent out. TRL counts from 1 in every process."""
        self._model_version = model_version
        self.progress.version = self._first_version + model_version - 1
        self._commit()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the worker failed or is stuck. TRL calls this while it waits."""
        self.raise_error()
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s and self._source is not None:
            raise WaitTimeout(
                f"no samples for {silent:.0f} s (heartbeat_stale_after_s); waited for: {self._source.waiting_for}"
            )

    # -------------------------------------------------------------- called by the callback and the queue

    def prepare(self, args: Any, saved: dict[str, int]) -> None:
        """Begin training at a checkpoint's position."""
        self._args, self.progress = args, Progress(**saved)
        self._first_version = self.progress.version

    def taken(self, handed: Handed) -> RolloutSample | None:
        """Record that TRL takes a sample. Returns it, or None if it has nothing to train or is too stale."""
        sample = handed.sample
        if sample is not None and self._model_version - sample.model_version > self._args.max_staleness:
            self.metrics_queue.put({"sample/dropped_stale_total": 1.0})  # as TRL would, but here it is recorded
            sample = None
        self._handed.append((handed, sample is not None))
        self._given += sample is not None
        return sample

    def on_step_end(self, *, syncs: bool) -> None:
        """Record that an optimizer step is done. With `syncs`, weights are sent out next."""
        if self._source is None:
            return  # TRL uses only the worker of its main process
        self._pass_by(self._trained())
        if not syncs:
            self.progress.version = self._first_version + self._model_version  # of the next weights to be sent out
            self._commit()

    def _trained(self) -> int:
        """Return the number of samples trained since the last call."""
        args = self._args
        if args.token_budget is not None and args.token_budget <= 0:
            return int(args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps)
        self._marks.append(self._given)
        self._given = 0
        return self._marks.popleft() if len(self._marks) > _LAG else 0

    def _pass_by(self, count: int) -> None:
        """Move past `count` trained samples, and past the dropped ones among them."""
        while self._handed and (count or not self._handed[0][1]):
            handed, given = self._handed.popleft()
            count -= given
            if self.progress.passed(handed):
                self._complete.append(handed.step)

    def _commit(self) -> None:
        for number in self._complete:
            assert self._source is not None
            self._source.commit(number, policy_version=self._first_version + self._model_version - 1)
        self._complete = []

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -------------------------------------------------------------- in the worker's thread

    def _work(self, source: Source) -> None:
        skip = self.progress.samples
        try:
            for step in source.steps():
                for handed in self._samples(step)[skip:]:
                    self._offer(handed)
                skip = 0
        except PenstockError as error:
            if not self._stopping.is_set():
                self._error = error
        except BaseException as error:
            self._error = error
            raise

    def _samples(self, step: Step) -> list[Handed]:
        samples = list(step.samples())
        groups = {name: self._groups + i for i, name in enumerate(dict.fromkeys(sample.group for sample in samples))}
        self._groups += len(groups)
        return [
            Handed(
                step=step.number,
                index=index,
                is_last=index == len(samples) - 1,
                sample=self._rollout(sample, groups[sample.group]) if sample.loss_tokens else None,
            )
            for index, sample in enumerate(samples)
        ]

    def _offer(self, handed: Handed) -> None:
        while not self._stopping.is_set():
            with suppress(queue.Full):
                self.rollout_buffer.put(handed, timeout=_LOOK_S)
                self._alive_at = time.monotonic()
                return

    def _rollout(self, sample: Sample, group: int) -> RolloutSample:
        """Convert a sample for TRL: one advantage, the same temperature for all samples, no weights."""
        check_carried(sample, temperature=self._args.temperature, drop=self._drop)
        version = self._model_version
        if sample.policy_version is not None:
            version = sample.policy_version - self._first_version + 1
        fields = rollout_fields(sample, group) | {"model_version": version, "enqueued_at": time.time()}
        return RolloutSample(**fields)


def check_carried(sample: Sample, *, temperature: float, drop: Collection[str] = ()) -> None:
    """Reject a sample that TRL would train differently."""
    mask, where = sample.loss_mask, f"sample {sample.id!r}"
    for name in ("logprobs", "advantages"):
        if name not in sample:
            raise InvalidInput(f"{where}: no {name}; AsyncGRPOTrainer needs them on every sample")
    if sample.mode != "rl" or sample.images:
        what = f"mode {sample.mode!r}" if sample.mode != "rl" else f"{len(sample.images)} images"
        raise InvalidInput(f"{where}: {what}; AsyncGRPOTrainer trains only text by policy gradient; use PlaneTrainer")
    advantages = np.unique(sample["advantages"][mask])
    if len(advantages) > 1:
        raise InvalidInput(
            f"{where}.advantages: from {advantages[0]:g} to {advantages[-1]:g} within the sample; AsyncGRPOTrainer "
            "takes one per sample; use PlaneTrainer"
        )
    given = sample.get("temperatures")
    if given is not None and "temperatures" not in drop and not np.allclose(given[mask], temperature):
        raise InvalidInput(
            f"{where}.temperatures: sampled at {float(given[mask][0]):g}, AsyncGRPOConfig has "
            f"temperature={temperature:g}; set it to the sampling temperature"
        )
    for name in CANNOT_CARRY:
        if name in sample and name not in drop and not _is_neutral(sample, name):
            raise InvalidInput(
                f"{where}.{name}: AsyncGRPOTrainer cannot carry it; use PlaneTrainer, or train without it: "
                f"PlaneRolloutWorker(..., drop=[{name!r}])"
            )


def _is_neutral(sample: Sample, name: str) -> bool:
    """Check whether a column asks only for what TRL does anyway."""
    cells, mask = sample[name], sample.loss_mask
    if name == "rl_weights":
        return bool((cells[mask] == 1.0).all())
    if name in ("ce_weights", "ref_kl_weights"):
        return bool((cells[mask] == 0.0).all())
    return name == "sampling_mask" and not len(cells.values)

"""`Durable`: TRL's `AsyncGRPOTrainer` with rollouts that survive a crash.

    trainer = AsyncGRPOTrainer(..., rollout_worker=Durable(AsyncRolloutWorker(...), plane="runs/x"))

TRL's worker generates and scores as before. Its groups are put at a plane (`trl_rollouts`), and TRL is given what the
plane serves. TRL takes samples one by one from a queue, packs them itself and reports nothing about them. So the worker
keeps track: which samples were handed over, in which order, and how many of them each optimizer step has trained.

    plane      step 7: a b c d        step 8: e f g h
    queue      a b c d e f g h                              in order, so the trained samples are a prefix of it
    TRL        [a b c] [d e f] ...                          three samples to an optimizer step
    checkpoint after [d e f]: step 7 is done, and 2 of step 8

A step of the plane is committed when all its samples are trained. The checkpoint holds the position, so a resumed run
begins with g.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    import numpy as np
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample
except ImportError as error:
    from penstock.extras import missing

    raise missing("Durable", error, extra="trl") from None

from penstock.arrays import Sample
from penstock.client import Plane, Source, Step
from penstock.client import open as open_plane
from penstock.errors import ConfigError, InvalidInput, PenstockError, WaitTimeout
from penstock.integrations.trainers.trl_rollouts import MESSAGES, Rollouts, messages_of, rollout_fields

CANNOT_CARRY = ("sampling_mask", "routed_experts", "rl_weights", "ce_weights", "ref_kl_weights", "teacher_logprobs")
"""Columns that change the training and that TRL's samples cannot hold."""
_LOOK_S = 0.2
_SEQ_LEN = 1 << 20
"""TRL limits the length of samples. The plane should not do so again."""
_TARGETS = ("groups_per_step", "samples_per_step", "tokens_per_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """A sample in the queue, and its position in the plane's steps."""

    step: int
    index: int
    """In its step, from 0."""
    is_last: bool
    ends_group: bool
    sample: RolloutSample | None
    """None if the sample has nothing to train."""


class PlanePosition(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Reports TRL's progress to the worker, and stores the worker's position in the checkpoint."""

    def __init__(self, worker: Durable) -> None:
        self.worker = worker

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise ConfigError(
                f"checkpoint of step {state.global_step}: has no position at a plane, because it was written without "
                "Durable; load its weights as the model instead of resuming"
            )
        self.worker.prepare(args, saved["attributes"], save_steps=state.save_steps)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.worker.on_step_end(syncs=state.global_step % args.weight_sync_steps == 0)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": asdict(self.worker.progress)}


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    step: int = 0
    """The last step of the plane whose samples are all trained."""
    samples: int = 0
    """Trained samples of the step after it."""
    groups: int = 0
    """Groups whose samples are all trained. TRL counts epochs in groups."""
    version: int = 0
    """TRL's number for the weights of the checkpoint."""

    def passed(self, handed: Handed) -> bool:
        """Move past a sample. Returns whether its step is complete."""
        self.step, self.samples = (handed.step, 0) if handed.is_last else (handed.step - 1, handed.index + 1)
        self.groups += handed.ends_group
        return handed.is_last


class Buffer(queue.Queue[Handed]):
    """The queue that TRL takes samples from. Records what it takes."""

    def __init__(self, worker: Durable) -> None:
        super().__init__()
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


class Durable:
    """A rollout worker for `AsyncGRPOTrainer(rollout_worker=...)` whose samples are kept by a plane.

    `worker` generates them: TRL's `AsyncRolloutWorker`, or None if other processes put groups at the plane. `plane` is
    a folder, where the plane then runs in the trainer's process, an address, or a `Plane` opened with `ranks=1`: TRL
    packs and distributes over its ranks itself. `settings` are those of `penstock.open`. Columns that TRL cannot carry
    are rejected unless `drop` names them.
    """

    def __init__(
        self,
        worker: AsyncRolloutWorker | None,
        *,
        plane: str | Path | Plane,
        drop: Collection[str] = (),
        **settings: Any,
    ) -> None:
        self.metrics_queue = queue.Queue() if worker is None else worker.metrics_queue
        """TRL logs what is in it: `rollout/*`, `completions/*`, `tools/*`."""
        self.position = PlanePosition(self)
        self.progress = Progress()
        self._where, self._settings, self._drop = plane, settings, frozenset(drop)
        self._worker = worker
        self._buffer = Buffer(self)
        self._trainer: AsyncGRPOTrainer | None = None
        self._args: Any = None
        self._plane: Plane | None = None
        self._source: Source | None = None
        self._rollouts: Rollouts | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._handed: deque[tuple[Handed, bool]] = deque()
        """Samples taken by TRL and not trained yet, each with whether it will be trained or was dropped."""
        self._complete: list[int] = []
        """Trained steps that are not committed yet."""
        self._version = 0
        self._groups = 0
        self._alive_at = time.monotonic()

    # -------------------------------------------------------------- called by TRL

    @property
    def rollout_buffer(self) -> Buffer:
        """The queue that TRL takes samples from.

        TRL tells a worker neither when an optimizer step ends nor when it saves. A callback learns both, so the worker
        adds one to the trainer: the caller, because TRL reads this attribute once, in the trainer's constructor.
        """
        caller = sys._getframe(1).f_locals.get("self")
        if self._trainer is None and isinstance(caller, AsyncGRPOTrainer):
            self._trainer = caller
            caller.add_callback(self.position)
        return self._buffer

    def start(self) -> None:
        """Start from the checkpoint's position."""
        if self._plane is None:
            raise ConfigError(
                "Durable: started without a trainer; give it to AsyncGRPOTrainer(rollout_worker=...) and call train()"
            )
        self._source = self._plane.source(0, world=1, resume_step=self.progress.step + 1)
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(self._source,), name="penstock-trl", daemon=True)
        self._thread.start()
        if self._worker is not None:
            self._rollouts = Rollouts(self._worker, self._plane, self._fail)
            self._rollouts.start()

    def stop(self) -> None:
        if self._rollouts is not None:
            self._rollouts.stop()
        self._stopping.set()
        if self._source is not None:
            if self._error is None:
                with suppress(PenstockError):  # unconfirmed steps are served again
                    self._source.flush()
            self._source.close()
        if self._thread is not None:
            self._thread.join(10)
        if self._plane is not None and self._plane is not self._where:
            self._plane.close()

    def update_model_version(self, model_version: int) -> None:
        """Record the version of weights that TRL has sent out, and announce it at the plane."""
        self._version = self.progress.version = model_version
        if self._worker is not None:
            self._worker.update_model_version(model_version)
        self._commit()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the worker failed or is stuck. TRL calls this while it waits."""
        self.raise_error()
        if self._worker is not None:
            self._worker.check_health(stale_after_s)
            return  # it lives, and may take as long for a group as it needs
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s and self._source is not None:
            raise WaitTimeout(
                f"no samples for {silent:.0f} s (heartbeat_stale_after_s); waited for: {self._source.waiting_for}"
            )

    # -------------------------------------------------------------- called by the callback and the queue

    def prepare(self, args: Any, saved: dict[str, int], *, save_steps: int = 0) -> None:
        """Open the plane, and set the trainer back to a checkpoint's position."""
        self._args, self.progress = args, Progress(**saved)
        self._groups = self.progress.groups
        self._buffer.maxsize = _samples_per_step(args)
        self._plane = self._where if isinstance(self._where, Plane) else self._open(args, save_steps)
        if self._trainer is not None:
            version = self.progress.version
            if self._trainer._lora_sync and version:
                # vLLM knows adapters by names that contain the version. A name must not return with other weights.
                version = max(version, self._plane.policy_version) + 1
            # TRL sends the weights out before the first step and counts that as one more version.
            self._trainer.model_version = max(version - 1, 0)
            self._trainer._groups_before_resume = self.progress.groups

    def _open(self, args: Any, save_steps: int) -> Plane:
        where = str(self._where)
        if "://" in where:
            return open_plane(where, **self._settings)
        budget, target = args.token_budget or 0, {"samples_per_step": _samples_per_step(args)}
        if budget > 0:
            target = {"tokens_per_step": budget * args.world_size * args.gradient_accumulation_steps}
        # A restart needs every step since the last checkpoint, or the one before if a crash cut that short. Samples of
        # a group share tokens, and TRL's budget counts these once: `num_generations` of our steps may fit into TRL's.
        steps = 2 * save_steps if args.save_strategy == "steps" else args.max_steps
        retain = max(steps * (args.num_generations if budget > 0 else 1), 64)
        settings: dict[str, Any] = {"ranks": 1, "seq_len": _SEQ_LEN, "retain_steps": retain, "columns": (MESSAGES,)}
        settings |= {} if any(name in self._settings for name in _TARGETS) else target
        return open_plane(where, **settings | self._settings)

    def taken(self, handed: Handed) -> RolloutSample | None:
        """Record that TRL takes a sample. Returns it, or None if it has nothing to train or is too stale."""
        sample = handed.sample
        if sample is not None and self._version - sample.model_version > self._args.max_staleness:
            with suppress(queue.Full):  # as TRL would count it, if there is room
                self.metrics_queue.put_nowait({"sample/dropped_stale_total": 1.0})
            sample = None
        # A sample beyond the budget is given to TRL, which drops it and counts that.
        is_trained = sample is not None and not 0 < (self._args.token_budget or 0) < len(sample.input_ids)
        self._handed.append((handed, is_trained))
        return sample

    def on_step_end(self, *, syncs: bool) -> None:
        """Record that an optimizer step is done. With `syncs`, weights are sent out next."""
        # TRL counts the samples of its optimizer step, and sets the count back after this.
        assert self._trainer is not None
        self._pass_by(round(self._trainer._step_samples))
        if not syncs:
            self.progress.version = self._version + 1  # of the next weights to be sent out
            self._commit()

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
            self._source.commit(number, policy_version=self._version)
        self._complete = []

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    # -------------------------------------------------------------- in the worker's thread

    def _work(self, source: Source) -> None:
        skip = self.progress.samples
        try:
            for step in source.steps():
                for handed in self._samples(step, skip):
                    self._offer(handed)
                skip = 0
        except PenstockError as error:
            if not self._stopping.is_set():
                self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _samples(self, step: Step, skip: int = 0) -> list[Handed]:
        """Return the samples of a step without the first `skip`, group by group. Groups are numbered over restarts."""
        groups: dict[str, list[Sample]] = {}
        for sample in step.samples():
            groups.setdefault(sample.group, []).append(sample)
        found: list[Handed] = []
        total, index = sum(map(len, groups.values())), 0
        for samples in groups.values():
            for i, sample in enumerate(samples):
                ends = i == len(samples) - 1
                if index >= skip:
                    rollout = self._rollout(sample, self._groups) if sample.loss_tokens else None
                    found.append(
                        Handed(
                            step=step.number, index=index, is_last=index == total - 1, ends_group=ends, sample=rollout
                        )
                    )
                    self._groups += ends  # those before `skip` are in the checkpoint's count
                index += 1
        return found

    def _offer(self, handed: Handed) -> None:
        while not self._stopping.is_set():
            with suppress(queue.Full):
                self._buffer.put(handed, timeout=_LOOK_S)
                self._alive_at = time.monotonic()
                return

    def _rollout(self, sample: Sample, group: int) -> RolloutSample:
        """Convert a sample for TRL: one advantage, the same temperature for all samples, no weights."""
        check_carried(sample, temperature=self._args.temperature, drop=self._drop)
        fields = rollout_fields(sample, group) | messages_of(sample) | {"enqueued_at": time.time()}
        if sample.policy_version is None:
            fields["model_version"] = self._version
        return RolloutSample(**fields)


def _samples_per_step(args: Any) -> int:
    """Return the samples of an optimizer step without a token budget, and about as many with one."""
    return int(args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps)


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
                f"Durable(..., drop=[{name!r}])"
            )


def _is_neutral(sample: Sample, name: str) -> bool:
    """Check whether a column asks only for what TRL does anyway."""
    cells, mask = sample[name], sample.loss_mask
    if name == "rl_weights":
        return bool((cells[mask] == 1.0).all())
    if name in ("ce_weights", "ref_kl_weights"):
        return bool((cells[mask] == 0.0).all())
    return name == "sampling_mask" and not len(cells.values)

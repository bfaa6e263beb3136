"""TRL's rollout samples: convert them, in memory and as JSON lines; put what TRL's worker generates into a plane.

TRL keeps samples in a queue and has no file format. A line here is `dataclasses.asdict` of a `RolloutSample`. It has
one advantage per sample, needs log-probabilities, and trains every completion token by policy gradient with weight 1.
Samples that ask for anything else cannot be written. A reward of NaN, which TRL gives to completions that were not
scored, is read as none.

TRL's worker generates and scores in a child process and sends single samples to the trainer. Reward functions, tools
and environments stay TRL's. Four things are added to that child (`ChildLoop`), all of them around TRL's own loop:

    a group is sent as one item        so that it is put complete, however many rows its conversations forked into
    prompts that were put are skipped  and numbering continues, so group ids never repeat, also after a restart
    it waits before it generates       if as many samples wait as `queue_maxsize` allows; TRL's own loop waits
                                       afterwards, with finished groups in memory, which a crash would lose
    it ends with the trainer           TRL's child goes on generating after a `kill -9` of its parent

A group of prompt i is put as `trl-i`. Its samples keep TRL's advantages, log-probabilities and metrics, and the
messages of prompt and completion in a column of their own, because TRL logs them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.arrays import WEIGHTS, Column, RolloutInfo, Sample, check_metrics, read_rollout
from penstock.capture import field_of, located, number_of, optional_mapping, required
from penstock.errors import ConfigError, InvalidInput
from penstock.extras import require
from penstock.integrations.formats.shared import Lost, Place, json_lines, one_number
from penstock.runs import read_run

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

    from penstock.client import Plane

HELD = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards", "group", "policy_version")
_READ = ("input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id", "metrics")


def from_trl(record: Any, *, id: str | None = None, lost: Lost | None = None) -> Sample:  # noqa: A002 - the field's own
    """Convert a `RolloutSample`, or a mapping of its fields. The metric `reward` becomes the sample's reward.

    >>> record = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -0.25]}
    >>> sample = from_trl(record | {"advantage": 0.5, "model_version": 3, "group_id": 7, "metrics": {"reward": 1.0}})
    >>> sample.group, sample.policy_version, float(sample["advantages"]), float(sample["rewards"])
    ('7', 3, 0.5, 1.0)
    """
    where = f"rollout sample {id!r}" if id else "rollout sample"
    metrics = dict(optional_mapping(record, "metrics", where))
    reward = None if metrics.get("reward") is None else number_of(metrics, "reward", f"{where}.metrics")
    metrics.pop("reward", None)
    reward = None if reward is None or reward != reward else reward
    if lost is not None:
        fields = asdict(record) if is_dataclass(record) and not isinstance(record, type) else dict(record)
        lost.fields(fields, known=_READ)
    group, version = field_of(record, "group_id"), field_of(record, "model_version")
    return Sample(
        id=id,
        group="" if group is None else str(group),
        policy_version=None if version == -1 else version,
        token_ids=required(record, "input_ids", where),
        loss_mask=required(record, "completion_mask", where),
        logprobs=required(record, "old_log_probs", where),
        advantages=number_of(record, "advantage", where),
        rewards=reward,
        rollout=RolloutInfo(metrics=check_metrics(metrics, f"{where}.metrics")),
    )


def to_trl(sample: Sample, *, group_id: int) -> RolloutSample:
    """Convert a sample to a `RolloutSample` for the queue of TRL's trainer. Needs trl."""
    require("to_trl", "trl")
    if (reason := _trained_differently(sample)) is not None:
        raise InvalidInput(f"sample {sample.id!r}: {reason}; TRL trains all its tokens by policy gradient alike")
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample(**rollout_fields(sample, group_id))


def rollout_fields(sample: Sample, group_id: int) -> dict[str, Any]:
    """Return the fields of a `RolloutSample`, by name. An unknown version is -1, an unknown metric NaN, as in TRL."""
    advantage = one_number(sample, "advantages")
    if advantage is None or "logprobs" not in sample:
        raise InvalidInput(
            f"sample {sample.id!r}: TRL needs log-probabilities and one advantage; give both, or leave the sample out"
        )
    reward = one_number(sample, "rewards")
    return {
        "prompt": [],
        "completion": [],
        "input_ids": sample.token_ids.astype(np.int64),
        "completion_mask": sample.loss_mask.astype(np.int64),
        "old_log_probs": np.nan_to_num(sample["logprobs"], nan=0.0),
        "advantage": advantage,
        "model_version": -1 if sample.policy_version is None else sample.policy_version,
        "group_id": group_id,
        "metrics": {
            **({} if reward is None else {"reward": reward}),
            **{name: math.nan if v is None else v for name, v in read_rollout(sample.rollout).metrics.items()},
        },
    }


def read_trl(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of JSON lines, named by their group and their number in the file."""
    for number, (where, record) in enumerate(json_lines(place, nan=True)):
        with located(where):
            yield from_trl(record, id=f"{record.get('group_id', '')}/{number}", lost=lost)


def _trained_differently(sample: Sample) -> str | None:
    """Return what TRL would ignore about how the sample is to be trained, or None."""
    for name, neutral in zip(WEIGHTS, (1.0, 0.0, 0.0), strict=True):
        if name in sample and (sample[name][sample.loss_mask] != neutral).any():
            return f"{name} other than {neutral:g}"
    return None if sample.mode == "rl" else f"mode {sample.mode}"


def write_trl(samples: Iterable[Sample], place: Place, lost: Lost) -> None:
    """Write one line per sample that TRL can represent. Groups are numbered in order of appearance."""
    groups: dict[str, int] = {}
    with place.writing() as file:
        for sample in samples:
            if not lost.keeps(sample, needs=("logprobs", "advantages")):
                continue
            if one_number(sample, "advantages") is None:
                lost.left_out["advantages that differ from token to token"] += 1
                continue
            if (reason := _trained_differently(sample)) is not None:
                lost.left_out[reason] += 1
                continue
            lost.columns(sample, held=HELD)
            lost.unwritten.update(["rewards"] if "rewards" in sample and one_number(sample, "rewards") is None else [])
            fields = rollout_fields(sample, groups.setdefault(sample.group or sample.id, len(groups)))
            plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
            plain["metrics"] = {name: None if math.isnan(value) else value for name, value in fields["metrics"].items()}
            file.write(json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n")


logger = logging.getLogger("penstock.trl")
MESSAGES = Column("trl_messages", dtype="uint8", ragged=True)
"""JSON of prompt and completion, as bytes at a sample's first token."""
_NAME = "trl-"
_LOOK_S = 0.2


# ------------------------------------------------------------------ in TRL's child process


@dataclass(frozen=True, slots=True)
class ChildLoop:
    """Builds TRL's loop in its child process. Takes the place of the loop's class, which TRL calls there."""

    loop_class: Callable[..., Any]
    first: int
    """Index of the prompt that TRL's iterator begins with."""
    done: Collection[int]
    """Indices of prompts after it that were put already."""
    room: Any
    """An event that is set while groups may be begun."""

    def __call__(self, **settings: Any) -> Any:
        threading.Thread(target=_end_with_parent, name="penstock-parent", daemon=True).start()
        buffer = settings["rollout_buffer"] = GroupBuffer(settings["rollout_buffer"])
        loop = self.loop_class(**settings)
        score, repeat, generate = loop._score_group, loop._repeat_iterator, loop._generate_one
        begun: set[int] = set()

        async def score_group(group: Any) -> Any:
            rows = await score(group)
            buffer.expected = len(rows)
            return rows

        def remaining() -> Iterator[tuple[int, Any]]:
            return ((self.first + i, row) for i, row in repeat() if self.first + i not in self.done)

        async def generate_one(*args: Any, group_id: int, **more: Any) -> Any:
            before = time.monotonic()
            # A group that was begun is finished: half of one would be lost in a crash.
            while group_id not in begun and not self.room.is_set():
                await asyncio.sleep(_LOOK_S / 2)
            begun.add(group_id)
            if (waited := time.monotonic() - before) > _LOOK_S / 4:
                loop._push_metrics({"rollout/backpressure_s": waited})
            return await generate(*args, group_id=group_id, **more)

        loop._score_group, loop._repeat_iterator, loop._generate_one = score_group, remaining, generate_one
        return loop


class GroupBuffer:
    """The queue that TRL's loop puts samples into, one by one. Sends the samples of a group together."""

    def __init__(self, groups: Any) -> None:
        self._groups = groups
        self._rows: list[RolloutSample] = []
        self.expected = 0
        """Samples of the group that is being put."""

    def put_nowait(self, sample: RolloutSample) -> None:
        rows = [*self._rows, sample]
        if len(rows) == self.expected:
            self._groups.put_nowait(rows)  # may raise queue.Full: TRL's loop waits and repeats the last sample
            rows = []
        self._rows = rows

    def qsize(self) -> int:
        size: int = self._groups.qsize()
        return size


def _end_with_parent() -> None:
    """Kill this process when the trainer is gone. Its end of a pipe closes with it, however it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------ in the trainer's process


class Rollouts:
    """Runs TRL's worker and puts its groups into a plane. `fail` is called with an error that ends this."""

    def __init__(self, worker: AsyncRolloutWorker, plane: Plane, fail: Callable[[BaseException], None]) -> None:
        self._worker, self._plane, self._fail = worker, plane, fail
        self._most: int = worker._loop_kwargs["queue_maxsize"]
        """Samples that may wait for training, as TRL's `queue_maxsize`. 0: any number."""
        dataset = worker._loop_kwargs["dataset"]
        self._prompts = len(dataset) if hasattr(dataset, "__len__") else None
        self._has_messages = MESSAGES.name in plane.columns
        self._room = worker._mp_ctx.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="penstock-trl-rollouts", daemon=True)

    def start(self) -> None:
        """Start TRL's worker at the first prompt that was not put."""
        done = put_prompts(self._plane)
        # An iterable dataset cannot begin in the middle: pass over everything that was put.
        first = 0 if self._prompts is None else next(i for i in itertools.count() if i not in done)
        if not self._has_messages:
            logger.warning("the plane has no column %r: TRL logs no prompts and completions", MESSAGES.name)
        self._look_for_room()
        self._worker._loop_kwargs["dataset_start_index"] = first
        later = frozenset(i for i in done if i >= first)
        self._worker._loop_cls = ChildLoop(self._worker._loop_cls, first, later, self._room)
        self._worker.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop TRL's worker and put what it has finished."""
        self._most = 0
        self._room.set()  # TRL's loop ends only when no rollout waits
        self._worker.stop()  # before the thread below: a child that cannot empty its queue does not end
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(30)

    def _work(self) -> None:
        try:
            while rows := self._next():
                self._plane.put(self._samples(rows))
        except BaseException as error:
            if not self._stopping.is_set():
                self._fail(error)
                raise

    def _next(self) -> list[RolloutSample] | None:
        """Return the rows of the next group, or None at the end."""
        while True:
            self._look_for_room()
            last = self._stopping.is_set()  # read before the queue, so that nothing put before it is missed
            try:
                rows: list[RolloutSample] = self._worker.rollout_buffer.get(timeout=_LOOK_S)
            except queue.Empty:
                if last:
                    return None
            else:
                return rows

    def _look_for_room(self) -> None:
        """Let the child begin groups unless as many samples wait for training as TRL's queue may hold."""
        if self._most and self._plane.ledger.held >= self._most:
            self._room.clear()
        else:
            self._room.set()

    def _samples(self, rows: Sequence[RolloutSample]) -> list[Sample]:
        index = rows[0].group_id
        name, prompt = f"{_NAME}{index}", index if self._prompts is None else index % self._prompts
        return [
            from_trl(row, id=f"{name}/{i}").replace(
                group=name, prompt=str(prompt), columns={MESSAGES: _as_column(row)} if self._has_messages else {}
            )
            for i, row in enumerate(rows)
        ]


def put_prompts(plane: Plane) -> set[int]:
    """Return the indices of the prompts whose groups a plane has accepted, in whatever state they are."""
    status = plane.status()
    folder = status["folder"]
    if folder is None and status["log"] == "memory":
        return set()
    if folder is None or not Path(folder).is_dir():
        raise ConfigError(
            f"plane {plane.url}: its log is not on this machine, so it is not known which prompts were generated; give "
            "Durable a folder, or Durable(None, plane=...) and put groups from your own code"
        )
    names = (str(row["id"]) for row in read_run(folder, steps=0)["groups"])
    return {int(name.removeprefix(_NAME)) for name in names if name.startswith(_NAME) and name[4:].isdecimal()}


def _as_column(row: RolloutSample) -> list[np.ndarray[Any, Any]]:
    text = json.dumps([row.prompt, row.completion], default=str, separators=(",", ":"))
    none = np.zeros(0, np.uint8)
    return [np.frombuffer(text.encode(), np.uint8), *[none] * (len(row.input_ids) - 1)]


def messages_of(sample: Sample) -> dict[str, Any]:
    """Return the fields `prompt` and `completion` of TRL's record of a sample."""
    cells = sample.get(MESSAGES.name)
    prompt, completion = json.loads(bytes(cells.values)) if cells is not None and len(cells.values) else ([], [])
    return {"prompt": prompt, "completion": completion}

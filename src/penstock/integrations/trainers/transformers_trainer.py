"""`PlaneTrainer`: a `transformers.Trainer` whose steps come from a plane.

The plane defines the batches, the optimizer steps and the loss denominators. Everything else is Trainer's: optimizers,
schedules, mixed precision, logging, callbacks, checkpoints.

    one step of the plane = one optimizer step         accumulates all its micro-batches; the denominator is the number
                                                       of trained tokens of all ranks
    commit                                             after the optimizer step, before Trainer logs and saves
    trainer_state.json of a checkpoint                 holds the plane's step, so a resumed run asks for the next one

Every rank has its own source. Nothing is broadcast from rank 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

try:
    import torch
    from torch import distributed
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    from penstock.extras import missing

    raise missing("PlaneTrainer", error, extra="transformers") from None

from penstock.client import Plane, Source, Step, connect
from penstock.errors import ConfigError, InvalidInput
from penstock.packing import MicroBatch
from penstock.protocol import Timeouts
from penstock.train import (
    ByMode,
    Dppo,
    Loss,
    Observer,
    Steps,
    Sums,
    Terms,
    agree,
    as_it_is,
    check_packing,
    check_trees,
    check_vocabulary,
    register_attention,
    row_logprobs,
    to_torch,
)

logger = logging.getLogger("penstock.trainer")
Publish = Callable[[Any, int], None]
"""Called on every rank with the complete, unwrapped model and the version of its weights."""
_STATE = "trainer_state.json"
_UNUSED = {
    "train_dataset": "steps come from the plane; leave it out and put groups there",
    "compute_loss_func": "pass loss=, one of penstock.train or your own that returns Terms",
    "label_smoothing_factor": "pass a loss= that smooths",
    "per_device_train_batch_size": "the plane says how many samples a step and a micro-batch have; leave it out",
}
"""Settings of Trainer that a plane's steps have no use for, and what to do instead."""
_DEFAULTS = {"label_smoothing_factor": 0.0, "per_device_train_batch_size": 8}
"""Values that TrainingArguments has if they were left out."""


class Feed(Steps):
    """A source's steps. Remembers the one being trained."""

    def __init__(self, source: Source, publish: Callable[[int], None] | None) -> None:
        super().__init__(source)
        self._publish = publish
        self.current: Step | None = None

    def __iter__(self) -> Iterator[Step]:
        for step in super().__iter__():
            self.current = step
            yield step

    def commit(self) -> int:
        """Commit the current step, after publishing its weights. Returns its number."""
        assert self.current is not None
        number = self.current.number
        if self._publish is not None:
            self._publish(number)
        self.source.commit(number, policy_version=None if self._publish is None else number)
        return number


class CommitSteps(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Commits a step when its optimizer step is done, and writes its number into the checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        """The plane's step that was trained last."""

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, train_dataloader: Any, **_: Any) -> None:
        self.step = train_dataloader.dataset.commit()
        state.epoch = state.global_step / state.max_steps  # Trainer counts the steps since the process started

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"step": self.step}}


def last_checkpoint(folder: str | Path) -> str | None:
    """Return the newest complete checkpoint in an output folder, or None.

    Trainer writes `trainer_state.json` last. A run that was killed before that leaves a folder that
    `resume_from_checkpoint=True` would accept.
    """
    found = [path.parent for path in Path(folder).glob(f"checkpoint-*/{_STATE}") if path.stat().st_size]
    numbered = [path for path in found if path.name.partition("-")[2].isdecimal()]
    return str(max(numbered, key=lambda path: int(path.name.partition("-")[2]))) if numbered else None


def step_of(checkpoint: str | Path) -> int:
    """Return the plane's last step that a checkpoint was trained on."""
    saved = TrainerState.load_from_json(str(Path(checkpoint) / _STATE)).stateful_callbacks
    if CommitSteps.__name__ not in saved:
        raise ConfigError(
            f"{checkpoint}: records no step of a plane, so it was not written by a PlaneTrainer; load its weights into "
            "the model and pass first_step="
        )
    return int(saved[CommitSteps.__name__]["attributes"]["step"])


class PlaneTrainer(Trainer):  # type: ignore[misc]
    """Trains a Hugging Face causal language model on the steps of a plane.

    `plane` is an address or a `Plane`. This process is rank `args.process_index`. `loss` is one of `penstock.train`,
    or your own that returns `Terms`. With `publish`, weights are published and their versions reported to the plane: 0
    before the first step, then the step's number. `observer` receives every micro-batch with its loss terms
    (`TokenExporter` is one). Without a checkpoint, training begins at the plane's `first_step`; None means the first
    step that is not committed.

    The model keeps its attention if that keeps the samples of a row apart, which is checked. Otherwise it gets that of
    `penstock.train`, and a warning says so.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        plane: str | Plane,
        loss: Loss | None = None,
        publish: Publish | None = None,
        observer: Observer | None = None,
        first_step: int | None = 1,
        run: str = "",
        keys: str | Path | None = None,
        timeouts: Timeouts | None = None,
        **settings: Any,
    ) -> None:
        _check(args, settings)
        self.world = args.world_size
        """Number of ranks that gradients are averaged over."""
        self.vocabulary = model.get_input_embeddings().num_embeddings
        if args.device.type == "cuda" and not (args.fsdp or args.deepspeed):
            model.to(args.device)  # as Trainer does later: some attention runs only there
        _check_attention(model, self.vocabulary)
        super().__init__(model, args, **settings)
        self.add_callback(CommitSteps())
        self.loss, self.observer = loss or ByMode(rl=Dppo()), observer
        self._plane, self._publish, self._first_step = plane, publish, first_step
        self._connection: dict[str, Any] = {"run": run, "keys": keys, "timeouts": timeouts}
        self._open = ExitStack()
        self._unlogged: list[dict[str, float]] = []
        """Metrics of the steps since the last line of the log."""
        self._samples_trained = 0
        self._trees_checked = False
        several = distributed.is_available() and distributed.is_initialized() and self.world > 1
        self._gloo = distributed.new_group(backend="gloo") if several else None
        """Group for small CPU tensors that ranks agree on; gradients may use another backend."""

    # -------------------------------------------------------------- steps

    def train(self, resume_from_checkpoint: str | bool | None = None, **settings: Any) -> Any:
        """Run `Trainer.train` from the step after the checkpoint's."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        done = step_of(resume_from_checkpoint) if isinstance(resume_from_checkpoint, (str, Path)) else None
        first = self._first_step if done is None else done + 1
        self._unlogged, self._samples_trained = [], 0
        with self._open:  # a rank that fails notifies the others
            source = self._source = self._open.enter_context(self._connect(first))
            self._announce(0 if done is None else done)
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **settings)
            source.flush()
        return result

    def _connect(self, first: int | None) -> Source:
        rank, world = self.args.process_index, self.world
        if isinstance(self._plane, Plane):
            return self._plane.source(rank, world=world, resume_step=first)
        return connect(self._plane, rank=rank, world=world, resume_step=first, **self._connection)

    def get_train_dataloader(self) -> Any:
        publish = None if self._publish is None else self._announce
        return DataLoader(Feed(self._source, publish), batch_size=None, collate_fn=as_it_is)

    def _announce(self, version: int) -> None:
        if self._publish is not None:
            self._publish(self.accelerator.unwrap_model(self.model), version)

    # -------------------------------------------------------------- one step

    def training_step(self, model: Any, step: Step, *_: Any) -> torch.Tensor:
        """Run forward and backward on all micro-batches. The mean of the result over ranks is the step's loss."""
        model.train()
        with agree(self._gloo, step=step.number):
            rows = [self._prepare_row(batch) for batch in step]
        sums, total = Sums(), torch.zeros((), device=self.args.device)
        for index, (batch, tensors) in enumerate(rows):
            with self._exchange(model, last=index == len(rows) - 1):
                terms, loss = self._backward(model, step, tensors)
            total += loss
            sums.add(batch, terms, version=step.number - 1, loss_mask=tensors["loss_mask"])
            if self.observer is not None:
                self.observer.write(step, batch, terms, policy_version=step.number - 1)
        if self.observer is not None:
            self.observer.close_step(step)
        if not step.loss_tokens:
            model.zero_grad()  # nothing was trained, so the optimizer must change nothing
        if self._gloo is not None:
            sums = sums.reduced(self._gloo)
        sums.check_trained(step.number, step.loss_tokens)
        self._unlogged.append(sums.metrics())
        self._samples_trained += int(sums.samples)
        return total

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.observer is not None:
            self.observer.flush()
        super()._save_checkpoint(*args, **kwargs)

    def _prepare_row(self, batch: MicroBatch) -> tuple[MicroBatch, dict[str, torch.Tensor]]:
        check_vocabulary(batch, self.vocabulary)
        if batch.images:
            raise InvalidInput(
                f"micro-batch with {len(batch.images)} images: PlaneTrainer trains text; use `penstock train`"
            )
        if batch.forest is not None and not self._trees_checked:
            _set_attention(self.model, "computes rows of samples that share tokens as trees")
            check_trees(self.model, vocabulary=self.vocabulary, longest=int(batch.sequence_lengths.max()))
            self._trees_checked = True
        return batch, to_torch(batch, device=self.args.device)

    def _backward(self, model: Any, step: Step, tensors: dict[str, torch.Tensor]) -> tuple[Terms, torch.Tensor]:
        needed = None if self.observer is not None else tensors["loss_mask"]
        with self.compute_loss_context_manager():
            logprobs, entropy = row_logprobs(model, tensors, needed=needed)
            terms = self.loss(tensors, logprobs, entropy)
            # DDP averages gradients over ranks, but the denominators already cover all ranks. Two ranks with 6 and 2
            # tokens divide by 8 each, so the sum is the mean over tokens. Times world undoes the average.
            loss = terms.mean(step.denominators) * self.world
        self.accelerator.backward(loss)
        return terms, loss.detach()

    def _exchange(self, model: Any, *, last: bool) -> AbstractContextManager[Any]:
        """Exchange gradients with the last micro-batch only."""
        context: AbstractContextManager[Any] = nullcontext() if last else self.accelerator.no_sync(model)
        return context

    # -------------------------------------------------------------- called by Trainer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the metrics of the steps since the last line: reward, entropy, mismatch with the sampler, staleness."""
        if "loss" in logs:
            logs |= over_steps(self._unlogged)
            self._unlogged = []
        if "train_samples_per_second" in logs:  # Trainer's is computed from per_device_train_batch_size
            logs["train_samples_per_second"] = round(self._samples_trained / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, _step: Step) -> int:
        return 0  # Trainer's estimate is for rectangular batches

    def _track_num_input_tokens(self, step: Step) -> None:
        """Count tokens for `include_num_input_tokens_seen`. The plan has those of all ranks."""
        counts, wanted = step.accounting.total, str(self.args.include_num_input_tokens_seen)
        if wanted != "no":
            self.state.num_input_tokens_seen += (
                counts.tokens - counts.shared_tokens if wanted == "non_padding" else counts.computed_tokens
            )


def over_steps(rows: list[dict[str, float]]) -> dict[str, float]:
    """Average metrics over steps, as Trainer does with the loss. Maxima stay maxima. What was never known is left out.

    >>> rows = [{"train/reward": 1.0, "train/max_log_ratio": 1.0}, {"train/reward": 2.0, "train/max_log_ratio": 4.0}]
    >>> over_steps(rows)
    {'train/reward': 1.5, 'train/max_log_ratio': 4.0}
    """
    found: dict[str, float] = {}
    for name in rows[0] if rows else ():
        known = [row[name] for row in rows if math.isfinite(row[name])]
        if known and name != "train/grad_norm":  # Trainer logs its own
            largest = "max_" in name or name.endswith("_gap")
            found[name] = max(known) if largest else sum(known) / len(known)
    return found


def _check_attention(model: Any, vocabulary: int) -> None:
    """Prove that packing changes nothing for this model, with its own attention or else with ours."""
    try:
        check_packing(model, vocabulary=vocabulary)
    except (ConfigError, ImportError, RuntimeError, TypeError, ValueError) as error:  # of kernels and models, too
        _set_attention(model, f"keeps the samples of a row apart ({error})")
        check_packing(model, vocabulary=vocabulary)


def _set_attention(model: Any, why: str) -> None:
    given, ours = model.config._attn_implementation, register_attention()
    if given != ours:
        logger.warning("model: attention %r is replaced by %r, which %s", given, ours, why)
        model.set_attn_implementation(ours)


def _check(args: Any, settings: dict[str, Any]) -> None:
    """Reject settings that would train something other than the plane's steps, or would have no effect."""
    for name, instead in _UNUSED.items():
        given = settings.get(name, getattr(args, name, None))
        if given is not None and given != _DEFAULTS.get(name):
            what = given if isinstance(given, int | float) else type(given).__name__
            raise ConfigError(f"{name}: {what}; it would have no effect: {instead}")
    if args.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps: {args.gradient_accumulation_steps}; a step of the plane is one optimizer "
            "step, however many micro-batches it has: set 1 here, and the size of a step at the plane"
        )
    if args.max_steps <= 0:
        raise ConfigError(f"max_steps: {args.max_steps}; a plane has no epochs: set the number of steps to train")
    if args.n_gpu > 1:
        raise ConfigError(f"{args.n_gpu} GPUs in one process: start one process per GPU (torchrun, accelerate launch)")
    args.ignore_data_skip = True  # the source begins at the right step

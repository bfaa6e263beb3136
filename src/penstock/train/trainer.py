"""The reference trainer: small but complete. Takes steps from a plane and publishes weights for the workers.

Runs one optimizer step per step of the plane. Gradients of all micro-batches are summed and divided by the step's
global count of trained tokens, so any packing and any number of ranks gives the same update. The checkpoint stores the
step number, which is the data cursor: on resume the trainer asks the plane for the step after it. With `fake` in the
configuration, synthetic steps take the place of a plane, to time the trainer alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from penstock.arrays import Sample
from penstock.assets import AssetStore
from penstock.client import Source, Step, connect
from penstock.errors import ConfigError
from penstock.packing import MicroBatch, RankPlan, fill, pack
from penstock.replay import Prioritized
from penstock.train import checkpoint
from penstock.train.checkpoint import Weights
from penstock.train.loss import ByMode, Dppo, Grpo, Ipo, Loss
from penstock.train.materialize import MaskSample
from penstock.train.metrics_sinks import MetricsFile, memory, packed
from penstock.train.model import build_model, check_packing, check_trees, check_vocabulary, row_logprobs
from penstock.train.rank_steps import agree
from penstock.train.run_config import LossConfig, TrainConfig, image_processor
from penstock.train.tensors import to_torch
from penstock.train.terms import Sums, Terms
from penstock.train.vision import Vision, check_placeholders

try:
    import torch
    from torch import distributed
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.trainer", error) from None

_RECENT = 10
"""Steps over which the reward is averaged and compared with the target."""


class Inputs(NamedTuple):
    """The inputs of one forward pass."""

    batch: MicroBatch
    tensors: dict[str, torch.Tensor]
    extra: dict[str, Any] | None
    """Pixels and grids for an image model."""


class Observer(Protocol):
    """Receives every micro-batch with its loss terms. The token exporter is one."""

    def write(self, step: Step, batch: MicroBatch, terms: Terms, *, policy_version: int) -> None: ...
    def close_step(self, step: Step) -> None: ...
    def flush(self) -> None:
        """Called before a checkpoint: the steps before it are not trained again, so they must be on disk."""

    def close(self) -> None: ...


def train(
    config: TrainConfig,
    *,
    rank: int,
    url: str,
    observer: Observer | None = None,
) -> None:
    """Train one rank of a run, from its last checkpoint to its end. All ranks call this, each in its own process."""
    torch.set_num_threads(1)
    if config.ranks > 1:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    trainer = Trainer(config, rank, observer)
    source: Source | FakeSource
    if config.fake is not None:
        source = FakeSource(config, rank, trainer.vocabulary)
    else:
        first = trainer.done + 1
        source = connect(
            url, rank=rank, world=config.ranks, resume_step=first, run=config.run, timeouts=config.timeouts
        )
    with source:
        trainer.run(source)
        source.flush()
    trainer.close()
    if config.ranks > 1:
        distributed.destroy_process_group()


def loss_of(config: LossConfig) -> Loss:
    """Build the configured loss. Samples in other modes than rl use their default losses."""
    kinds: dict[str, Callable[[], Loss]] = {
        "dppo": lambda: Dppo(high=config.threshold, low=config.threshold, kl_tau=config.kl_weight),
        "grpo": lambda: Grpo(low=config.clip_low, high=config.clip_high),
        "ipo": lambda: Ipo(threshold=config.threshold, kl_tau=config.kl_weight),
    }
    return ByMode(rl=kinds[config.kind]())


class Trainer:
    """One rank's model, optimizer and bookkeeping."""

    def __init__(self, config: TrainConfig, rank: int, observer: Observer | None = None) -> None:
        self.config, self.rank, self.observer = config, rank, observer
        self.folder = Path(config.folder)
        self.model = build_model(config.model, seed=config.seed)
        self.vocabulary = self.model.get_input_embeddings().num_embeddings
        self.packing_error = check_packing(self.model, vocabulary=self.vocabulary)
        if config.packing.trees:
            longest = config.packing.seq_len
            error = check_trees(self.model, vocabulary=self.vocabulary, longest=longest)
            self.packing_error = max(self.packing_error, error)
        self._sharded = config.model.sharding == "fsdp" and config.ranks > 1
        if self._sharded:
            _shard(self.model, config.ranks)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.done = max(checkpoint.steps(self.folder / "checkpoints"), default=0)
        """The last trained step."""
        if self.done:
            checkpoint.restore(self.folder / "checkpoints", self.done, self.model, self.optimizer)
        self._vision = None
        if hasattr(self.model.config, "vision_config"):
            images = config.images
            store = AssetStore(images.folder or self.folder / "assets", run=images.run)
            policy = None if images.max_masked is None else MaskSample(max_fraction=images.max_masked)
            self._vision = Vision(self.model, image_processor(config.model), store, policy)
        self._loss = loss_of(config.loss)
        self._weights = Weights(self.folder / "weights")
        self._metrics_file = None
        if rank == 0:
            self._metrics_file = MetricsFile(self.folder, config.run, list(config.metrics), config.prometheus)
        self._rewards: deque[float] = deque(maxlen=_RECENT)
        self._publish(self.done)

    def run(self, source: Source | FakeSource) -> None:
        """Train until the last step or until the target reward is reached."""
        while self.done < self.config.max_steps and not self._is_learned():
            self._advance(source)
        self._checkpoint()

    def _advance(self, source: Source | FakeSource) -> None:
        """Take a step, train on it, publish the weights and commit it."""
        began = time.monotonic()
        with agree(step=self.done + 1):  # if one rank lacks an image, all stop before they compute
            step = source.step()
            waited = time.monotonic() - began
            inputs = [self._prepare(batch) for batch in step]
        sums = self.train_step(step, inputs)
        self.done = step.number
        self._publish(self.done)
        if isinstance(self.config.replay.sampler, Prioritized):
            source.report(step, priorities=sums.priorities)
        source.commit(step, policy_version=self.done)
        if self.done % self.config.checkpoint_every == 0:
            self._checkpoint()
        self._note(step, sums, time.monotonic() - began, waited)

    def _prepare(self, batch: MicroBatch) -> Inputs:
        if batch.forest is not None and not self.config.packing.trees:
            raise ConfigError(
                "packing.trees: false, but the plane sends samples that share tokens; set it to true, so that the "
                "trainer checks that the model supports it"
            )
        check_vocabulary(batch, self.vocabulary)
        check_placeholders(batch, self.model.config)
        tensors = to_torch(batch)
        extra = self._vision.inputs(batch, tensors) if self._vision and batch.images else None
        return Inputs(batch, tensors, extra)

    def train_step(self, step: Step, inputs: list[Inputs]) -> Sums:
        """Run one optimizer step over all micro-batches of a step."""
        sums, last = Sums(), len(inputs) - 1
        for index, (batch, tensors, extra) in enumerate(inputs):
            if self._sharded:
                self.model.set_requires_gradient_sync(index == last)  # one exchange per step
            terms = self._backward(step, tensors, extra)
            sums.add(batch, terms, version=step.number - 1, loss_mask=tensors["loss_mask"])
            if self.observer is not None:
                self.observer.write(step, batch, terms, policy_version=step.number - 1)
        if self.observer is not None:
            self.observer.close_step(step)
        if self.config.ranks > 1 and not self._sharded:
            sum_gradients(self.model)
        sums.grad_norm = float(
            checkpoint.full(
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
            )
        )
        if step.loss_tokens:
            self.optimizer.step()
        self.optimizer.zero_grad()
        reduced = sums.reduced() if self.config.ranks > 1 else sums
        reduced.check_trained(step.number, step.loss_tokens)
        return reduced

    def _backward(self, step: Step, tensors: dict[str, torch.Tensor], extra: dict[str, Any] | None) -> Terms:
        if extra is not None:
            self.model.model.rope_deltas = None  # the model caches them and would reuse those of the last call
        needed = None if self.observer is not None else tensors["loss_mask"]  # an observer needs all tokens
        never = self.config.model.never_sampled
        logprobs, entropy = row_logprobs(self.model, tensors, extra, needed=needed, never_sampled=never)
        terms = self._loss(tensors, logprobs, entropy)
        bonus = torch.where(tensors["loss_mask"], entropy, 0.0).sum() * step.denominators.per_loss_token
        loss = terms.mean(step.denominators) - self.config.loss.entropy_bonus * bonus
        # FSDP averages gradients over ranks, but the denominators already count all ranks: undo the average.
        (loss * self.config.ranks if self._sharded else loss).backward()
        return terms

    def _is_learned(self) -> bool:
        target, recent = self.config.target_reward, self._rewards
        return target is not None and len(recent) == _RECENT and sum(recent) / _RECENT >= target

    def _publish(self, version: int) -> None:
        if not self._sharded and self.rank:
            return
        state = checkpoint.model_state(self.model)
        if self.rank == 0:
            self._weights.publish(version, state)

    def _checkpoint(self) -> None:
        if self.observer is not None:
            self.observer.flush()
        if self.config.fake is None:
            checkpoint.save(self.folder / "checkpoints", self.done, self.model, self.optimizer, writes=self.rank == 0)

    def _note(self, step: Step, sums: Sums, seconds: float, waited: float) -> None:
        self._rewards.append(sums.reward)
        images = self._vision.metrics() if self._vision else {}  # also resets the counters, so every rank calls it
        if self._metrics_file is None:
            return
        total = step.accounting.total
        self._metrics_file.write(
            step.number,
            {
                **sums.metrics(),
                "train/loss_tokens": step.loss_tokens,
                "train/samples": step.denominators.samples,
                "perf/step_s": seconds,
                "perf/wait_s": waited,
                "perf/tokens": total.tokens,
                "perf/tokens_per_s": total.tokens / max(seconds, 1e-9),
                "perf/padding_tokens": total.padding_tokens,
                "perf/shared_tokens": total.shared_tokens,
                "perf/waste": step.accounting.waste,
                "train/packing_error": self.packing_error,
                **packed(step.accounting, self.rank),
                **step.numbers,
                **images,
                **memory(),
            },
        )

    def close(self) -> None:
        """Close files and threads."""
        for part in (self._metrics_file, self._vision, self.observer):
            if part is not None:
                part.close()


def sum_gradients(model: torch.nn.Module) -> None:
    """Sum the gradients of all micro-batches over ranks. A rank counts as 0 where it used a parameter in none.

    DDP exchanges gradients while the last micro-batch is computed, and only of the parameters that this one used: if it
    has text alone, those of the vision tower were left out, and the next step ended in an error."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    distributed.all_reduce(used, distributed.ReduceOp.MAX)
    works = []
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(distributed.all_reduce(parameter.grad, async_op=True))
    for work in works:
        work.wait()


def _shard(model: Any, ranks: int) -> None:
    """Shard a model with FSDP2: each rank holds a part of every layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    inner = model.model.language_model if hasattr(model.model, "language_model") else model.model
    for layer in inner.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


# ------------------------------------------------------------------ without a plane


class FakeSource:
    """A stand-in for `Source`. Every step has `micro_batches` of `batch_size` full-length samples."""

    def __init__(self, config: TrainConfig, rank: int, vocabulary: int) -> None:
        assert config.fake is not None
        self._config, self._rank, self._vocabulary = config, rank, vocabulary
        self._number = 0

    def step(self, number: int | None = None, *, timeout: float | None = None) -> Step:  # noqa: ARG002
        self._number += 1
        fake, length = self._config.fake, self._config.packing.seq_len
        assert fake is not None
        rng = np.random.default_rng([self._config.seed, self._number])
        samples = [
            self._sample(rng, f"fake-{self._number}/{i}", length)
            for i in range(fake.batch_size * fake.micro_batches * self._config.ranks)
        ]
        step = pack(
            samples,
            ranks=self._config.ranks,
            seq_len=length,
            micro_batch_max_tokens=fake.batch_size * length,
            long_rows=True,
        )
        rank_plan: RankPlan = step.ranks[self._rank].rank_plan
        return Step(self._number, "", rank_plan, fill(step.ranks[self._rank].all_samples, rank_plan))

    def _sample(self, rng: np.random.Generator, name: str, length: int) -> Sample:
        mask = np.arange(length) >= max(1, length // 4)
        return Sample(
            id=name,
            token_ids=rng.integers(0, self._vocabulary, length),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, 0.0),
            advantages=float(rng.normal()),
            rewards=0.0,
        )

    def commit(self, step: Step, *, policy_version: int | None = None) -> None:
        """Does nothing: there is no plane."""

    def report(self, step: Step, *, priorities: Mapping[str, float] | None = None) -> None:
        """Does nothing: there is no plane."""

    def flush(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

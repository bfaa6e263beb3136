"""`ExportTokens`: export what TRL's synchronous `GRPOTrainer` did with every token, for the viewer. Needs no plane.

    trainer = GRPOTrainer(...)
    trainer.add_callback(ExportTokens(trainer, "runs/x"))

TRL shows a callback neither its batches nor what it computed per token. So three methods of the trainer are wrapped:
the one that generates (rows get a number, by which their rewards are found again after TRL has shuffled them), the one
that computes log-probabilities (they are kept) and the one that computes the loss (both are written).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch
    from transformers import TrainerCallback
    from trl import GRPOTrainer
except ImportError as error:
    from penstock.extras import missing

    raise missing("ExportTokens", error, extra="trl") from None

from penstock.arrays import Sample
from penstock.packing import MicroBatch, pack
from penstock.train import Grpo, Terms, to_torch
from penstock.view import TokenExporter

_ROW = "penstock_row"
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of TRL whose value per token is PPO's. Others are exported without one."""


class ExportTokens(TrainerCallback):  # type: ignore[misc]
    """Exports every micro-batch of a `GRPOTrainer`. `settings` are those of `TokenExporter`."""

    def __init__(self, trainer: GRPOTrainer, folder: str | Path, **settings: Any) -> None:
        self._trainer = trainer
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        self.exporter = TokenExporter(folder, rank=rank, world=world, **settings)
        self._computed: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._rewards: list[float] = []
        """Rewards of the last generation, over all ranks."""
        self._first = self._generation = 0
        """First row of the last generation on this rank, and the step it was made at."""
        self._generate = trainer._generate_and_score_completions
        self._logps = trainer._get_per_token_logps_and_entropies
        self._loss = trainer.compute_loss
        trainer._generate_and_score_completions = self._on_generated
        trainer._get_per_token_logps_and_entropies = self._on_computed
        trainer.compute_loss = self._on_loss

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.exporter.close_step(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.exporter.close()

    # -------------------------------------------------------------- around TRL's methods

    def _on_generated(self, inputs: Any) -> Any:
        batch = self._generate(inputs)
        if self._trainer.model.training:
            count = len(batch["completion_ids"])
            total = count * self._trainer.accelerator.num_processes
            weights = self._trainer.reward_weights.tolist()
            columns = [list(values)[-total:] for values in self._trainer._logs["rewards"].values()]
            self._rewards = [_weighted(row, weights) for row in zip(*columns, strict=True)]
            self._first = count * self._trainer.accelerator.process_index
            self._generation = self._trainer.state.global_step
            batch[_ROW] = torch.arange(count)
        return batch

    def _on_computed(self, *args: Any, **more: Any) -> Any:
        found = self._logps(*args, **more)
        self._computed = (found[0].detach(), None if found[1] is None else found[1].detach())
        return found

    def _on_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        loss = self._loss(model, inputs, *args, **more)
        if model.training and _ROW in inputs and self._computed is not None:
            step = self._trainer.state.global_step + 1
            batch, terms = self._converted(inputs, *self._computed)
            self.exporter.write(step, batch, terms, policy_version=step - 1)
        return loss

    # -------------------------------------------------------------- conversion

    def _converted(self, inputs: Any, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[MicroBatch, Terms]:
        plain = {name: value.cpu() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        sampled = plain.get("sampling_per_token_logps", plain.get("old_per_token_logps", logprobs.cpu()))
        samples = [self._sample(plain, sampled, i) for i in range(len(plain["completion_ids"]))]
        tokens = sum(sample.num_tokens for sample in samples)
        (batch,) = pack(samples, ranks=1, seq_len=tokens, micro_batch_max_tokens=tokens).ranks[0]
        order = {sample.id: i for i, sample in enumerate(samples)}
        places = np.zeros((2, batch.num_tokens))
        for name, start, length in zip(batch.segments.ids, batch.segments.offsets, batch.segments.lengths, strict=True):
            i = order[name]
            kept = plain["completion_mask"][i].bool()
            end, own = start + length, int(kept.sum())
            places[0, end - own : end] = logprobs[i].cpu()[kept]
            places[1, end - own : end] = 0.0 if entropy is None else entropy[i].cpu()[kept]
        trained, spread = (torch.from_numpy(row).float() for row in places)
        terms = Grpo(low=self._trainer.epsilon_low, high=self._trainer.epsilon_high)(
            to_torch(batch), trained, None if entropy is None else spread
        )
        return batch, terms if self._trainer.loss_type in _CLIPPED else _without_loss(terms)

    def _sample(self, plain: dict[str, torch.Tensor], sampled: torch.Tensor, i: int) -> Sample:
        """Return one row without its padding."""
        prompt = plain["prompt_ids"][i][plain["prompt_mask"][i].bool()]
        kept = plain["completion_mask"][i].bool()
        own = plain["completion_ids"][i][kept]
        trained = torch.ones_like(own) if "tool_mask" not in plain else plain["tool_mask"][i][kept]
        advantage = plain["advantages"][i]
        before = torch.zeros(len(prompt))
        row = self._first + int(plain[_ROW][i])
        group = f"{self._generation}-{row // self._trainer.num_generations}"
        return Sample(
            id=f"{group}/{row % self._trainer.num_generations}",
            group=group,
            policy_version=self._generation,
            token_ids=torch.cat([prompt, own]).numpy(),
            loss_mask=torch.cat([before, trained]).bool().numpy(),
            logprobs=torch.cat([before, sampled[i][kept]]).float().numpy(),
            advantages=float(advantage) if not advantage.ndim else torch.cat([before, advantage[kept]]).numpy(),
            rewards=self._rewards[row],
        )


def _weighted(rewards: tuple[float, ...], weights: list[float]) -> float:
    """Sum rewards as TRL does: functions that gave none are left out, and NaN if none gave one."""
    given = [reward * weight for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(given) if given else math.nan


def _without_loss(terms: Terms) -> Terms:
    nothing = torch.full_like(terms.loss, math.nan)
    return replace(terms, loss=nothing, masked=None, masked_high=None, masked_low=None, rules={})

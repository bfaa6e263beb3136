"""A small right trainer, and wrong ones: each has one published bug of the field, in a form it was published in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.client import Step
from penstock.packing import MicroBatch
from penstock.train import to_torch, token_logprobs
from penstock.train.loss import Grpo, Loss

VOCABULARY, WIDTH, LONGEST = 13, 8, 128
Tensors = dict[str, torch.Tensor]


class Tiny(torch.nn.Module):  # type: ignore[misc]
    """One attention layer over segments, with absolute positions: samples see each other if they can."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Any:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / WIDTH)

        self.embed, self.place = weight(VOCABULARY, WIDTH), weight(LONGEST, WIDTH)
        self.query, self.key, self.value = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)
        self.out = weight(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.embed[ids] + self.place[positions]
        segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
        visible = (segment[:, None] == segment[None, :]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        scores = (hidden @ self.query) @ (hidden @ self.key).T
        mixed = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ (hidden @ self.value)
        return (hidden + mixed) @ self.out


class Right:
    """Trains as the page on training says."""

    bug = ""

    def __init__(self, loss: Loss | None = None) -> None:
        self.loss = loss or Grpo()

    def __call__(self, step: Step, world: int) -> tuple[float, dict[str, torch.Tensor]]:
        model, total = Tiny(), 0.0
        for batch in self.micro_batches(step):
            loss = (
                self.micro_batch_loss(model, self.columns(batch), batch) * self.scale(step, batch) * self.ranks(world)
            )
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        zero = torch.zeros
        return total, {n: zero(p.shape) if p.grad is None else p.grad for n, p in model.named_parameters()}

    def micro_batches(self, step: Step) -> Iterator[MicroBatch]:
        return iter(step)

    def columns(self, batch: MicroBatch) -> Tensors:
        tensors = to_torch(batch)
        return {name: values.double() if values.is_floating_point() else values for name, values in tensors.items()}

    def micro_batch_loss(self, model: Tiny, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
        logits = model(columns["token_ids"], columns["position_ids"], columns["sequence_lengths"])
        logprobs, _ = token_logprobs(
            logits, columns["token_ids"], columns["sequence_lengths"], columns.get("temperatures")
        )
        return self.total(self.loss(columns, logprobs).loss, columns, batch)

    def total(self, loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
        return loss.sum()

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return step.denominators.per_loss_token

    def ranks(self, world: int) -> float:
        return world


class PerSample(Right):
    """Not wrong: the mean over samples of the mean over the tokens of each, counted over all ranks."""

    def total(self, loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
        parts = loss[: batch.sample_tokens].split(batch.segments.lengths.tolist())
        masks = columns["loss_mask"][: batch.sample_tokens].split(batch.segments.lengths.tolist())
        return sum((p.sum() / m.sum().clamp_min(1) for p, m in zip(parts, masks, strict=True)), start=loss.sum() * 0)

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0 / max(step.denominators.samples, 1)


# ------------------------------------------------------------------ denominator per micro-batch


class MeanOfMicroBatches(Right):
    bug = "denominator per micro-batch"

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0 / max(batch.loss_tokens, 1) / len(step)


class SumOfMeans(Right):
    bug = "denominator per micro-batch"

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0 / max(batch.loss_tokens, 1)


class NoDenominator(Right):
    bug = "denominator per micro-batch"

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0


class LossOfTheLastMicroBatch(Right):
    """Trains right and reports wrong."""

    bug = "denominator per micro-batch"

    def __call__(self, step: Step, world: int) -> tuple[float, dict[str, torch.Tensor]]:
        loss, gradients = super().__call__(step, world)
        return loss / len(step), gradients


# ------------------------------------------------------------------ packing-dependent loss


class SeesTheRow(Right):
    """Attention over the row, positions reset: what a model without variable-length attention does."""

    bug = "packing-dependent loss"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "sequence_lengths": torch.tensor([len(columns["token_ids"])])}


class PositionsOfTheRow(Right):
    bug = "packing-dependent loss"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "position_ids": torch.arange(len(columns["token_ids"]))}


class BoundariesFromPositions(Right):
    """Looks for a fall in position: samples of one token have none, and neither has what follows them."""

    bug = "lost one-token samples"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        falls = torch.nonzero(columns["position_ids"].diff() < 0)[:, 0] + 1
        edges = torch.cat([torch.zeros(1, dtype=torch.long), falls, torch.tensor([batch.num_tokens])])
        return {**columns, "sequence_lengths": edges.diff()}


# ------------------------------------------------------------------ masks and columns that are shifted


class MaskLate(Right):
    bug = "off-by-one mask"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "loss_mask": columns["loss_mask"].roll(1)}


class MaskEarly(Right):
    bug = "off-by-one mask"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "loss_mask": columns["loss_mask"].roll(-1)}


class LogprobsLate(Right):
    bug = "shifted logprobs"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "logprobs": columns["logprobs"].roll(1)}


class LogprobsEarly(Right):
    bug = "shifted logprobs"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "logprobs": columns["logprobs"].roll(-1)}


class AdvantagesLate(Right):
    bug = "shifted advantages"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "advantages": columns["advantages"].roll(1)}


# ------------------------------------------------------------------ temperatures


class NoTemperature(Right):
    bug = "temperature ignored"

    def columns(self, batch: MicroBatch) -> Tensors:
        return {name: values for name, values in super().columns(batch).items() if name != "temperatures"}


class TemperatureOfTheFirst(Right):
    bug = "temperature ignored"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        if "temperatures" in columns:
            columns["temperatures"] = columns["temperatures"][:1].expand(batch.num_tokens)
        return columns


class TemperatureLate(Right):
    bug = "temperature ignored"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        if "temperatures" in columns:
            columns["temperatures"] = columns["temperatures"].roll(1)
        return columns


# ------------------------------------------------------------------ one-token samples


class SkipsShortCompletions(Right):
    bug = "lost one-token samples"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        for part in columns["loss_mask"].split(batch.sequence_lengths.tolist()):
            if int(part.sum()) < 2:
                part[:] = False
        return columns

    def micro_batches(self, step: Step) -> Iterator[MicroBatch]:
        return (MicroBatch(**{f: getattr(b, f) for f in b.__slots__} | {"columns": _copied(b)}) for b in step)


def _copied(batch: MicroBatch) -> dict[str, Any]:
    return {name: values.copy() for name, values in batch.columns.items()}


# ------------------------------------------------------------------ dummies


class TrainsDummies(Right):
    bug = "dummy micro-batch in the loss"

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        if batch.is_dummy:
            ones = torch.ones(batch.num_tokens, dtype=torch.float64)
            columns |= {"loss_mask": ones.bool(), "advantages": ones, "logprobs": -ones}
        return columns


class CountsDummies(Right):
    bug = "dummy micro-batch in the loss"

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0 / (step.loss_tokens + step.accounting.total.dummy_tokens)


class DividesByNothing(Right):
    """Mean of the micro-batch, weighted by its part of all tokens: right, and 0 / 0 for a dummy."""

    bug = "dummy micro-batch in the loss"

    def total(self, loss: torch.Tensor, columns: Tensors, batch: MicroBatch) -> torch.Tensor:
        count = columns["loss_mask"].sum()
        return loss.sum() / count * count


# ------------------------------------------------------------------ caps


class CountsAllTokens(Right):
    bug = "cap-dependent gradient"

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0 / (step.accounting.total.tokens + step.accounting.total.padding_tokens)


class CutsRows(Right):
    bug = "cap-dependent gradient"
    cap = 48

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        inside = torch.arange(batch.num_tokens) < self.cap
        return {**columns, "loss_mask": columns["loss_mask"] & inside}


class CutsSamples(Right):
    bug = "cap-dependent gradient"
    cap = 32

    def columns(self, batch: MicroBatch) -> Tensors:
        columns = super().columns(batch)
        return {**columns, "loss_mask": columns["loss_mask"] & (columns["position_ids"] < self.cap)}


# ------------------------------------------------------------------ ranks


class ForgetsRanks(Right):
    """Gradients are averaged over ranks, the denominator is that of all: the step is too small by their number."""

    bug = "rank-dependent scale"

    def ranks(self, world: int) -> float:
        return 1.0


class RanksTwice(Right):
    bug = "rank-dependent scale"

    def ranks(self, world: int) -> float:
        return float(world * world)


class MeanOfRanks(Right):
    """Every rank divides by its own count."""

    bug = "rank-dependent scale"

    def scale(self, step: Step, batch: MicroBatch) -> float:
        return 1.0 / max(sum(b.loss_tokens for b in step), 1)

    def ranks(self, world: int) -> float:
        return 1.0


class KeepsGradients(Right):
    """Never clears them."""

    bug = "not repeatable"

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__(loss)
        self.kept: dict[str, torch.Tensor] = {}

    def __call__(self, step: Step, world: int) -> tuple[float, dict[str, torch.Tensor]]:
        loss, found = super().__call__(step, world)
        self.kept = {name: self.kept.get(name, 0.0) + gradient for name, gradient in found.items()}
        return loss, self.kept


def mutants() -> list[type[Right]]:
    """Every class above that has a bug."""
    found: list[type[Right]] = []
    todo: list[type[Right]] = [Right]
    while todo:
        kinds = todo.pop().__subclasses__()
        found += [kind for kind in kinds if kind.bug]
        todo += kinds
    return found

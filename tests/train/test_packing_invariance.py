"""The loss and gradient of a step do not depend on how it is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Sample
from penstock.packing import MicroBatch, PackedStep, pack
from penstock.train import to_torch

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

VOCABULARY, WIDTH, LONGEST = 13, 8, 24


class Tiny(torch.nn.Module):  # type: ignore[name-defined, misc]
    """One attention layer, block-diagonal by `sequence_lengths`: enough for samples to see each other if they could."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Any:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / WIDTH**0.5)

        self.embed, self.place = weight(VOCABULARY, WIDTH), weight(LONGEST, WIDTH)
        self.query, self.key, self.value = weight(WIDTH, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, WIDTH)
        self.out = weight(WIDTH, VOCABULARY)

    def forward(self, ids: Any, positions: Any, lengths: Any) -> Any:
        """Log-probabilities of each token given those before it in its segment; [T], 0 at the first of the row."""
        hidden = self.embed[ids] + self.place[positions]
        segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        visible = (segment[:, None] == segment[None, :]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        scores = (hidden @ self.query) @ (hidden @ self.key).T / WIDTH**0.5
        mixed = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ (hidden @ self.value)
        logits = ((hidden + mixed) @ self.out).log_softmax(-1)
        predicted = logits[:-1].gather(1, ids[1:, None])[:, 0]
        return torch.cat([torch.zeros(1, dtype=torch.float64), predicted])


def micro_batch_loss(model: Tiny, batch: MicroBatch) -> Any:
    """A sum, never a mean: an importance-weighted policy gradient and a cross-entropy part by weights."""
    t = to_torch(batch)
    logprobs = model(t["token_ids"], t["position_ids"], t["sequence_lengths"].long())
    mask = t["loss_mask"]
    ratio = (logprobs - t["logprobs"].double()).exp()
    rl = -(ratio * t["advantages"].double() * t["rl_weights"].double())[mask].sum()
    ce = -(logprobs * t["ce_weights"].double())[mask].sum()
    return rl + ce


def loss_and_gradient(step: PackedStep) -> tuple[float, list[Any]]:
    """As a trainer computes them: every rank its micro-batches, one global denominator, gradients summed."""
    model = Tiny()
    total = 0.0
    for rank in step.ranks:
        for batch in rank:
            loss = micro_batch_loss(model, batch) * rank.denominators.per_loss_token
            loss.backward()
            total += loss.item()
    return total, [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def draw_samples(seed: int, count: int, *, trained: bool = True) -> list[Sample]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(1, LONGEST + 1))
        out.append(
            Sample(
                id=str(i),
                token_ids=rng.integers(0, VOCABULARY, n),
                loss_mask=(rng.random(n) < 0.7) & (np.arange(n) > 0) & trained,
                logprobs=-rng.random(n) * 3,
                advantages=float(rng.normal()),
                mode="sft" if i % 3 == 0 else "rl",
            )
        )
    return out


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 14),
    ranks=st.integers(1, 5),
    cap=st.sampled_from([1, 9, LONGEST]),
    multiple=st.sampled_from([1, 8]),
)
@settings(max_examples=60)
def test_loss_and_gradient_are_the_same_for_any_cap_rank_count_and_padding(
    seed: int, count: int, ranks: int, cap: int, multiple: int
) -> None:
    samples = draw_samples(seed, count)
    loss, gradient = loss_and_gradient(pack(samples, ranks=1, seq_len=LONGEST, max_samples=1))
    packed = pack(
        samples,
        ranks=ranks,
        seq_len=LONGEST,
        micro_batch_max_tokens=max(cap, multiple),
        pad_to_multiple_of=multiple,
    )
    other_loss, other_gradient = loss_and_gradient(packed)
    assert other_loss == pytest.approx(loss, abs=1e-10)
    for mine, other in zip(gradient, other_gradient, strict=True):
        assert (mine - other).abs().max().item() < 1e-10


def test_a_step_with_nothing_to_train_has_a_finite_loss_and_no_gradient() -> None:
    loss, gradient = loss_and_gradient(pack(draw_samples(1, 6, trained=False), ranks=2, seq_len=LONGEST))
    assert loss == 0.0
    assert all(bool((g == 0).all()) for g in gradient)


def test_denominators_per_rank_would_give_another_gradient() -> None:
    """The reason for global denominators: the mean of per-rank means is a different number."""
    step = pack(draw_samples(5, 9), ranks=3, seq_len=LONGEST)
    loss, _ = loss_and_gradient(step)
    model = Tiny()
    with torch.no_grad():
        per_rank = [
            sum(float(micro_batch_loss(model, b)) for b in rank) / max(1, sum(b.loss_tokens for b in rank))
            for rank in step.ranks
        ]
    assert abs(float(np.mean(per_rank)) - loss) > 1e-6

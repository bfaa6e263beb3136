"""Samples that share tokens train as if each had been computed alone: gradients of forests against plain rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from penstock.arrays import Sample
from penstock.assets import AssetStore
from penstock.capture import Trajectory, Turn
from penstock.convert import make_group
from penstock.demo.tasks import ColorTask, model_of
from penstock.packing import MicroBatch, PackedStep, pack
from penstock.train import ByMode, TeacherKl, kept_of, reverse_kl, to_torch, token_logprobs, topk_kl
from penstock.train.logits import predictions_of
from penstock.train.model import build_model, forward
from penstock.train.run_config import PACKED_IMAGES, ModelConfig, image_processor
from penstock.train.vision import Vision
from tests.train.ranks import run_ranks
from tests.train.test_attention import FAMILIES

pytestmark = pytest.mark.deep  # models

VOCABULARY, LONGEST = 20, 96


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def grpo(rng: np.random.Generator) -> list[list[int]]:
    """Answers to one prompt."""
    prompt = rng.integers(0, VOCABULARY, 34).tolist()
    return [[*prompt, *rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist()] for _ in range(4)]


def turns(rng: np.random.Generator) -> list[list[int]]:
    """A conversation whose every turn became a sample, and branches that leave it anywhere."""
    paths = [rng.integers(0, VOCABULARY, 33).tolist()]
    for _ in range(5):
        before = paths[int(rng.integers(len(paths)))]
        cut = int(rng.integers(32, len(before) + 1))
        paths.append([*before[:cut], *rng.integers(0, VOCABULARY, rng.integers(1, 12)).tolist()])
    return paths


def agents(rng: np.random.Generator) -> list[list[int]]:
    """A main thread, and sub-agents that start from it and have some of their own."""
    main = rng.integers(0, VOCABULARY, 60).tolist()
    first = [*main[:40], *rng.integers(0, VOCABULARY, 9).tolist()]
    return [main, first, [*first[:45], 3, 1, 4], [*main[:36], *rng.integers(0, VOCABULARY, 5).tolist()], main[:50]]


SHAPES: dict[str, Callable[[np.random.Generator], list[list[int]]]] = {"grpo": grpo, "turns": turns, "agents": agents}


def samples_of(shape: str, seed: int, *, masks: bool = True) -> list[Sample]:
    """Three groups of a shape, with every column that a loss or a sampler has, different in each sample."""
    rng = np.random.default_rng(seed)
    out = []
    for group in range(3):
        for i, path in enumerate(SHAPES[shape](rng)):
            ids, n = np.array(path), len(path)
            trained = (rng.random(n) < 0.5) & (np.arange(n) >= 20)
            columns: dict[str, Any] = {}
            if masks:
                columns["sampling_mask"] = [
                    sorted({int(t), *rng.integers(0, VOCABULARY, 6).tolist()}) if on and rng.random() < 0.5 else []
                    for t, on in zip(ids, trained, strict=True)
                ]
            out.append(
                Sample(
                    id=f"{group}/{i}",
                    group=f"g{group}",
                    mode=("rl", "sft", "opd")[int(rng.integers(3))],
                    policy_version=int(rng.integers(9)),
                    token_ids=ids,
                    loss_mask=trained,
                    logprobs=-3 * rng.random(n),
                    advantages=rng.normal(size=n),
                    temperatures=rng.choice([0.7, 1.0], n),
                    teacher_logprobs=-3 * rng.random(n),
                    weight_versions=rng.integers(0, 9, n),
                    **columns,
                )
            )
    return out


def logprobs_of(model: Any, batch: MicroBatch, tensors: dict[str, Any], extra: Any, *, trained_only: bool) -> Any:
    predictions = None
    if batch.forest is not None:
        predictions = predictions_of(tensors, needed=tensors["loss_mask"] if trained_only else None)
    logits = forward(model, tensors, extra, places=None if predictions is None else predictions.places)
    found = token_logprobs(
        logits,
        tensors["token_ids"],
        tensors["sequence_lengths"],
        tensors.get("temperatures"),
        kept=kept_of(tensors),
        predictions=predictions,
    )
    return logits, predictions, *found


def backward(
    model: Any,
    step: PackedStep,
    rank: int = 0,
    *,
    vision: Vision | None = None,
    scale: int = 1,
    trained_only: bool = True,
) -> list[list[Any]]:
    """A rank's part of a step, as the reference trainer computes it; returns its log-probabilities by sample."""
    rows, last, found = step.ranks[rank], len(step.ranks[rank]) - 1, []
    for m, batch in enumerate(rows):
        if scale > 1:
            model.require_backward_grad_sync = m == last
        tensors = to_torch(batch)
        extra = vision.inputs(batch, tensors) if vision is not None and batch.images else None
        *_, logprobs, entropy = logprobs_of(model, batch, tensors, extra, trained_only=trained_only)
        terms = ByMode()(tensors, logprobs, entropy)
        bonus = torch.where(tensors["loss_mask"], entropy, 0.0).sum() * rows.denominators.per_loss_token
        ((terms.mean(rows.denominators) - 0.05 * bonus) * scale).backward()
        parts = logprobs.detach().split(batch.sequence_lengths.tolist())
        found += [[name, own] for name, own in zip(batch.segments.ids, parts, strict=False)]
    return sorted(found, key=lambda pair: pair[0])


def packed(samples: list[Sample], *, trees: bool, ranks: int = 1, **settings: Any) -> PackedStep:
    settings = {"seq_len": LONGEST, "micro_batch_max_tokens": 4 * LONGEST, "long_rows": True, **settings}
    step = pack(samples, ranks=ranks, trees=trees, **settings)
    shared = [batch.forest is not None for rank in step.ranks for batch in rank]
    assert any(shared) if trees else not any(shared)
    return step


def in_double(config: ModelConfig) -> Any:
    """A model that computes in float64 throughout: Hugging Face's norms go through float32 whatever they are given."""
    model = build_model(config).double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def tiny(family: str = "qwen3") -> Any:
    return in_double(ModelConfig(family=family, config={**FAMILIES[family], "max_position_embeddings": 128}))


def gradients(model: Any) -> list[Any]:
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    model.zero_grad()
    return found


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    assert max(float(g.abs().max()) for g in wanted) > 1e-3, "there is something to compare"
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) < 1e-9


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_of_a_forest_are_those_of_plain_rows(family: str, shape: str, seed: int) -> None:
    model = tiny(family)
    samples = samples_of(shape, seed, masks=seed == 1)
    backward(model, packed(samples, trees=False))
    plain = gradients(model)
    backward(model, packed(samples, trees=True, pad_to_multiple_of=8))
    assert_equal(gradients(model), plain)


def test_every_token_of_a_forest_has_the_logprob_of_its_plain_row_where_all_are_asked_for() -> None:
    model, samples = tiny(), samples_of("turns", 5)
    plain = backward(model, packed(samples, trees=False))
    shared = backward(model, packed(samples, trees=True), trained_only=False)
    for (name, own), (other, theirs) in zip(shared, plain, strict=True):
        assert name == other
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-10)


def test_a_prediction_that_samples_share_is_computed_once() -> None:
    samples = [
        Sample(id=str(i), group="g", token_ids=[*range(1, 19), *range(1, 19), 5 + i, 3], loss_mask=np.arange(38) > 1)
        for i in range(3)
    ]
    (batch,) = packed(samples, trees=True).ranks[0]
    found = predictions_of(to_torch(batch))
    assert len(found.tokens) == 35 + 3 * 2 and len(found.places) == 36 + 3
    warm = [s.replace(temperatures=np.full(38, 1.0 + (i == 2), np.float32)) for i, s in enumerate(samples)]
    (batch,) = packed(warm, trees=True).ranks[0]
    found = predictions_of(to_torch(batch))
    assert len(found.tokens) == 35 * 2 + 3 * 2 and len(found.places) == 36 + 3


class Routed:
    """Replays recorded routing: what the experts of a token add to it, by a hook on every layer."""

    def __init__(self, model: Any, experts: int = 4) -> None:
        self.ids: Any = None
        generator = torch.Generator().manual_seed(4)
        for number, layer in enumerate(model.model.layers):
            table = torch.randn(experts, 32, generator=generator, dtype=torch.float64)
            layer.mlp.register_forward_hook(partial(self._add, table, number))

    def _add(self, table: Any, layer: int, module: Any, given: Any, out: Any) -> Any:
        return out * (1 + table[self.ids[:, layer].long()].sum(1))


def test_routed_experts_stand_once_per_place_and_train_as_in_plain_rows() -> None:
    model = tiny()
    routing, rng = Routed(model), np.random.default_rng(2)
    prompt, experts = rng.integers(0, VOCABULARY, 40), rng.integers(0, 4, (40, 2, 2), np.uint8)
    samples = []
    for i in range(4):
        own = rng.integers(0, VOCABULARY, 5)
        routed = np.concatenate([experts, rng.integers(0, 4, (5, 2, 2), np.uint8)])
        if i == 3:  # routed otherwise from here: the tree parts, though the ids agree
            routed[36:] = (routed[36:] + 1) % 4
        columns: dict[str, Any] = {
            "logprobs": -rng.random(45),
            "advantages": float(rng.normal()),
            "routed_experts": routed,
        }
        ids, mask = np.concatenate([prompt, own]), np.arange(45) >= 38
        samples.append(Sample(id=str(i), group="g", token_ids=ids, loss_mask=mask, **columns))
    found = []
    for trees in (False, True):
        for batch in packed(samples, trees=trees).ranks[0]:
            tensors = to_torch(batch)
            routing.ids = tensors["forest.routed_experts" if trees else "routed_experts"]
            assert len(routing.ids) == batch.computed_tokens == (40 + 4 * 5 + 4 if trees else 4 * 45)
            *_, logprobs, _ = logprobs_of(model, batch, tensors, None, trained_only=True)
            (logprobs * tensors["advantages"])[tensors["loss_mask"]].sum().backward()
        found.append(gradients(model))
    assert_equal(found[1], found[0])


def test_divergences_from_a_teacher_are_those_of_plain_rows() -> None:
    model, samples = tiny(), samples_of("agents", 3)
    rng, found = np.random.default_rng(0), []
    best = {s.id: np.argsort(rng.random((s.num_tokens, VOCABULARY)))[:, :3] for s in samples}
    for trees in (False, True):
        step = packed(samples, trees=trees)
        for batch in step.ranks[0]:
            tensors = to_torch(batch)
            ids = torch.from_numpy(np.concatenate([best[name] for name in batch.segments.ids]))
            teacher = (torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64).log()).expand(len(ids), 3)
            logits, predictions, logprobs, _ = logprobs_of(model, batch, tensors, None, trained_only=True)
            divergence = topk_kl(
                *(logits, ids, teacher, tensors["sequence_lengths"], tensors["temperatures"]),
                divergence=reverse_kl,
                loss_mask=tensors["loss_mask"],
                predictions=predictions,
            )
            terms = TeacherKl()({**tensors, "teacher_kl": divergence}, logprobs)
            (terms.loss.sum() * step.ranks[0].denominators.per_loss_token).backward()
        found.append(gradients(model))
    assert_equal(found[1], found[0])


def image_samples(task: ColorTask, count: int = 3) -> list[Sample]:
    """Groups that ask about one image after many words; one rollout goes on with a second image of its own."""
    rng, out = random.Random(3), []
    for g in range(count):
        prompt, second = task.prompt(rng), task.prompt(rng)
        assert prompt.image is not None
        words = [7 + rng.randrange(12) for _ in range(33)]
        rollouts = []
        for i in range(4):
            told = [
                Turn([*words, *prompt.token_ids], images=[prompt.image.shifted(len(words))]),
                Turn([12 + rng.randrange(6), task.eos], logprobs=[-1.0, -0.5]),
            ]
            if i == 3:
                told += [task.turn(second), Turn([13], logprobs=[-0.3])]
            rollouts.append(Trajectory(turns=told, reward=float(i % 2), env=task.name))
        out += list(make_group(rollouts, id=f"g{g}", policy_version=0, advantage=task.advantage).samples)
    return out


def test_images_of_a_forest_are_materialized_once_and_train_as_in_plain_rows(tmp_path: Path) -> None:
    task, config = ColorTask(tmp_path), model_of("color")
    samples = image_samples(task)
    model = in_double(config)
    vision = Vision(model, image_processor(config), AssetStore(tmp_path / "assets"))
    found, rows = [], []
    for trees in (False, True):
        step = packed(samples, trees=trees, packed_images=PACKED_IMAGES, seq_len=128, micro_batch_max_tokens=1024)
        rows.append(sum(len(vision.inputs(b, to_torch(b))["image_grid_thw"]) for b in step.ranks[0]))
        model.model.rope_deltas = None
        backward(model, step, vision=vision)
        found.append(gradients(model))
    vision.close()
    assert rows == [3 * 5, 3 * 2]
    assert_equal(found[1], found[0])


def two_ranks(rank: int, note: Callable[[Any], Any]) -> None:
    distributed.init_process_group("gloo")
    samples = samples_of("turns", 7) + samples_of("grpo", 8)
    samples = [s.replace(id=f"{i}", group=f"{s.group}-{i // 18}") for i, s in enumerate(samples)]
    found = []
    for trees in (False, True):
        model = tiny()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        backward(wrapped, packed(samples, trees=trees, ranks=2), rank, scale=2)
        found.append(gradients(model))
    backward(model, packed(samples, trees=False))
    alone = gradients(model)
    note([max(float((a - b).abs().max()) for a, b in zip(grads, alone, strict=True)) for grads in found])
    distributed.destroy_process_group()


@pytest.mark.process
def test_two_ranks_with_forests_have_the_gradient_of_one_with_plain_rows(tmp_path: Path) -> None:
    for worst in run_ranks(two_ranks, tmp_path):
        assert max(worst) < 1e-9

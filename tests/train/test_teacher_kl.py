"""Top-k teachers: the reference, the whole vocabulary, the tail bucket, the shift per segment, memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import teacher_topk
from penstock.errors import InvalidInput
from tests.support import reference_step as plain

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from penstock.packing.accounting import Denominators  # noqa: E402
from penstock.train.loss import ByMode  # noqa: E402
from penstock.train.teacher_kl import TeacherKl, forward_kl, kl_to_teacher, reverse_kl, topk_kl  # noqa: E402
from penstock.train.tensors import to_torch  # noqa: E402
from tests.train.watching import LargestFloat32  # noqa: E402

lengths = st.lists(st.integers(1, 5), min_size=1, max_size=5)
directions = pytest.mark.parametrize("direction", ["forward", "reverse"])
DIVERGENCES = {"forward": forward_kl, "reverse": reverse_kl}


def case(seed: int, segments: list[int], k: int, vocabulary: int = 7) -> tuple[Any, Any, Any, Any, Any]:
    """Logits, the k best ids of a teacher with their log-probabilities, its whole distribution, and temperatures."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(segments)
    logits = torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) * 3
    teacher = (torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) * 3).log_softmax(-1)
    best = teacher.topk(k, dim=-1)
    temperatures = torch.rand(count, generator=generator) + 0.5
    return logits, best.indices, best.values, teacher, temperatures


def of_all_ids(logits: Any, teacher: Any, segments: list[int], temperatures: Any, direction: str) -> Any:
    """The divergence over the whole vocabulary, sample by sample."""
    parts = []
    for own, q, t in zip(*(x.split(segments) for x in (logits, teacher, temperatures)), strict=True):
        log_p, log_q = (own[:-1] * t[1:, None].reciprocal()).log_softmax(-1), q[1:]
        one = log_q.exp() * (log_q - log_p) if direction == "forward" else log_p.exp() * (log_p - log_q)
        parts += [torch.zeros(1, dtype=torch.float64), one.sum(-1)]
    return torch.cat(parts)


@directions
@settings(max_examples=40)
@given(segments=lengths, seed=st.integers(0, 1000), chunk=st.sampled_from([1, 3, 1024]))
def test_ids_that_cover_the_vocabulary_give_the_whole_divergence_and_its_gradient(
    direction: str, segments: list[int], seed: int, chunk: int
) -> None:
    logits, ids, known, teacher, temperatures = case(seed, segments, k=7)
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = topk_kl(
        found, ids, known, torch.tensor(segments), temperatures, divergence=DIVERGENCES[direction], chunk=chunk
    )
    expected = of_all_ids(wanted, teacher, segments, temperatures, direction)
    assert torch.allclose(values, expected, rtol=0, atol=1e-10)
    (values * weights).sum().backward()
    (expected * weights).sum().backward()
    if max(segments) > 1:
        assert torch.allclose(found.grad, wanted.grad, rtol=0, atol=1e-10)


@directions
@settings(max_examples=60)
@given(segments=lengths, seed=st.integers(0, 1000), k=st.integers(1, 7), chunk=st.sampled_from([1, 2, 1024]))
def test_equals_the_plain_reference_for_any_k_and_chunk(
    direction: str, segments: list[int], seed: int, k: int, chunk: int
) -> None:
    logits, ids, known, _, temperatures = case(seed, segments, k)
    values = topk_kl(
        logits, ids, known, torch.tensor(segments), temperatures, divergence=DIVERGENCES[direction], chunk=chunk
    )
    want = plain.topk_kl(
        logits.tolist(), ids.tolist(), known.tolist(), segments, temperatures.tolist(), forward=direction == "forward"
    )
    # A divergence near zero is a difference of numbers near ten, divided by temperatures of 32 bits.
    assert values.tolist() == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.deep
@directions
@settings(max_examples=20)
@given(segments=lengths, seed=st.integers(0, 1000), k=st.integers(1, 5))
def test_gradients_are_exact(direction: str, segments: list[int], seed: int, k: int) -> None:
    logits, ids, known, _, temperatures = case(seed, segments, k, vocabulary=5)
    logits.requires_grad_()

    def values(x: Any) -> Any:
        divergence = DIVERGENCES[direction]
        return topk_kl(x, ids, known, torch.tensor(segments), temperatures, divergence=divergence, chunk=2)

    assert torch.autograd.gradcheck(values, (logits,))


@directions
@settings(max_examples=40)
@given(seed=st.integers(0, 1000), k=st.integers(1, 6))
def test_a_part_of_the_vocabulary_gives_a_lower_bound_that_rises_with_k(direction: str, seed: int, k: int) -> None:
    divergence, sizes = DIVERGENCES[direction], torch.tensor([6])
    logits, ids, known, _, _ = case(seed, [6], k=7)
    fewer, more = (
        topk_kl(logits, ids[:, :n], known[:, :n], sizes, divergence=divergence, min_tail=1e-30) for n in (k, k + 1)
    )
    assert (fewer >= -1e-12).all() and (fewer <= more + 1e-9).all()


@directions
def test_a_model_that_is_the_teacher_has_no_divergence_and_no_gradient(direction: str) -> None:
    logits, ids, known, _, _ = case(3, [6], k=3)
    _, _, _, teacher, _ = case(3, [6], k=3)
    same = teacher.roll(-1, 0).requires_grad_()
    values = topk_kl(same, ids, known, torch.tensor([6]), divergence=DIVERGENCES[direction])
    values.sum().backward()
    assert values.abs().max() < 1e-12 and same.grad.abs().max() < 1e-12
    assert topk_kl(logits, ids, known, torch.tensor([6]), divergence=DIVERGENCES[direction]).max() > 0.1


@directions
def test_a_teacher_who_is_sure_asks_for_a_finite_push(direction: str) -> None:
    logits = torch.zeros(2, 5, requires_grad=True)
    sure = torch.tensor([[0.0], [0.0]])  # probability 1 for one id, and nothing left for the rest
    values = topk_kl(
        logits, torch.tensor([[1], [1]]), sure, torch.tensor([2]), divergence=DIVERGENCES[direction], min_tail=1e-6
    )
    values.sum().backward()
    assert torch.isfinite(values).all() and torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] < 0 < logits.grad[0, 0]
    assert values[1].item() <= math.log(5) + math.log(1e6)


def test_what_stands_on_tokens_that_are_not_trained_is_never_looked_at() -> None:
    logits, ids, known, _, _ = case(5, [4, 3], k=3)
    mask = torch.tensor([False, True, False, True, False, False, True])
    broken, odd = known.clone(), ids.clone()
    broken[~mask], odd[~mask] = math.nan, 0
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    sizes = torch.tensor([4, 3])
    values = topk_kl(found, odd, broken, sizes, loss_mask=mask)
    expected = torch.where(mask, topk_kl(wanted, ids, known, sizes), 0.0)
    assert torch.equal(values, expected)
    values.sum().backward()
    expected.sum().backward()
    assert torch.equal(found.grad, wanted.grad)


def test_widens_one_chunk_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 256, 1000, generator=generator).to(torch.bfloat16).requires_grad_()
    known, ids = torch.randn(256, 1000, generator=generator).log_softmax(-1).topk(8)
    with LargestFloat32() as largest:
        values = topk_kl(logits, ids, known, torch.tensor([256]), chunk=16)
        values.sum().backward()
    assert largest.numel <= 16 * 1000 and values.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("ids", "known", "words"),
    [
        ((4, 2), (4, 3), r"logits \(1, 4, 8\) for ids \(4, 2\) and log-probabilities \(4, 3\) of a teacher"),
        ((3, 2), (3, 2), "give one row"),
        ((4,), (4,), "give one row"),
        ((4, 9), (4, 9), "k must be from 1 to the vocabulary, 8"),
    ],
)
def test_shapes_that_do_not_fit_are_named(ids: Any, known: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        topk_kl(torch.zeros(1, 4, 8), torch.zeros(ids, dtype=torch.int64), torch.zeros(known), torch.tensor([4]))


def test_tokens_of_distillation_and_of_policy_gradient_share_a_micro_batch() -> None:
    logits, ids, known, _, _ = case(7, [3, 3], k=3)
    logits.requires_grad_()
    mask = torch.tensor([False, True, True, False, True, True])
    columns = {
        "loss_mask": mask,
        "logprobs": torch.zeros(6, dtype=torch.float64),
        "advantages": torch.ones(6, dtype=torch.float64),
        "rl_weights": torch.tensor([1.0, 1, 1, 0, 0, 0]),
        "ref_kl_weights": torch.tensor([0.0, 0, 0, 1, 1, 1]),
        "teacher_kl": topk_kl(logits, ids, known, torch.tensor([3, 3]), loss_mask=mask),
    }
    terms = ByMode(ref_kl=TeacherKl())(columns, torch.zeros(6, dtype=torch.float64))
    assert torch.equal(terms.parts["ref_kl"][3:], columns["teacher_kl"][3:]) and not terms.parts["ref_kl"][:3].any()
    assert terms.ratio is not None and terms.ratio.isnan().tolist() == [False, False, False, True, True, True]
    terms.mean(Denominators(loss_tokens=4, rl_tokens=2, ref_kl_tokens=2)).backward()
    assert logits.grad is not None and (logits.grad != 0).any(-1).tolist() == [False] * 3 + [True, True, False]


def test_a_loss_without_the_divergence_says_what_is_missing() -> None:
    with pytest.raises(InvalidInput, match="TeacherKl: the micro-batch has no column 'teacher_kl'"):
        TeacherKl()({"loss_mask": torch.tensor([True])}, torch.zeros(1))
    with pytest.raises(InvalidInput, match=r"teacher_kl: shape \[1, 2\] for a loss_mask \[2\]"):
        TeacherKl()({"loss_mask": torch.ones(2, dtype=torch.bool), "teacher_kl": torch.zeros(1, 2)}, torch.zeros(2))


# ------------------------------------------------------------------ from columns to the loss


def distilled(name: str, seed: int, *, k: int = 3, teacher: str = "", **more: Any) -> tuple[ps.Sample, Any, Any]:
    """A sample of five tokens with a teacher's k best ids, two of them context; the ids and log-probabilities."""
    _, ids, known, _, _ = case(seed, [5], k, vocabulary=11)
    best, logprobs = ids.numpy().astype(np.uint32), known.numpy().astype(np.float32)
    suffix = f"_{teacher}" if teacher else ""
    columns = {f"teacher_topk_ids{suffix}": best, f"teacher_topk_logprobs{suffix}": logprobs}
    given_columns: dict[str, Any] = {"columns": columns} if teacher else columns
    base: dict[str, Any] = {"token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1], "logprobs": -np.ones(5)}
    return ps.Sample(id=name, **base, **given_columns, **more), ids, torch.from_numpy(logprobs)


@pytest.mark.parametrize("teacher", ["", "math"])
def test_a_teachers_columns_reach_the_loss_through_frames_and_packing(teacher: str) -> None:
    first, ids, known = distilled("a", 1, teacher=teacher, mode="opd")
    second = ps.Sample(
        id="b", token_ids=[6, 7, 8], loss_mask=[0, 1, 1], logprobs=-np.ones(3), advantages=1.0, mode="rl"
    )
    packing: dict[str, Any] = {"ranks": 1, "seq_len": 16, "pad_to_multiple_of": 16}
    if teacher:
        packing["columns"] = teacher_topk(teacher)
    (batch,) = ps.pack(ps.decode(ps.encode([first, second])), **packing).ranks[0]
    tensors = to_torch(batch)
    logits = torch.randn(16, 11, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = kl_to_teacher(logits, tensors, teacher=teacher, divergence=reverse_kl)
    at = batch.segments.ids.index("a")
    own = slice(int(batch.segments.offsets[at]), int(batch.segments.offsets[at]) + 5)
    alone = topk_kl(logits[own], ids, known, torch.tensor([5]), divergence=reverse_kl)
    assert torch.allclose(found[own][2:], alone[2:])
    assert int((found != 0).sum()) == 3  # the policy-gradient sample, context and padding have no divergence
    terms = ByMode(ref_kl=TeacherKl())({**tensors, "teacher_kl": found}, torch.zeros(16))
    terms.mean(Denominators(loss_tokens=5, rl_tokens=2, ref_kl_tokens=3)).backward()
    assert torch.allclose(terms.parts["ref_kl"].sum(), alone[2:].sum())
    assert (logits.grad != 0).any(-1).nonzero()[:, 0].tolist() == [own.start + 1, own.start + 2, own.start + 3]


def test_a_teacher_that_is_missing_is_named_where_it_should_train_something() -> None:
    columns = {"loss_mask": torch.tensor([False, True]), "sequence_lengths": torch.tensor([2])}
    with pytest.raises(InvalidInput, match="kl_to_teacher: the micro-batch has no column 'teacher_topk_ids_maths'"):
        kl_to_teacher(torch.zeros(2, 5), columns, teacher="maths")
    nothing = {**columns, "ref_kl_weights": torch.zeros(2)}
    assert kl_to_teacher(torch.zeros(2, 5), nothing, teacher="maths").tolist() == [0.0, 0.0]

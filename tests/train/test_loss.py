"""Losses against hand-computed values and against the plain float64 reference, masks included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Sample
from penstock.errors import InvalidInput
from penstock.packing import pack
from penstock.packing.accounting import Denominators
from tests.support import reference_step as plain
from tests.support.reference_step import Outcome, Token

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from penstock.train.loss import (  # noqa: E402
    ByMode,
    Dppo,
    Grpo,
    Ipo,
    Loss,
    Opd,
    RefKl,
    Sft,
    measure_gap,
)
from penstock.train.tensors import to_torch  # noqa: E402

RULES: dict[str, tuple[Loss, Callable[[Token], Outcome]]] = {
    "dppo": (Dppo(), plain.dppo),
    "dppo, other thresholds": (Dppo(high=0.05, low=0.4, kl_tau=0.1), lambda t: plain.dppo(t, 0.05, 0.4, 0.1)),
    "ipo": (Ipo(), plain.ipo),
    "opd": (Opd(), plain.opd),
    "ref_kl": (RefKl(), plain.ref_kl),
    "ppo": (Grpo(), plain.ppo),
    "grpo": (Grpo(low=0.1, high=0.3, beta=0.05), lambda t: plain.ppo(t, 0.3, 0.1, 0.05)),
    "sft": (Sft(), plain.sft),
}

probability = st.floats(1e-6, 1.0).map(math.log)
tokens = st.builds(
    Token,
    trained=st.booleans(),
    trainer=probability,
    sampler=probability,
    advantage=st.sampled_from([0.0, 0.0, 1.5, -0.7]) | st.floats(-3, 3),
    teacher=probability,
    rl=st.sampled_from([0.0, 1.0, 0.5]),
    ce=st.sampled_from([0.0, 1.0, 0.25]),
    ref_kl=st.sampled_from([0.0, 1.0, 2.0]),
)


def columns_of(row: list[Token]) -> dict[str, Any]:
    """The tensors a micro-batch of these tokens would give, in float64 so that nothing is lost to rounding."""

    def column(name: str) -> Any:
        return torch.tensor([[getattr(token, name) for token in row]], dtype=torch.float64)

    return {
        "loss_mask": torch.tensor([[token.trained for token in row]]),
        "logprobs": column("sampler"),
        "advantages": column("advantage"),
        "teacher_logprobs": column("teacher"),
        "rl_weights": column("rl"),
        "ce_weights": column("ce"),
        "ref_kl_weights": column("ref_kl"),
    }


def trainer_of(row: list[Token]) -> Any:
    return torch.tensor([[token.trainer for token in row]], dtype=torch.float64, requires_grad=True)


@pytest.mark.deep
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60)
@given(row=st.lists(tokens, min_size=1, max_size=12))
def test_every_loss_equals_the_plain_reference_with_its_masks(name: str, row: list[Token]) -> None:
    loss, reference = RULES[name]
    terms: Any = loss(columns_of(row), trainer_of(row))
    expected = [reference(token) for token in row]
    assert terms.loss.flatten().tolist() == pytest.approx([o.loss for o in expected], rel=1e-9, abs=1e-9)
    if name == "sft":
        assert terms.masked is terms.log_ratio is None
        return
    for mask in ("masked", "masked_high", "masked_low"):
        assert getattr(terms, mask).flatten().tolist() == [getattr(o, mask) for o in expected]
    for measure in ("log_ratio", "ratio", "mismatch_kl", "prob_delta"):
        want = [plain.gap(token)[measure] for token in row]
        assert getattr(terms, measure).flatten().tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(row=st.lists(tokens, min_size=1, max_size=8))
def test_a_masked_token_has_no_gradient_but_that_of_the_regularizer(name: str, row: list[Token]) -> None:
    """Exported masks are what was applied: the derivative of the loss is that of the reference by differences."""
    loss, reference = RULES[name]
    trainer = trainer_of(row)
    loss(columns_of(row), trainer).loss.sum().backward()
    for token, slope in zip(row, trainer.grad.flatten().tolist(), strict=True):
        near = [_moved(token, 1e-6 * side) for side in (-1, 1)]
        if not token.trained:
            assert slope == 0.0
        elif len({reference(t).masked for t in (token, *near)}) == 1 and name not in ("opd", "ref_kl"):
            # (a teacher's signal is detached, so differences of it are not the gradient)
            want = (reference(near[1]).loss - reference(near[0]).loss) / 2e-6
            assert slope == pytest.approx(want, rel=1e-4, abs=1e-4)


def _moved(token: Token, by: float) -> Token:
    names = ("trained", "sampler", "advantage", "teacher", "rl", "ce", "ref_kl")
    return Token(trainer=token.trainer + by, **{name: getattr(token, name) for name in names})


def test_dppo_by_hand() -> None:
    """Six trained tokens, one for each case of the rule, computed on paper."""
    trainer = torch.tensor([0.9, 0.9, 0.1, 0.1, 0.1, 0.5]).log()
    columns = {
        "loss_mask": torch.tensor([True] * 6),
        "logprobs": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.5]).log(),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 2.0]),
    }
    terms: Any = Dppo(kl_tau=0.0)(columns, trainer)
    #          up, rose: masked   down, rose: kept   up, fell: kept   down, fell: masked   no push, fell   same
    assert terms.masked.tolist() == [True, False, False, True, True, False]
    assert terms.masked_high.tolist() == [True, False, False, False, False, False]
    assert terms.masked_low.tolist() == [False, False, False, True, False, False]
    assert terms.loss.tolist() == pytest.approx([0.0, 1.8, -0.2, 0.0, 0.0, -2.0])
    assert terms.prob_delta.tolist() == pytest.approx([0.4, 0.4, -0.4, -0.4, -0.4, 0.0])
    assert terms.mismatch_kl[0].item() == pytest.approx(1.8 - 1 - math.log(1.8))


def test_thresholds_are_strict() -> None:
    """A token exactly on the threshold is kept: 0.75 - 0.5 = 0.25 has no rounding in it."""
    columns = {
        "loss_mask": torch.tensor([True, True]),
        "logprobs": torch.tensor([0.5, 0.5], dtype=torch.float64).log(),
        "advantages": torch.tensor([1.0, 1.0]),
    }
    trainer = torch.tensor([0.75, 0.75 + 1e-9], dtype=torch.float64).log()
    delta = measure_gap(trainer, columns["logprobs"]).prob_delta
    exact = float(delta[0])
    terms: Any = Dppo(high=exact)(columns, trainer)
    assert terms.masked.tolist() == [False, True]


def test_an_advantage_that_is_not_a_number_takes_the_lower_side() -> None:
    columns = {
        "loss_mask": torch.tensor([True, True]),
        "logprobs": torch.tensor([0.1, 0.9]).log(),
        "advantages": torch.tensor([math.nan, math.nan]),
    }
    terms: Any = Dppo()(columns, torch.tensor([0.9, 0.1]).log())
    assert terms.masked.tolist() == [False, True]
    assert not terms.masked_high.any() and not terms.masked_low.any()


def test_opd_ignores_configured_thresholds_and_the_advantage() -> None:
    columns = {
        "loss_mask": torch.tensor([True]),
        "logprobs": torch.tensor([0.5]).log(),
        "advantages": torch.tensor([-5.0]),
        "teacher_logprobs": torch.tensor([0.95]).log(),
    }
    terms: Any = ByMode(rl=Dppo(high=0.9, low=0.9))(
        {**columns, "rl_weights": torch.zeros(1), "ce_weights": torch.zeros(1), "ref_kl_weights": torch.ones(1)},
        torch.tensor([0.75]).log(),
    )
    assert terms.masked_high.tolist() == [True]  # 0.25 > 0.2, and the teacher pushes up
    assert terms.rule("opd") == {"kind": "opd", "high": 0.2, "low": 0.2}
    assert terms.rule("rl") == {"kind": "dppo", "high": 0.9, "low": 0.9}


@settings(max_examples=80)
@given(row=st.lists(tokens, min_size=1, max_size=12))
def test_mixed_modes_are_the_weighted_sum_of_their_losses_over_their_own_counts(row: list[Token]) -> None:
    counts = {name: sum(t.trained and getattr(t, name) != 0 for t in row) for name in ("rl", "ce", "ref_kl")}
    terms: Any = ByMode()(columns_of(row), trainer_of(row))
    denominators = Denominators(rl_tokens=counts["rl"], ce_tokens=counts["ce"], ref_kl_tokens=counts["ref_kl"])
    assert terms.mean(denominators).item() == pytest.approx(plain.mean_loss(row, counts), rel=1e-9, abs=1e-9)
    for name in ("masked", "masked_high", "masked_low"):
        want = [
            (t.rl != 0 and getattr(plain.dppo(t), name)) or (t.ref_kl != 0 and getattr(plain.opd(t), name)) for t in row
        ]
        assert getattr(terms, name).flatten().tolist() == want
    compared = [not math.isnan(value) for value in terms.log_ratio.flatten().tolist()]
    assert compared == [t.rl != 0 or t.ref_kl != 0 for t in row]


@pytest.mark.parametrize("mode", ["sft", "opd"])
def test_a_step_without_policy_gradient_needs_none_of_its_columns(mode: str) -> None:
    known: dict[str, Any] = {} if mode == "sft" else {"logprobs": [0.0, -0.5], "teacher_logprobs": [0.0, -0.75]}
    step = pack([Sample(token_ids=[1, 2], loss_mask=[0, 1], mode=mode, **known)], ranks=1, seq_len=4)
    (batch,) = step.ranks[0]
    trainer = torch.tensor([0.0, -1.0], requires_grad=True)
    columns = to_torch(batch)
    found, alone = ByMode()(columns, trainer), (Sft() if mode == "sft" else Opd())(columns, trainer)
    assert found.mean(step.denominators).item() == alone.loss.sum().item() != 0
    assert (found.ratio is None) == (mode == "sft")


def test_policy_gradient_without_its_columns_is_an_error_that_names_them() -> None:
    for columns in ({}, {"rl_weights": torch.tensor([0.0, 1.0]), "ce_weights": torch.zeros(2)}):
        with pytest.raises(InvalidInput, match="Dppo: the micro-batch has no column 'logprobs'"):
            ByMode()({"loss_mask": torch.tensor([False, True]), **columns}, torch.zeros(2))


def test_what_stands_on_context_never_reaches_loss_or_gradient() -> None:
    columns = {
        "loss_mask": torch.tensor([False, True]),
        "logprobs": torch.tensor([math.nan, -1.0]),
        "advantages": torch.tensor([1.0, 1.0]),
        "teacher_logprobs": torch.tensor([math.nan, -1.0]),
    }
    for loss in (Dppo(), Ipo(), Opd(), RefKl(), Grpo(beta=0.1), Sft()):
        trainer = torch.tensor([-math.inf, -1.0], requires_grad=True)
        terms = loss(columns, trainer)
        terms.loss.sum().backward()
        assert terms.loss[0] == 0.0 and torch.isfinite(terms.loss).all()
        assert trainer.grad[0] == 0.0 and torch.isfinite(trainer.grad).all()


def test_an_overflown_ratio_of_a_masked_token_is_harmless() -> None:
    columns = {
        "loss_mask": torch.tensor([True]),
        "logprobs": torch.tensor([-120.0]),
        "advantages": torch.tensor([1.0]),
    }
    trainer = torch.tensor([-0.1], requires_grad=True)
    terms: Any = Dppo(kl_tau=0.0)(columns, trainer)
    terms.loss.sum().backward()
    assert terms.masked.item() and terms.loss.item() == 0.0 and trainer.grad.item() == 0.0
    assert terms.ratio.item() == math.inf


def test_a_step_without_trained_tokens_has_loss_zero() -> None:
    columns = {"loss_mask": torch.tensor([False]), "logprobs": torch.zeros(1), "advantages": torch.zeros(1)}
    for loss in (Dppo(), ByMode()):
        trainer = torch.tensor([-1.0], requires_grad=True)
        value = loss(columns, trainer).mean(Denominators())
        value.backward()
        assert value.item() == 0.0 and trainer.grad.item() == 0.0


def test_a_loss_of_a_step_that_counts_no_token_is_an_error_not_zero() -> None:
    columns = {"loss_mask": torch.tensor([True]), "logprobs": torch.zeros(1), "advantages": torch.ones(1)}
    for loss, name in ((Dppo(), "loss"), (ByMode(), "rl")):
        terms = loss(columns, torch.tensor([-0.1], requires_grad=True))
        with pytest.raises(
            InvalidInput, match=f"terms.{name}: not 0, but the step's denominators count no {name} token"
        ):
            terms.mean(Denominators())


def test_a_missing_column_is_named() -> None:
    columns = {"loss_mask": torch.tensor([True]), "logprobs": torch.zeros(1)}
    with pytest.raises(InvalidInput, match="Dppo: the micro-batch has no column 'advantages'"):
        Dppo()(columns, torch.zeros(1))
    with pytest.raises(InvalidInput, match="'teacher_logprobs'"):
        ByMode()({**columns, "advantages": torch.zeros(1), "ref_kl_weights": torch.ones(1)}, torch.zeros(1))


def test_k3_keeps_its_digits_where_trainer_and_sampler_nearly_agree() -> None:
    """In float32, ratio - 1 - log_ratio at 1e-4 is off by more than half; here it is within one percent."""
    gap = measure_gap(torch.tensor([-1.0 + 1e-4]), torch.tensor([-1.0]))
    log_ratio = float(gap.log_ratio)
    assert float(gap.mismatch_kl) == pytest.approx(math.expm1(log_ratio) - log_ratio, rel=0.01)
    assert float(measure_gap(torch.zeros(1), torch.zeros(1)).mismatch_kl) == 0.0

"""Through any file format and back: what a format holds comes back, and what does not was counted by name.

Formats that hold everything give every bit back. Others are held to this: each column of each sample is the same on the
tokens that are trained, or the report names it; and a file that was read and written again says the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import penstock as ps
from penstock.arrays import Ragged
from penstock.arrays.columns import COLUMNS
from penstock.integrations.formats.file_formats import FORMATS, Conversion, convert_files
from penstock.integrations.formats.shared import Options, one_number
from penstock.testing.strategies import batches
from tests.support.reference import record

pytestmark = pytest.mark.deep

EVERYTHING = ("frames", "jsonl", "parquet")
ENDINGS = {
    "frames": "a.penstock",
    "jsonl": "a.jsonl",
    "parquet": "a.parquet",
    "slime": "a.pt",
    "trl": "a.trl.jsonl",
    "verl": "a.npz",
    "prime-rl": "rollouts",
}
OTHERS = tuple(name for name in ENDINGS if name not in EVERYTHING)
FACTS = ("group", "prompt", "env", "run", "mode", "policy_version")
slow = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def trains_by_policy_gradient_alone(sample: ps.Sample) -> bool:
    neutral = {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0}
    return all(name not in sample or (sample[name][sample.loss_mask] == one).all() for name, one in neutral.items())


def convert(folder: Path, source: str, target: str, name: str) -> tuple[str, Conversion]:
    """The file in another format, in a folder of its own."""
    out = folder / name / ENDINGS[target]
    out.parent.mkdir()
    return str(out), convert_files([source], str(out), target=target)


def put(folder: Path, samples: list[ps.Sample]) -> str:
    with (folder / "in.penstock").open("wb") as file:
        from penstock.frames import write_frames

        write_frames(file, samples)
    return str(folder / "in.penstock")


def read(path: str) -> list[ps.Sample]:
    from penstock.integrations.formats.file_formats import format_to_read
    from penstock.integrations.formats.shared import Lost, Place

    kind = format_to_read(Place(path))
    assert kind.read is not None
    return list(kind.read(Place(path), Lost(), Options()))


def test_every_format_that_can_be_written_is_tested_here() -> None:
    assert set(ENDINGS) == {kind.name for kind in FORMATS.values() if kind.write is not None}


@pytest.mark.parametrize("through", EVERYTHING)
@slow
@given(samples=batches())
def test_a_format_that_holds_everything_gives_every_bit_back(through: str, samples: list[ps.Sample]) -> None:
    samples = [one_nan(sample) for sample in samples] if through == "jsonl" else samples
    with tempfile.TemporaryDirectory() as name:
        there, done = convert(Path(name), put(Path(name), samples), through, "there")
        back, again = convert(Path(name), there, "frames", "back")
        assert not done.lost and not again.lost
        found = read(back)
    assert found == samples and [list(sample) for sample in found] == [list(sample) for sample in samples]
    for a, b in zip(found, samples, strict=True):
        assert all(a.own[name].is_like(column) for name, column in b.own.items())


def one_nan(sample: ps.Sample) -> ps.Sample:
    """The sample with every NaN the same: JSON has one."""

    def plain(cells: Any) -> Any:
        if isinstance(cells, Ragged):
            return Ragged(plain(cells.values), cells.offsets)
        return np.where(np.isnan(cells), np.nan, cells).astype(cells.dtype) if cells.dtype.kind == "f" else cells

    own = {column: plain(sample[name]) for name, column in sample.own.items()}
    return sample.replace(**{n: plain(c) for n, c in sample.columns.items() if n not in sample.own}, columns=own)


@pytest.mark.parametrize("through", OTHERS)
@slow
@given(samples=batches())
def test_what_a_format_does_not_hold_is_counted_and_the_rest_comes_back(through: str, samples: list[ps.Sample]) -> None:
    with tempfile.TemporaryDirectory() as name:
        source = put(Path(name), samples)
        if through == "verl" and all(sample.images for sample in samples):
            return  # an empty batch cannot be told from one that was lost
        there, done = convert(Path(name), source, through, "there")
        if not (Path(there).exists()):
            assert through == "prime-rl" and sum(done.lost.left_out.values()) == len(samples)
            return
        back = read(there)
    assert len(back) + sum(done.lost.left_out.values()) == len(samples)
    kept = matched(samples, back, done)
    for given_sample, found in kept:
        for column in given_sample.columns:
            assert is_same(column, given_sample, found, through) or done.lost.unwritten[column], (column, done.lost)
        for fact in FACTS:
            value = getattr(given_sample, fact)
            renamed = (fact == "group" and through in ("trl", "slime")) or (fact == "mode" and through == "prime-rl")
            assert getattr(found, fact) == value or renamed or done.lost.unwritten[fact], (fact, done.lost)


def matched(samples: list[ps.Sample], back: list[ps.Sample], done: Conversion) -> list[tuple[ps.Sample, ps.Sample]]:
    """Each sample that came back, with the one it was."""
    if done.target != "trl":
        names = {sample.id: sample for sample in samples}
        return [(names[sample.id], sample) for sample in back]
    left = [s for s in samples if not s.images and "logprobs" in s and one_number(s, "advantages") is not None]
    left = [s for s in left if s.mode == "rl" and trains_by_policy_gradient_alone(s)]
    return list(zip(left, back, strict=True))


def is_same(name: str, a: ps.Sample, b: ps.Sample, through: str) -> bool:
    """Whether a column says the same where it is trained on."""
    cells, mask = a[name], a.loss_mask
    if name == "rewards" and np.isnan(cells).all():
        return "rewards" not in b or bool(np.isnan(b["rewards"]).all())  # NaN stands for none
    if name == "mm_token_type_ids" and not cells.any():
        return True
    if name not in b:
        return False
    found = b[name]
    if isinstance(cells, Ragged):
        return [row for row, m in zip(cells.tolist(), mask, strict=True) if m] == [
            row for row, m in zip(found.tolist(), mask, strict=True) if m
        ]
    if name in ("token_ids", "loss_mask"):
        return bool(np.array_equal(cells, found))
    if COLUMNS[name].trailing:
        end = -1 if through == "slime" else None  # no forward pass follows the last token
        return bool(np.array_equal(cells[:end], found[:end]))
    one, other = (np.broadcast_to(values, len(mask))[mask] for values in (cells, found))
    if name == "rewards" and (cells.ndim == 0) != (found.ndim == 0):
        return bool(np.isclose(cells[mask].sum() if cells.ndim else cells, found, rtol=1e-6).all())
    return bool(np.array_equal(one, other, equal_nan=True))


@pytest.mark.parametrize("through", OTHERS)
@pytest.mark.parametrize("neutral", EVERYTHING)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(samples=batches())
def test_a_file_that_went_through_a_neutral_form_says_what_it_said(
    through: str, neutral: str, samples: list[ps.Sample]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, plain = Path(name), [s for s in samples if not s.images and s.loss_tokens]
        if not plain:
            return
        first, done = convert(folder, put(folder, plain), through, "first")
        if sum(done.lost.left_out.values()) == len(plain):
            return
        middle, reading = convert(folder, first, neutral, "middle")
        second, _ = convert(folder, middle, through, "second")
        if through != "prime-rl":
            assert not reading.lost.unread
        one = {sample.id: record(sample) for sample in read(first)}
        assert {sample.id: record(sample) for sample in read(second)} == one


@pytest.mark.parametrize("source", tuple(ENDINGS))
@pytest.mark.parametrize("target", tuple(ENDINGS))
def test_tokens_masks_and_logprobs_survive_between_any_two_formats(source: str, target: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    samples = [plain_sample(rng, f"{g}/{i}", f"g{g}") for g in range(2) for i in range(3)]
    there, _ = convert(tmp_path, put(tmp_path, samples), source, "there")
    out = tmp_path / ENDINGS[target]
    rule = "grpo" if source == "slime" else None  # which has no advantages, and some others need them
    done = convert_files([there], str(out), target=target, options=Options(advantages=rule))
    assert not done.lost.left_out
    found = sorted(read(str(out)), key=lambda sample: bytes(sample.token_ids))
    for a, b in zip(sorted(samples, key=lambda sample: bytes(sample.token_ids)), found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.loss_mask.tolist() == b.loss_mask.tolist()
        assert a["logprobs"].tolist() == b["logprobs"].tolist()


def plain_sample(rng: np.random.Generator, name: str, group: str) -> ps.Sample:
    """A sample as most are: a prompt, a completion, one reward and one advantage."""
    prompt, completion = rng.integers(1, 9, 2).tolist()
    return ps.Sample.from_prompt(
        id=name,
        group=group,
        env="math",
        prompt_ids=rng.integers(0, 1000, prompt),
        completion_ids=rng.integers(0, 1000, completion),
        completion_logprobs=-rng.exponential(1, completion).astype(np.float32),
        advantages=float(np.float32(rng.normal())),
        rewards=float(np.float32(rng.normal())),
        policy_version=3,
    )

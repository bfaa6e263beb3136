"""The packer on its own: `assign`, and `penstock pack`, which compares it with others on the same lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.errors import InvalidInput
from penstock.packing import assign


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 9), st.integers(100, 400))
def test_every_sequence_once_within_the_cap_and_as_many_micro_batches_on_every_rank(
    lengths: list[int], ranks: int, cap: int
) -> None:
    found = assign(lengths, ranks=ranks, cap=cap)
    assert len(found) == ranks and len({len(rank) for rank in found}) == 1
    batches = [batch for rank in found for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= cap for batch in batches)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 11], r"lengths\[1\]: 11; must be from 1 to cap = 10"),
        ([0], r"lengths\[0\]: 0; must be"),
        ([1.5], "lengths: float64 of shape"),
        ([[1], [2]], r"lengths: int64 of shape \[2, 1\]; give one whole number per sequence"),
    ],
)
def test_lengths_that_cannot_be_packed_are_named(lengths: list[int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        assign(lengths, ranks=2, cap=10)


@pytest.mark.deep
def test_the_command_compares_packers_on_the_same_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, 200)
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, lengths)))
    words = ["pack", str(file), "--ranks", "8", "--cap", "1024", "--against", "verl,slime,prime-rl"]
    assert main([*words, "--plot", str(tmp_path / "step.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"200 sequences, {lengths.sum():,} tokens, 8 ranks, cap 1,024")
    assert [line.split()[0] for line in lines[3:]] == ["penstock", "verl", "slime", "prime-rl"]
    assert "<svg" in (tmp_path / "step.svg").read_text()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["penstock"]["waiting"] <= min(report["waiting"] for report in found.values())
    assert all(report["sequences"] == 200 for report in found.values())


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("1 2 x", [], "'x'; give whole numbers"),
        ("", [], "no lengths; give whole numbers"),
        ("1 2", ["--against", "slim"], "did you mean 'slime'?"),
        ("1 2000", [], "lengths[1]: 2000; must be from 1 to cap = 1024"),
    ],
)
def test_what_is_wrong_is_one_line(
    text: str, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    assert main(["pack", str(tmp_path / "lengths.txt"), "--ranks", "2", "--cap", "1024", *more]) == 1
    assert message in capsys.readouterr().err

"""The benchmark of the README's figures: every figure is one of the README, and is found among the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.claims import CLAIMS, Claim, checked
from benchmarks.report import Row, faster, skipped

README = " ".join((Path(__file__).parents[2] / "README.md").read_text().replace("**", "").split())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.quote)
def test_every_claim_is_in_the_readme(claim: Claim) -> None:
    assert claim.quote in README


def test_every_row_of_the_readme_with_a_benchmark_is_a_claim() -> None:
    rows = [line for line in README.split(" | |") if "`penstock bench " in line or "measure_trees" in line]
    named = {claim.bench for claim in CLAIMS}
    assert rows and named == {"path", "wire", "replay", "trees"}
    commands = {word.strip("`") for word in README.split("penstock bench ")[1:] for word in [word.split()[0]]}
    assert commands - {"claims", "--check"} <= named


def test_a_claim_is_met_missed_or_skipped() -> None:
    claim = Claim(quote="twice as fast", bench="path", row="text", rival="TransferQueue", figure=2.0)
    rows = [faster("text", 1.0, 9.0, "Ray"), faster("text, direct", 1.0, 2.5, "TransferQueue", target=3.0)]
    assert checked(claim, rows).ok is True
    assert checked(claim, [faster("text", 1.0, 1.9, "TransferQueue")]).ok is False
    absent = checked(claim, [skipped("text", "not installed", rival_name="TransferQueue", target=3.0)])
    assert (absent.ok, absent.skipped) == (None, "not installed")
    lost = checked(claim, [])  # its row was renamed
    assert lost.ok is False and "no row 'text'" in lost.note
    size = Claim(quote="1.5 MB", bench="wire", row="group", figure=1.5e6, value="ours")
    assert checked(size, [Row(name="group", ours=1.6e6, rival=2e6, rival_name="lists")]).ok is False

"""`make test` runs its parts side by side, and fails if any of them does."""

from __future__ import annotations

import sys

import pytest

from scripts.run_suite import IN_CHECKS, PARTS, ROOT, SLOW_TO_IMPORT, run

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("codes", "failed"), [((0, 0), ""), ((3, 0), "first"), ((0, 3), "second"), ((1, 2), "both")])
def test_a_part_that_fails_fails_the_suite(
    codes: tuple[int, int], failed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = {
        name: [sys.executable, "-c", f"print('{name} ran'); raise SystemExit({code})"]
        for name, code in zip(("first", "second"), codes, strict=True)
    }
    assert run(parts) == int(bool(failed))
    printed = capfd.readouterr().out
    assert "first ran" in printed and "second ran" in printed
    assert printed.endswith(f"failed: {failed.replace('both', 'first, second')}\n" if failed else "all passed\n")


def test_every_test_is_in_one_part() -> None:
    ignored = {word.removeprefix("--ignore=") for word in PARTS["tests"] if word.startswith("--ignore=")}
    assert ignored == {*SLOW_TO_IMPORT, *IN_CHECKS} and {*SLOW_TO_IMPORT} <= {*PARTS["integrations"]}
    assert all((ROOT / path).exists() for path in ignored)
    checks = (ROOT / "scripts" / "check").read_text().split()
    assert set(IN_CHECKS) <= {*checks} and PARTS["checks"][-1] == "scripts/check"

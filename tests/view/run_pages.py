"""What two runs wrote of their steps, and what their pages should show of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from penstock.view import Export, Record

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "pages"
STEPS = 60


def metrics(step: int, offset: float = 0.0) -> dict[str, Any]:
    """What a trainer writes of a step."""
    return {
        "step": step,
        "train/reward": offset + 1 - math.exp(-step / 30),
        "train/loss": math.sin(step),
        "train/grad_norm": 1 / step,
        "train/entropy": 2.4 - step / 60,
        "train/mismatch_kl": 0.001 * step,
        "train/max_log_ratio": 0.5,
        "train/masked": 0.01,
        "train/loss_tokens": 900 + step,
        "train/staleness": 1.5,
        "train/max_staleness": 3,
        "perf/step_s": 2.0,
        "perf/wait_s": 0.5,
        "perf/tokens": 2000,
        "perf/padding_tokens": 100,
        "perf/tokens_per_s": 1000 + step,
        "perf/waste": 0.05,
        "perf/memory_bytes": 4e8 + 1e6 * step,
        "mine/own_number": step * 2,
    }


def ledger(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "gen/accepted": 300 * step,
        "train/committed": 256 * step,
        "buffer/held": 40,
        "buffer/dropped/stale": 2 * step,
        "buffer/dropped/overflow": step,
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records(home: Path, step: int = 3) -> list[Record]:
    return list(Export(home).step(step, "alpha").records())


def keys(page: Any, title: str) -> dict[str, str]:
    """The names and values over a chart; a chart of one line has no name."""
    names_and_values: list[tuple[list[str], str]] = page.eval_on_selector_all(
        f'.chart:has([data-curve="{title}"]) .key',
        "all => all.map(e => [[...e.childNodes].map(n => n.textContent), e.lastChild.textContent])",
    )
    return {"".join(parts[:-1]): value for parts, value in names_and_values}


def address(page: Any, *wanted: str, without: str = "") -> str:
    """The page's address, once it has all of these; a browser changes it some time after a click."""
    has = "wanted => wanted.every(part => location.href.includes(part))"
    page.wait_for_function(has, arg=list(wanted))
    if without:
        page.wait_for_function("part => !location.href.includes(part)", arg=without)
    return str(page.evaluate("location.href"))

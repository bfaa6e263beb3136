"""Shows a run in progress: a page in the terminal (plain lines without one), and the viewer in the browser."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.demo.launch import Progress
from penstock.plane import Ledger
from penstock.server import redraws
from penstock.view import Export, Library, serving

_BLOCKS = "▁▂▃▄▅▆▇█"
_BESIDE_CURVE = 26
"""Columns that border, label and number take beside the reward curve."""


def sparkline(values: list[float], width: int) -> str:
    """Draw values from 0 to 1 as a line of blocks, averaged to fit `width`.

    >>> sparkline([0.0, 0.5, 1.0], 3)
    '▁▅█'
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / max(b - a, 1) for a, b in pairwise(edges)]
    last = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(max(round(m * last), 0), last)] for m in means)


@contextmanager
def screen(title: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a `Progress`."""
    if quiet:
        yield lambda _: None
    elif redraws(sys.stdout):
        try:
            from rich.live import Live
        except ImportError:
            yield _Lines()
            return
        with Live(refresh_per_second=8, transient=False) as live:
            yield lambda progress: live.update(page(progress, title=title, width=live.console.width))
    else:
        yield _Lines()


class _Lines:
    """Prints one line at the start and one every twenty steps."""

    def __init__(self) -> None:
        self._next, self._began = 1, False

    def __call__(self, progress: Progress) -> None:
        if not self._began:
            self._began = True
            print(progress.doing or "starting", flush=True)
        if not progress.rows or progress.rows[-1]["step"] < self._next:
            return
        row = progress.rows[-1]
        self._next = int(row["step"]) // 20 * 20 + 20
        print(
            f"step {row['step']:>4.0f}  reward {_recent(progress, 'train/reward')}"
            f"  staleness {_shown(row, 'train/staleness', '.1f')}  {_shown(row, 'perf/tokens_per_s', ',.0f')} tokens/s"
            f"  padding {_shown(row, 'perf/waste', '.1%')}  {progress.seconds:.0f} s",
            flush=True,
        )


def _recent(progress: Progress, name: str) -> str:
    """Format the mean over the last ten steps; a dash before the first."""
    values = _known(progress.rows[-10:], name)
    return f"{sum(values) / len(values):.3f}" if values else "-"


def _shown(row: Mapping[str, float | None], name: str, form: str) -> str:
    """Format a value; a dash where there is none, and for null, which is how NaN is written."""
    value = row.get(name)
    return "-" if value is None else format(value, form)


def _known(rows: list[dict[str, float]], name: str) -> list[float]:
    """Return the values that are not null. A step without rewards has null, for example."""
    return [row[name] for row in rows if row.get(name) is not None]


def killed(kills: dict[str, int]) -> str:
    """Say how many processes of each kind were killed.

    >>> killed({"rank": 2, "plane": 1})
    '1 plane, 2 ranks'
    """
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in sorted(kills.items()))


def page(progress: Progress, *, title: str = "penstock demo", width: int = 80) -> Any:
    """Build the terminal page with rich, for a terminal of `width` columns."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True, min_width=len("waits for"))
    table.add_column(overflow="fold")
    rewards = _known(progress.rows, "train/reward")
    last = progress.rows[-1] if progress.rows else {}
    status, ledger = progress.status, progress.status.get("ledger", {})
    table.add_row(
        "reward",
        Text(
            f"{_recent(progress, 'train/reward')}  {sparkline(rewards, max(width - _BESIDE_CURVE, 10))}",
            style="green",
        ),
    )
    table.add_row(
        "step",
        f"{_shown(last, 'step', '.0f')}   {progress.seconds:.0f} s   "
        f"{_shown(last, 'perf/tokens_per_s', ',.0f')} tokens/s",
    )
    table.add_row(
        "learning",
        f"entropy {_shown(last, 'train/entropy', '.2f')}   mismatch KL {_shown(last, 'train/mismatch_kl', '.1e')}   "
        f"clipped {_shown(last, 'train/masked', '.1%')}",
    )
    table.add_row(
        "buffer",
        f"{status.get('held_groups', '-')} groups held   staleness {_shown(last, 'train/staleness', '.1f')} versions   "
        f"padding {_shown(last, 'perf/waste', '.1%')}",
    )
    table.add_row("waits for", progress.doing or str(status.get("waiting_for", "the plane")))
    table.add_row("ledger", str(Ledger.from_dict(ledger)) if ledger else "-")
    if progress.kills:
        table.add_row("killed", Text(killed(progress.kills), style="red"))
    return Panel(table, title=title, border_style="dim")


# ------------------------------------------------------------------ in the browser


@contextmanager
def live_page(folder: Path) -> Iterator[str]:
    """Serve the viewer for the run in a folder, from a thread of this process. Yields its URL with the token."""
    with serving(Library(exports={folder.name or "run": Export(folder, awaited=True)})) as (url, _, _):
        yield url


@contextmanager
def watched(folder: Path, *, quiet: bool) -> Iterator[None]:
    """Serve the viewer for a run and print its URL. With `quiet`, do neither: no one would learn the URL."""
    if quiet:
        yield
        return
    with live_page(folder) as url:
        print(f"Watch it: {url}", flush=True)
        yield

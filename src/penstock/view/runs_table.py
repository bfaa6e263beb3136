"""The table of runs: the state, last step, current reward and last change of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.view.library import Library
from penstock.view.plane_steps import EVALUATION
from penstock.view.run_files import FILES, rows_in

_CURVE = 60
"""Steps whose rewards are drawn beside the name."""
_REWARDS = ("train/reward", "reward")


def runs_table(library: Library) -> dict[str, Any]:
    """Return one row per run, and how many runs are left out."""
    rows = [
        _row(library, export["name"], run)
        for export in library.overview()["exports"]
        for run in export["runs"]
        if run["run"] != EVALUATION
    ]
    return {"runs": rows, "left_out": library.left_out}


def _row(library: Library, export: str, run: dict[str, Any]) -> dict[str, Any]:
    points = _rewards(library, export, run["run"])
    curve = [reward for _, reward in points if reward is not None]
    return {
        **{name: run[name] for name in ("run", "state", "last", "events")},
        "export": export,
        "step": max((step for step, _ in points), default=None),
        "reward": curve[-1] if curve else None,
        "curve": curve,
    }


def _rewards(library: Library, export: str, run: str) -> list[tuple[int, float | None]]:
    """Return (step, mean reward) of the last steps: from the run's metrics, else from its plane or its exports."""
    rows = _last_rows(library.home(export, run))
    if rows:
        return [(int(row["step"] or 0), _first(row, _REWARDS)) for row in rows]
    points = library.last_points(export, run, _CURVE)
    return [(point["step"], point["reward"]["mean"] if point["reward"] else None) for point in points]


def _first(row: dict[str, float | None], names: tuple[str, ...]) -> float | None:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _last_rows(home: Path) -> list[dict[str, float | None]]:
    rows: dict[float, dict[str, float | None]] = {}
    for row in rows_in(home / FILES[0]):
        rows[row["step"] or 0] = row
    return [rows[step] for step in sorted(rows)[-_CURVE:]]

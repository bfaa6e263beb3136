"""Pictures of a real demo run for the README: its last screen and its reward curve.

    penstock demo --folder runs/picture
    .venv/bin/python scripts/record_demo.py runs/picture

Writes docs/images/demo.svg and docs/images/reward.svg.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import matplotlib as mpl
from rich.console import Console

from penstock.demo.launch import Progress
from penstock.demo.screen import page
from penstock.view.run_files import Metrics

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = Metrics(folder / "metrics.jsonl").read()
    status = json.loads((folder / "status.json").read_text())
    status["waiting_for"] = "nothing: the run is over"
    seconds = sum(row["perf/step_s"] for row in rows)
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True)
    console.print(page(Progress(rows=rows, status=status, kills={}, seconds=seconds)))
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "demo.svg").write_text(console.export_svg(title="make demo"))
    curve([row["train/reward"] for row in rows], IMAGES / "reward.svg", "penstock demo: reverse three letters")


def curve(rewards: list[float], path: Path, title: str) -> None:
    """Draw the reward of each step and its mean over ten steps."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "penstock"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 2.6), layout="constrained")
    means = [sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="#9ab", linewidth=0.8, label="each step")
    axes.plot(steps, means, color="#174", linewidth=1.8, label="mean of ten")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title=title)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

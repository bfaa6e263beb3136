"""Draw docs/images/replay.svg: age and reuse of what is trained on, for each composition of a table.

    .venv/bin/python scripts/plot_replay.py        (needs the extra "view")

Generation makes 32 groups for every 16 that training takes, as long as nothing limits it, into a table of
256. Priorities are random. Everything is seeded: the picture is the same each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import WaitTimeout
from penstock.replay import Fifo, Freshest, Lifo, MinPriority, Prioritized, SamplesPerInsert, Table, Uniform

CAPACITY, MADE, TAKEN, STEPS = 256, 32, 16, 400
OLDEST = 512
TARGET = Path(__file__).parent.parent / "docs" / "images" / "replay.svg"

REUSED: dict[str, Any] = {"max_times_sampled": None}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "queue (the default)": {},
    "Fifo, drops the oldest": {"sampler": Fifo(), "remover": Fifo()},
    "Lifo, drops the oldest": {"sampler": Lifo(), "remover": Fifo()},
    "Uniform, reuse": {"sampler": Uniform(), "remover": Fifo(), **REUSED},
    "Prioritized, keeps the best": {"sampler": Prioritized(1.0), "remover": MinPriority(), **REUSED},
    "the same, at most 8 versions old": {
        "sampler": Prioritized(1.0),
        "remover": MinPriority(),
        "max_staleness": 8,
        **REUSED,
    },
    "Freshest, reuse": {"sampler": Freshest(), "remover": Fifo(), **REUSED},
    "Uniform, 2 samples per insert": {
        "sampler": Uniform(),
        "remover": Fifo(),
        "limiter": SamplesPerInsert(2.0, 64, 64.0, batch_size=TAKEN),
        **REUSED,
    },
}


def simulate(settings: dict[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ages of sampled groups in inserts, and how often each group that was accepted has been used."""
    table = Table(capacity=CAPACITY, **settings)
    rng = np.random.default_rng(0)
    ages, arrivals, num_made = [], [], 0
    for step in range(STEPS):
        table.advance(step)
        for _ in range(MADE):
            try:
                table.insert(num_made, None, priority=float(rng.random()), policy_version=step, timeout=0)
            except WaitTimeout:
                break  # held back: generation waits for the next step
            num_made += 1
        try:
            batch = table.sample(TAKEN, timeout=0)
        except WaitTimeout:
            continue
        ages.append(batch.ages)
        arrivals.append(batch.arrivals)
    settled = num_made // 2  # the first half fills the table; the last items have not had their chance
    uses = np.bincount(np.concatenate(arrivals), minlength=num_made + 1)[settled // 2 : num_made - CAPACITY]
    return np.concatenate(ages[STEPS // 4 :]), uses


def main() -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "replay"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(COMPOSITIONS), 2, figsize=(9, 1.25 * len(COMPOSITIONS)), sharex="col")
    for (name, settings), (left, right) in zip(COMPOSITIONS.items(), axes, strict=True):
        ages, uses = simulate(settings)
        left.hist(np.minimum(ages, OLDEST), bins=np.arange(0, OLDEST + 17, 16), color="#2b6cb0", density=True)
        left.set_title(f"{name}: mean age {ages.mean():.0f} inserts", fontsize=9, loc="left")
        shares = np.bincount(np.minimum(uses, 8), minlength=9) / len(uses)
        right.bar(range(9), shares, color=["#c53030"] + ["#2f855a"] * 8)
        right.set_title(f"{shares[0]:.0%} never used, {uses.mean():.1f} uses each", fontsize=9, loc="left")
        right.set_ylim(0, 1)
        left.set_yticks([])
        right.set_yticks([])
    axes[-1][0].set_xlabel(f"age when sampled, in inserts ({OLDEST}: or more)")
    axes[-1][1].set_xlabel("times used (8: eight or more)")
    figure.tight_layout()
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Draw docs/images/grpo.svg: the reward of examples/grpo.py, from what it prints.

python examples/grpo.py runs/grpo | .venv/bin/python -m scripts.plot_grpo
"""

from __future__ import annotations

import re
import sys

from scripts.record_demo import IMAGES, curve


def main() -> None:
    rewards = [float(found[1]) for line in sys.stdin if (found := re.search(r"reward ([\d.]+)", line))]
    curve(rewards, IMAGES / "grpo.svg", "examples/grpo.py: odd or even numbers, as the prompt asks")


if __name__ == "__main__":
    main()

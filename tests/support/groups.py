"""Small groups of samples derived from their name alone: the same name makes the same bytes anywhere."""

from __future__ import annotations

import zlib

import numpy as np

from penstock.arrays import Sample


def named_group(
    name: str, *, samples: int = 2, tokens: int = 6, policy_version: int | None = 0, run: str = "", env: str = ""
) -> list[Sample]:
    """The samples of one prompt, each `tokens` long, as a rollout worker would put them.

    >>> [sample.id for sample in named_group("prompt-1")]
    ['prompt-1/0', 'prompt-1/1']
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    prompt = rng.integers(0, 50_000, tokens // 2)
    length = tokens - len(prompt)
    return [
        Sample.from_prompt(
            id=f"{name}/{i}",
            group=name,
            run=run,
            env=env,
            policy_version=policy_version,
            prompt_ids=prompt,
            completion_ids=rng.integers(0, 50_000, length),
            completion_logprobs=-rng.random(length).astype(np.float32),
            advantages=float(i),
            rewards=float(i % 2),
        )
        for i in range(samples)
    ]

"""Sixteen answers to one prompt, to bytes and back."""

import numpy as np

import penstock as ps

rng = np.random.default_rng(0)
prompt, answers = rng.integers(0, 151_936, 1500), rng.integers(0, 151_936, (16, 500))
group = [
    ps.Sample.from_prompt(prompt_ids=prompt, completion_ids=answer, completion_logprobs=-rng.random(500), rewards=i % 2)
    for i, answer in enumerate(answers)
]
frame = ps.encode(group)
assert list(ps.decode(frame)) == group  # to the bit; the prompt is stored once
print(f"{sum(sample.num_tokens for sample in group):,} tokens in {len(frame):,} bytes")

"""Dynamic sampling (DAPO): drop groups whose rewards are all the same, generate more until the step is full."""

import torch

import penstock as ps
from penstock.convert import ZeroVariance

table = torch.nn.Embedding(10, 10)  # a "model": row t holds the logits of the token after t
optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
plane = ps.open("memory:", ranks=1, seq_len=64, groups_per_step=4, max_staleness=0)
source, generated, full = plane.source(rank=0), 0, 0
for version in range(20):
    while full < 4 * (version + 1):
        digit = generated % 4
        group = plane.group(f"after {digit}", policy_version=version, filters=[ZeroVariance()])
        for _ in range(8):
            chances = torch.distributions.Categorical(logits=table(torch.tensor([digit])))
            answer = chances.sample()
            turns = [ps.Turn([digit]), ps.Turn(answer.tolist(), logprobs=chances.log_prob(answer).tolist())]
            group.add(ps.Trajectory(turns=turns, reward=float(answer == digit + 1), env="count"))
        full, generated = full + bool(len(group.put())), generated + 1  # empty: the filter dropped it
    step = source.step(timeout=60)
    for batch in step:
        ids, mask, advantages = (ps.to_torch(batch)[name] for name in ("token_ids", "loss_mask", "advantages"))
        logprobs = table(ids[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        (-(logprobs * advantages[1:])[mask[1:]].sum() / step.loss_tokens).backward()
    optimizer.step(), optimizer.zero_grad(), source.commit(step, policy_version=version + 1)
source.flush()
outcomes = [event.outcome for event in plane.feedback()]  # the filtered groups are in it, with prompt and rewards
print(f"{generated} groups: {outcomes.count('trained')} trained, {outcomes.count('filtered')} filtered")
source.close(), plane.close()

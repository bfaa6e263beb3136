"""The smallest loop that learns: plain torch, one process, and the step's own denominator."""

import torch

import penstock as ps

table = torch.nn.Embedding(10, 10)  # a "model": row t holds the logits of the token after t
optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
plane = ps.open("memory:", ranks=1, seq_len=64, groups_per_step=4, max_staleness=0)  # 0: on-policy
source = plane.source(rank=0)
for version in range(30):
    for digit in range(4):
        with plane.group(f"after {digit}", policy_version=version) as group:
            for _ in range(8):
                chances = torch.distributions.Categorical(logits=table(torch.tensor([digit])))
                answer = chances.sample()
                turns = [ps.Turn([digit]), ps.Turn(answer.tolist(), logprobs=chances.log_prob(answer).tolist())]
                group.add(ps.Trajectory(turns=turns, reward=float(answer == digit + 1), env="count"))
    step = source.step(timeout=60)
    for batch in step:  # one row of several samples
        ids, mask, advantages = (ps.to_torch(batch)[name] for name in ("token_ids", "loss_mask", "advantages"))
        logprobs = table(ids[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]  # position t predicts token t + 1
        loss = -(logprobs * advantages[1:])[mask[1:]].sum() / step.loss_tokens  # over all ranks and micro-batches
        loss.backward()
    optimizer.step(), optimizer.zero_grad()
    source.commit(step, policy_version=version + 1)
    print(f"step {step.number} reward {step.numbers['gen/reward']:.2f}")
source.close(), plane.close()

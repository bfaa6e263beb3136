"""Put rollouts in, take a rank's step out, say that it is trained."""

import penstock as ps

plane = ps.open("memory:", ranks=1, seq_len=4096, groups_per_step=1)  # or a folder: durable; or tcp://host:port
with plane.group("prompt-17", policy_version=0) as group:  # complete, or cancelled as one
    for reward in (1.0, 0.0, 0.0, 1.0):
        prompt, answer = ps.Turn([11, 12, 13]), ps.Turn([21, 22], logprobs=[-0.3, -1.2])
        group.add(ps.Trajectory(turns=[prompt, answer], reward=reward, env="math"))

source = plane.source(rank=0)
step = source.step()  # waits until the step is packed for every rank
for batch in step:  # numpy columns; ps.to_torch(batch) for tensors
    print(batch["token_ids"], batch.sequence_lengths, step.loss_tokens)
source.commit(step)  # after the optimizer step

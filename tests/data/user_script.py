"""A typical program of a user, for type checkers: see tests/test_user_types.py. It is not run."""

import torch

import penstock as ps
from penstock.train import Grpo, Terms, register_attention, row_logprobs


def rollouts(plane: ps.Plane, prompt: list[int], answers: list[list[int]], version: int) -> None:
    with plane.group("prompt-17", policy_version=version) as group:
        for answer in answers:
            turns = [ps.Turn(prompt, role="user"), ps.Turn(answer, logprobs=[-0.5] * len(answer), temperatures=0.7)]
            group.add(ps.Trajectory(turns=turns, reward=1.0, env="math"))


def train(model: torch.nn.Module, step: ps.Step, exporter: ps.TokenExporter) -> float:
    total = 0.0
    loss = Grpo(high=0.28)
    batch: ps.MicroBatch
    for batch in step:
        tensors = ps.to_torch(batch)
        logprobs, entropy = row_logprobs(model, tensors)
        terms: Terms = loss(tensors, logprobs, entropy)
        terms.mean(step.denominators).backward()
        exporter.write(step, batch, terms, policy_version=step.number - 1)
        total += batch.loss_tokens / step.loss_tokens
    exporter.close_step(step, metrics={"share": total})
    return total


def main() -> None:
    name: str = register_attention()
    print(name)
    waits = ps.Timeouts(plane_s=600)
    plane = ps.open("runs/mine", ranks=1, seq_len=4096, groups_per_step=8, max_staleness=0, timeouts=waits)
    rollouts(plane, [1, 2], [[3, 4], [5]], plane.policy_version)
    with plane.source(rank=0) as source, ps.TokenExporter("runs/mine") as exporter:
        for step in source.steps(timeout=600):
            train(torch.nn.Linear(2, 2), step, exporter)
            source.commit(step, policy_version=step.number)
    print(plane.ledger.committed, plane.ledger)


if __name__ == "__main__":
    main()

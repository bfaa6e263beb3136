"""A game for tests: the second seat gets a turn only if the first one makes a legal move. Whoever forfeits pays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import verifiers.v1 as vf

from penstock.integrations.environments.verifiers_chat import ChatHarness

__all__ = ["ChatHarness", "Forfeits", "ForfeitsTasks"]


class Deal(vf.Task[vf.TaskData]):  # type: ignore[misc]
    pass


class ForfeitsTasks(vf.Taskset[Deal, vf.TasksetConfig]):  # type: ignore[misc]
    INFINITE = True

    def load(self) -> Iterator[Deal]:
        for i in count():
            yield Deal(vf.TaskData(idx=i, name=f"deal-{i}", prompt=None))


class Seats(vf.EnvConfig):  # type: ignore[misc]
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


def parse_action(reply: str, legal: tuple[str, ...]) -> str | None:
    """A move is legal if its bytes add up to an even number: half of what a model without training says."""
    return legal[0] if sum(reply.encode()) % 2 == 0 else None


class Forfeits(vf.Env[Seats]):  # type: ignore[misc]
    async def run(self, task: Deal, agents: Any) -> None:
        rules = vf.Task(vf.TaskData(idx=task.data.idx, prompt=None, system_prompt="Say something even."))
        async with agents.first.interaction(rules) as first, agents.second.interaction(rules) as second:
            said = await first.turn("First?")
            winner = 1
            if parse_action(said.last_reply or "", ("even",)):
                answered = await second.turn("Second?")
                winner = 0 if parse_action(answered.last_reply or "", ("even",)) is None else winner
        first.trace.record_reward("payoff", 1.0 if winner == 0 else -1.0)
        second.trace.record_reward("payoff", 1.0 if winner == 1 else -1.0)

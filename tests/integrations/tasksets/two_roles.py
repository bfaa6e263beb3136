"""An environment for tests with two agents that are trained, and one that is not."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

from penstock.integrations.environments.verifiers_chat import ChatHarness
from tests.integrations.tasksets.reverse_words import Reverse
from tests.integrations.tasksets.reverse_words import ReverseWords as Words

__all__ = ["ChatHarness", "TwoRoles", "TwoRolesWords"]


class TwoRolesWords(Words):
    pass


class Roles(vf.EnvConfig):  # type: ignore[misc]
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class TwoRoles(vf.Env[Roles]):  # type: ignore[misc]
    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: Reverse, agents: Any) -> None:
        for agent in (agents.solver, agents.critic, agents.judge):
            await agent.run(task)

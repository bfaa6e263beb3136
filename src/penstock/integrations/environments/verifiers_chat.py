"""A verifiers harness that chats in this process. It starts no program, so a rollout takes milliseconds.

Use it for tasks that are a conversation without tools. verifiers' own `null` harness starts a Python process per
rollout, which needs `uv`. Export it from the module of your taskset to make it the taskset's default:

    from penstock.integrations.environments.verifiers_chat import ChatHarness
    __all__ = ["MyTaskset", "ChatHarness"]

Or name it in the settings of any environment, by role: `--set agent.harness.id=penstock_chat`.
"""

from __future__ import annotations

from typing import Any

try:
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.integrations.environments.verifiers_chat", error) from None

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Sends one request per turn from this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002 - verifiers' proxy records the answer
        runtime: Any,  # noqa: ARG002 - no program runs in it
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        if mcp_urls:
            return vf.ProgramResult(
                1, "", f"ChatHarness: the task has tools ({', '.join(mcp_urls)}); use another harness"
            )
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with httpx.AsyncClient(timeout=None) as client:  # noqa: S113 - the rollout has its own deadline
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(0 if answer.is_success else 1, "", "" if answer.is_success else answer.text[:2000])

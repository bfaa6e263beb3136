"""Play episodes of a verifiers environment, in this process or on an env server.

    in this process    the environment is loaded here; its agents' programs run in their configured runtime
    env server         `verifiers.v1.serve` runs it elsewhere; only its tasks are loaded here

In both cases verifiers' train client calls the model: prompts are rendered to token ids here, and the endpoint
continues them (`/inference/v1/generate`), so that every sampled token has its id and log-probability.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.extras import missing

Play = Callable[[Any], Awaitable[Any]]
"""Plays one task and returns the finished episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Which environment, and where its agents run."""

    name: str
    """The taskset: the name of an installed package, or of a module in the current folder."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """verifiers' settings of the environment, as in its `[env]` table."""
    runtime: str = ""
    """Where agents' programs run: subprocess, docker, ...; empty: the environment's default."""
    server: str = ""
    """Address of an env server; empty: play in this process."""

    def load(self) -> Any:
        """Load verifiers' environment. Raises ConfigError for wrong settings."""
        vf = _verifiers()
        from penstock.integrations.environments import verifiers_chat

        # verifiers imports a harness by a name without dots: `agent.harness.id=penstock_chat`.
        sys.modules.setdefault("penstock_chat", verifiers_chat)
        from pydantic import ValidationError
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # find modules of the current folder, like `python -m`
        tables = _merged({"taskset": {"id": self.name}}, self.settings)
        try:
            config = resolve_env_config(tables)
            if self.runtime:
                # Which roles there are is known only after a first resolution.
                roles = [name for name, value in config if isinstance(value, vf.AgentConfig)]
                tables = _merged(tables, {role: {"runtime": {"type": self.runtime}} for role in roles})
                config = resolve_env_config(tables)
            return load_environment(config)
        except (ModuleNotFoundError, ValidationError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"environment {self.name!r}: {error}; give the name of an installed taskset, or of a module in this "
                "folder that exports one"
            ) from error

    @contextlib.asynccontextmanager
    async def playing(self, env: Any, model: Any) -> AsyncIterator[Play]:
        """Yield a function that plays one episode with the model."""
        if self.server:
            async with _remote(self.server, model) as play:
                yield play
            return

        async def play_here(task: Any) -> Any:
            (slot,) = env.slots(task)
            return await env.run_slot(slot, model)

        async with env.serving():
            yield play_here


def free_renderers() -> None:
    """Let the current event loop use the `renderers` package after another loop has used it.

    The package has one asyncio lock per process, bound to the first loop that waited for it (0.1.12).
    """
    from renderers import client

    client._max_prompt_len_lock = asyncio.Lock()


@contextlib.asynccontextmanager
async def _remote(address: str, model: Any) -> AsyncIterator[Play]:
    from verifiers.v1.serve.client import EnvClient

    client = EnvClient(address)
    try:
        if not await client.health(timeout=10):
            raise ConfigError(f"env server {address}: no answer within 10 s; start it, or leave the address out")
        yield lambda task: client.run(model.client, model.model, model.sampling, task.data.model_dump(mode="json"))
    finally:
        await client.close()


def model_context(
    *, endpoint: str, model: str, tokenizer: str, renderer: str, api_key_var: str, sampling: Mapping[str, Any]
) -> Any:
    """Return verifiers' model context: the endpoint, the renderer that makes token ids, the sampling settings."""
    vf = _verifiers()
    tables: dict[str, Any] = {
        "base_url": endpoint,
        "api_key_var": api_key_var,
        "renderer_model_name": tokenizer or model,
        **({"renderer": {"name": renderer}} if renderer else {}),
    }
    try:
        client = vf.TrainClientConfig.model_validate(tables)
        return vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig.model_validate(dict(sampling)))
    except ValueError as error:
        raise ConfigError(f"endpoint {endpoint}: {error}") from None


def tasks_of(env: Any, *, seed: int) -> Iterator[Any]:
    """Yield the environment's tasks forever, in another order each epoch. Unbounded tasksets keep their order."""
    taskset = env.taskset
    for epoch in itertools.count():
        found = False
        for task in taskset.shuffle(seed + epoch) if taskset.bounded else taskset:
            found = True
            yield task
        if not found:
            raise ConfigError(f"environment {env.config.env_id!r}: has no tasks; check its settings")


async def ask_endpoint(endpoint: str, *, api_key_var: str) -> dict[str, Any]:
    """Return the card of the endpoint's first model: `id`, and from some servers `policy_version`."""
    import httpx

    key = os.environ.get(api_key_var, "EMPTY")
    try:
        async with httpx.AsyncClient(timeout=30.0) as client:
            answer = await client.get(f"{endpoint.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"})
            answer.raise_for_status()
            card: dict[str, Any] = answer.json()["data"][0]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"endpoint {endpoint}: {type(error).__name__}: {error}; give the URL, ending in /v1, of a server with "
            "/inference/v1/generate, such as vLLM or `penstock rollouts endpoint`"
        ) from None
    return card


def _verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise missing("penstock rollouts verifiers", error) from None
    return vf


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables. Values of the second win.

    >>> _merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    out = dict(first)
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(out.get(name), Mapping)
        out[name] = _merged(out[name], value) if both else value
    return out

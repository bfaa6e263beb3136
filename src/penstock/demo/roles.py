"""What each process of a run does. The fork server imports this module, with torch, once before it forks them.

A rollout worker loads the latest weights, samples groups and puts them into the plane. It never waits for training: it
runs ahead of the trainer until the plane's tables are full, and then its puts wait. Groups carry the version of the
weights that sampled them, so that the trainer can correct for the difference and the plane can drop stale groups.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.capture import Trajectory, Turn
from penstock.client import Plane, plane_transport
from penstock.client import open as open_plane
from penstock.convert import Group, ZeroVariance, make_group
from penstock.demo.processes import ABORTED, REFUSED, address
from penstock.demo.tasks import Prompt, Task, make_task
from penstock.errors import ConfigError, Fenced, PeerError, PlaneLost, PutManyError
from penstock.plane import PlaneLoop, open_log
from penstock.train import TrainConfig, Weights, build_model, load, train
from penstock.view import TokenExporter


def run_role(name: str, folder: Path) -> int:
    """Run "plane", "rank-N", "worker-N" or "judge-N" of the run in a folder. Returns the exit code."""
    os.umask(0o077)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    role, _, index = name.partition("-")
    try:
        config = load(folder / "config.toml")
        if role == "plane":
            _serve(config)
        elif role == "worker":
            work(config, address(config), int(index))
        elif role == "judge":
            _judge(config)
        else:
            _train(config, int(index))
    except (PeerError, Fenced) as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return ABORTED
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _serve(config: TrainConfig) -> None:
    """Run the plane until SIGTERM. The run's own processes connect at `address`, others at `config.listen`."""
    urls = [address(config), *config.listen]
    # Before the socket is removed: this fails if another plane uses the folder, and the socket is that plane's.
    log = open_log(Path(config.folder) / "plane", config)
    Path(urls[0].partition("ipc://")[2]).unlink(missing_ok=True)
    transports = [plane_transport(url, config.keys, max_message=config.max_message_bytes) for url in urls]
    server = PlaneLoop(config, log, transports)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


def _judge(config: TrainConfig) -> None:
    """Score what workers put without rewards, until the process is killed."""
    assert config.task is not None
    task = make_task(config.task, Path(config.folder))
    with open_plane(address(config), timeouts=config.timeouts) as plane:
        for lease in plane.lacking("rewards", groups=32):
            rewards = {
                sample.id: task.reward(Prompt(sample.prompt, []), sample.token_ids[sample.loss_mask].tolist())
                for sample in lease.samples
            }
            lease.attach(rewards)


def _train(config: TrainConfig, index: int) -> None:
    """Run one rank of the trainer."""
    exporter = None
    if config.export_every:
        # The rendezvous port is new at each start of the ranks and the same for all of them.
        attempt = os.environ.get("MASTER_PORT", "")
        exporter = TokenExporter(
            config.folder, rank=index, world=config.ranks, every=config.export_every, attempt=attempt
        )
    train(config, rank=index, url=address(config), observer=exporter)


# ------------------------------------------------------------------ a rollout worker


def work(config: TrainConfig, url: str, index: int) -> None:
    """Generate until the process is killed."""
    torch.set_num_threads(1)
    assert config.task is not None
    folder = Path(config.folder)
    name = life_name(folder, config.seed, index)
    task = make_task(config.task, folder)
    rng = random.Random(f"{config.seed}/{name}")
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    policy = _Policy(config, Weights(folder / "weights"))
    with open_plane(url, timeouts=config.timeouts) as plane:
        number = 0
        while True:
            version = policy.refresh()
            groups = _generate(policy.model, task, config, version, rng, generator, f"{name}-{number}")
            _put(plane, [group for _, group in groups if len(group)])
            for prompt, group in groups:
                _discard(plane, task.name, prompt, group)
            number += 1


def life_name(folder: Path, seed: int, index: int) -> str:
    """Return a name for this start of a worker: s7-w1.0, after a restart s7-w1.1.

    Group ids begin with it, so two runs with the same seed have the same ids. A restarted worker samples other rollouts
    than before and must not repeat ids, so each start claims the next number by creating a file.
    """
    lives = folder / "workers"
    lives.mkdir(parents=True, exist_ok=True)
    for life in itertools.count():
        try:
            (lives / f"w{index}.{life}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return f"s{seed}-w{index}.{life}"
    raise AssertionError


class _Policy:
    """The model with the newest weights."""

    def __init__(self, config: TrainConfig, weights: Weights) -> None:
        self.model: Any = build_model(config.model, seed=config.seed).eval()
        self._weights = weights
        self._version = -1

    def refresh(self) -> int:
        """Load the newest weights and return their version. Waits for the first, published when the trainer starts."""
        while True:
            newest = self._weights.latest()
            if newest == self._version >= 0:
                return self._version
            state = None if newest < 0 else self._weights.load(newest)
            if state is not None:
                self.model.load_state_dict(state, strict=False)
                self._version = newest
                return newest
            time.sleep(0.05)


def _generate(
    model: Any,
    task: Task,
    config: TrainConfig,
    version: int,
    rng: random.Random,
    generator: torch.Generator,
    name: str,
) -> list[tuple[str, Group]]:
    """Return groups with the names of their prompts. Those that a filter dropped have no samples."""
    assert config.task is not None
    size, late = config.task.group_size, bool(config.late_columns)
    filters = (ZeroVariance(),) if config.task.dynamic_sampling else ()
    prompts = [task.prompt(rng) for _ in range(config.task.prompts_per_batch)]
    repeated = [prompt for prompt in prompts for _ in range(size)]
    rollouts = sample(
        model,
        [prompt.token_ids for prompt in repeated],
        max_new_tokens=task.max_new_tokens,
        eos=task.eos,
        generator=generator,
        top_p=config.task.top_p,
        banned=task.banned,
        first=task.model_inputs(repeated, model),
    )
    made = (
        make_group(
            [_trajectory(task, prompt, rollout, late=late) for rollout in rollouts[i * size : (i + 1) * size]],
            id=f"{name}-{i}",
            prompt=prompt.name,
            policy_version=version,
            advantage="grpo_std" if late else task.advantage,
            filters=filters,
        )
        for i, prompt in enumerate(prompts)
    )
    return [(prompt.name, group) for prompt, group in zip(prompts, made, strict=True)]


def _trajectory(task: Task, prompt: Prompt, rollout: Rollout, *, late: bool) -> Trajectory:
    return Trajectory(
        turns=[task.turn(prompt), answer_turn(rollout)],
        reward=None if late else task.reward(prompt, rollout.token_ids),
        env=task.name,
        truncated=not rollout.finished,
    )


def answer_turn(rollout: Rollout) -> Turn:
    """Return the model's answer as a turn, with the ids each token was sampled from."""
    return Turn(rollout.token_ids, logprobs=rollout.logprobs, sampling_mask=rollout.kept, role="assistant")


def _discard(plane: Plane, env: str, prompt: str, group: Group) -> None:
    """Count a group that a filter dropped, for the ledger and for feedback."""
    for reason, count in group.dropped.items():
        plane.discard(
            reason,
            count,
            key=f"{group.id}: {reason}",
            group=group.id,
            prompt=prompt,
            env=env,
            rewards=group.rewards.tolist(),
            lengths=group.rollouts.longest.tolist(),
        )


def _put(plane: Plane, groups: Sequence[Group]) -> None:
    try:
        plane.put_many(groups)
    except PutManyError as error:
        if any(isinstance(one, PlaneLost) for one in error.failed.values()):
            raise SystemExit("the plane is gone") from None
        raise


# ------------------------------------------------------------------ sampling


@dataclass(frozen=True, slots=True)
class Rollout:
    token_ids: list[int]
    """Up to and including the end token."""
    logprobs: list[float]
    """Normalized over `kept`."""
    kept: list[list[int]] | None
    """For each token the ids it was sampled from; None if from the whole vocabulary."""
    finished: bool
    """Whether the end token was sampled."""


def sample(
    model: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    eos: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 1.0,
    banned: tuple[int, ...] = (),
    first: dict[str, Any] | None = None,
) -> list[Rollout]:
    """Sample one completion per prompt, at `temperature`, from the likeliest ids that together reach `top_p`.

    Prompts must have one length: without padding the log-probabilities equal those the trainer computes. `banned` ids
    are never sampled. `first` is passed to the model with the prompt (images).
    """
    from transformers import DynamicCache

    ids, cache = torch.tensor(prompts), DynamicCache()
    done = torch.zeros(len(prompts), dtype=torch.bool)
    tokens, logprobs, kept, more = [], [], [], first or {}
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits[:, -1].float()
        if banned:
            logits[:, list(banned)] = float("-inf")
        logits /= temperature
        log_p = torch.log_softmax(logits, -1)
        if top_p < 1.0:
            inside = nucleus(log_p, top_p)
            log_p = torch.log_softmax(logits.masked_fill(~inside, float("-inf")), -1)
            kept.append([row.nonzero()[:, 0].tolist() for row in inside])
        ids = torch.multinomial(log_p.exp(), 1, generator=generator)
        tokens.append(ids[:, 0].clone())
        logprobs.append(log_p.gather(1, ids)[:, 0])
        done |= ids[:, 0] == eos
        more = {}
        if bool(done.all()):
            break
    rows, lps = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    sets = [[at[i] for at in kept] if kept else None for i in range(len(prompts))]
    return [_cut(row, lp, own, eos) for row, lp, own in zip(rows, lps, sets, strict=True)]


def nucleus(log_p: torch.Tensor, top_p: float) -> torch.Tensor:
    """[B, V] Mark the fewest likeliest ids whose probabilities add up to `top_p`, at least one.

    >>> nucleus(torch.tensor([[0.1, 0.6, 0.3]]).log(), 0.8).tolist()
    [[False, True, True]]
    """
    likeliest = log_p.exp().sort(-1, descending=True)
    # Mass before each id: 0.6 0.3 0.1 gives 0.0 0.6 0.9. The id that crosses top_p is kept, the one after it is not.
    before = likeliest.values.cumsum(-1) - likeliest.values
    return torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, likeliest.indices, before < top_p)


def _cut(tokens: list[int], logprobs: list[float], kept: list[list[int]] | None, eos: int) -> Rollout:
    end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
    return Rollout(tokens[:end], logprobs[:end], None if kept is None else kept[:end], eos in tokens)

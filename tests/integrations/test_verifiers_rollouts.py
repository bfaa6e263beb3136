"""Rollouts with the real verifiers package: episodes against a real model become groups of a plane, token for token."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import verifiers.v1 as vf
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.types import SamplingMask

import penstock as ps
from penstock.arrays import ImageSpan
from penstock.capture import from_chat_completions
from penstock.client import Plane
from penstock.demo.endpoint import Endpoint, Engine, save_model
from penstock.errors import ConfigError, PeerError
from penstock.integrations.environments import verifiers_rollouts
from penstock.integrations.environments.verifiers_rollouts import Environment, Rollouts, Tally
from penstock.train import kept_of, to_torch, token_logprobs
from penstock.train.checkpoint import Weights
from tests.capture.test_verifiers import branching_trace, empty_trace, image_trace, listed, record, reply, user
from tests.support.plane_processes import wait_until

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]
TASKSETS = Path(__file__).parent / "tasksets"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def endpoint(model: Path) -> Iterator[Endpoint]:
    with Endpoint(Engine(model)) as found:
        yield found


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.syspath_prepend(TASKSETS)
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=2) as found:
        yield found


def rollouts(served: Endpoint, **changes: Any) -> Rollouts:
    name = changes.pop("env", "reverse-words")
    settings = changes.pop("settings", {})
    base = Rollouts(
        environment=Environment(name=name, settings=settings, runtime="subprocess"),
        endpoint=served.url,
        sampling={"temperature": 0.7, "max_tokens": 5},
        group_size=4,
        groups=2,
        in_flight=4,
    )
    return replace(base, **changes)


def trainer_logprobs(model: Any, batch: ps.MicroBatch) -> Any:
    """Of every token of a row with one sample."""
    tensors = to_torch(batch)
    with torch.no_grad():
        logits = model(input_ids=tensors["token_ids"][None], use_cache=False).logits
    return token_logprobs(
        logits,
        tensors["token_ids"],
        tensors["sequence_lengths"],
        tensors.get("temperatures"),
        kept=kept_of(tensors),
    )[0].numpy()


# ------------------------------------------------------------------ the endpoint


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_p": 0.7}])
def test_the_endpoint_answers_with_tokens_and_the_logprobs_a_trainer_finds(
    endpoint: Endpoint, sampling: dict[str, float]
) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, **sampling}
    answer = httpx.post(f"{endpoint.url}/chat/completions", json=body, timeout=60).json()
    rollout = from_chat_completions([answer], reward=0.0, temperature=sampling.get("temperature"))
    assert rollout.turns[0].token_ids.tolist() == [1, 4, 5, 6, 3]
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1) as plane, plane.source(rank=0) as source:
        with plane.group("a") as group:
            group.add(rollout)
        (batch,) = source.step(timeout=60)
        mask = batch["loss_mask"]
        assert ("sampling_mask" in batch) == ("top_p" in sampling)
        found = trainer_logprobs(endpoint.engine.model, batch)
        np.testing.assert_allclose(found[mask], batch["logprobs"][mask], atol=1e-4)


def test_what_the_endpoint_cannot_do_it_refuses_with_a_reason(endpoint: Endpoint) -> None:
    url = f"{endpoint.url.removesuffix('/v1')}/inference/v1/generate"
    for body, said in (
        ({"token_ids": []}, "at least one"),
        ({"token_ids": [1, 99]}, "this model has 12"),
        ({"token_ids": [1] * 200}, "at most 127"),
        ({"token_ids": [1], "sampling_params": {"temperature": 0}}, "must be above 0"),
    ):
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_the_endpoint_takes_the_newest_weights_and_says_their_version(model: Path, tmp_path: Path) -> None:
    weights = Weights(tmp_path / "weights")
    engine = Engine(model, weights=weights.folder)
    state = {name: torch.zeros_like(tensor) for name, tensor in engine.model.state_dict().items()}
    with Endpoint(engine) as endpoint:
        assert httpx.get(f"{endpoint.url}/models", timeout=60).json()["data"][0]["policy_version"] == 0
        weights.publish(7, state)
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
        answer = httpx.post(f"{endpoint.url}/chat/completions", json=body, timeout=60).json()
        assert [at["logprob"] for at in answer["choices"][0]["logprobs"]["content"]] == pytest.approx([-np.log(12)] * 3)
        assert httpx.get(f"{endpoint.url}/models", timeout=60).json()["data"][0]["policy_version"] == 7


# ------------------------------------------------------------------ rollouts


def test_groups_of_an_environment_arrive_token_for_token(endpoint: Endpoint, plane: Plane) -> None:
    tally = rollouts(endpoint).run(plane)
    assert (tally.groups, tally.rollouts, tally.failed, tally.playing) == (2, 8, 0, 0)
    with plane.source(rank=0) as source:
        step = source.step(timeout=60)
        batches = list(step)
        assert sum(batch.sample_count for batch in batches) == 8
        assert {env for batch in batches for env in batch.segments.envs} == {"reverse-words"}
        assert {int(v) for batch in batches for v in batch.segments.policy_versions} == {0}
        words = {prompt for batch in batches for prompt in batch.segments.prompts}
        assert len(words) == 2 and all(len(word) == 3 for word in words)
    assert tally.tokens == sum(batch.sample_tokens for batch in batches)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.7}])
def test_the_trainer_finds_the_logprobs_that_the_endpoint_sampled_with(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, float]
) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    with ps.open("memory:", ranks=1, seq_len=64, max_samples=1, groups_per_step=1) as plane:
        rollouts(endpoint, groups=1, sampling={**sampling, "max_tokens": 5}).run(plane)
        with plane.source(rank=0) as source:
            for batch in source.step(timeout=60):
                mask = batch["loss_mask"]
                assert ("sampling_mask" in batch) == ("top_p" in sampling)
                found = trainer_logprobs(endpoint.engine.model, batch)
                np.testing.assert_allclose(found[mask], batch["logprobs"][mask], atol=1e-4)


def test_a_process_may_roll_out_against_one_endpoint_after_another(endpoint: Endpoint, plane: Plane) -> None:
    """Each run has an event loop of its own; the packages keep something of the first one."""
    rollouts(endpoint, groups=1, in_flight=4).run(plane)
    with Endpoint(endpoint.engine) as other:
        tally = rollouts(other, groups=1, in_flight=4).run(plane)
    assert (tally.rollouts, tally.failed, tally.last_failure) == (4, 0, "")


def test_no_more_episodes_are_at_play_than_allowed(endpoint: Endpoint, plane: Plane) -> None:
    most = 0

    def see(tally: Tally) -> None:
        nonlocal most
        most = max(most, tally.playing)

    job = rollouts(endpoint, groups=4, in_flight=3)
    tally = asyncio.run(job.arun(plane, on_change=see))
    assert tally.groups == 4 and 0 < most <= 3


def test_each_agent_that_is_trained_has_groups_of_its_own(endpoint: Endpoint, plane: Plane) -> None:
    tally = rollouts(endpoint, env="two-roles", groups=1).run(plane)
    assert (tally.groups, tally.rollouts) == (2, 8)
    with plane.source(rank=0) as source:
        prompts = [prompt for batch in source.step(timeout=60) for prompt in batch.segments.prompts]
    assert sorted(prompt.partition("/")[2] for prompt in prompts) == ["critic"] * 4 + ["solver"] * 4


def test_groups_for_evaluation_are_recorded_and_not_trained(endpoint: Endpoint, plane: Plane) -> None:
    rollouts(endpoint, groups=1, evaluation=True).run(plane)
    assert (plane.ledger.evaluation, plane.ledger.held) == (4, 0)


def test_an_env_server_gives_the_same_groups(endpoint: Endpoint, plane: Plane) -> None:
    """The environment runs on a server of the package, over its own wire."""
    local = rollouts(endpoint, groups=1)
    server = EnvServer(local.environment.load().config, address="tcp://127.0.0.1:0")
    started: threading.Event = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        started.set()
        await server.run()

    task = loop.create_task(serve())

    thread = threading.Thread(target=loop.run_until_complete, args=(task,), daemon=True)
    thread.start()
    assert started.wait(60)
    remote = replace(local, environment=replace(local.environment, server=server.address), groups=2)
    tally = remote.run(plane)
    assert (tally.groups, tally.rollouts, tally.failed) == (2, 8, 0)
    with plane.source(rank=0) as source:
        assert sum(batch.loss_tokens for batch in source.step(timeout=60)) > 0
    loop.call_soon_threadsafe(task.cancel)
    thread.join(30)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_a_full_plane_is_waited_for_and_nobody_plays_meanwhile(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=2, capacity=2) as plane:
        with rollouts(endpoint, groups=None).running(plane) as tally, plane.source(rank=0, prefetch=0) as source:
            wait_until(lambda: plane.ledger.held == 8 and tally.playing == 0)
            before = tally.groups
            for _ in range(2):  # the first may have left the table already
                source.commit(source.step(timeout=60))
            wait_until(lambda: tally.groups > before)
        assert tally.playing == 0  # the block has ended, and so has it
        assert plane.ledger.accepted >= 4 * tally.groups


def test_what_ends_rollouts_in_a_thread_is_raised_at_the_end_of_the_block(endpoint: Endpoint, plane: Plane) -> None:
    job = rollouts(endpoint, groups=None, settings={"taskset": {"broken": True}})
    with pytest.raises(PeerError, match="the grader is down"), job.running(plane) as tally:
        wait_until(lambda: "rollouts" not in {thread.name for thread in threading.enumerate()})
    assert tally.groups == 0
    with rollouts(endpoint, groups=1).running(plane) as tally:
        wait_until(lambda: tally.groups == 1)


def test_an_endpoint_that_goes_away_ends_it_after_some_groups_and_loses_none(model: Path, plane: Plane) -> None:
    with pytest.raises(PeerError, match="groups in a row have only failed rollouts"), ExitStack() as stack:
        with Endpoint(Engine(model)) as gone:
            tally = stack.enter_context(rollouts(gone, groups=None, max_failures=2).running(plane))
            wait_until(lambda: tally.groups >= 1)
        wait_until(lambda: "rollouts" not in {thread.name for thread in threading.enumerate()})
    assert plane.ledger.accepted >= tally.groups > 0 and tally.failed > 0


def test_rollouts_that_keep_failing_end_it_with_their_reason(endpoint: Endpoint, plane: Plane) -> None:
    tally = Tally()
    job = rollouts(endpoint, groups=None, settings={"taskset": {"broken": True}})
    with pytest.raises(PeerError, match=r"3 groups in a row have only failed rollouts.*grader is down"):
        job.run(plane, tally)
    assert tally.groups == 0 and tally.failed >= 12
    assert plane.ledger.discarded["rollout failed"] >= 12 and plane.ledger.accepted == 0
    assert all(event.outcome == "filtered" and event.prompt for event in plane.feedback())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"env": "no-such-taskset"}, r"environment 'no-such-taskset': .*give the name of an installed taskset"),
        ({"endpoint": "http://127.0.0.1:1/v1"}, r"endpoint http://127.0.0.1:1/v1: ConnectError.*rollouts endpoint"),
        ({"settings": {"taskset": {"wrods": 3}}}, r"environment 'reverse-words': .*wrods"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_played(
    endpoint: Endpoint, plane: Plane, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        rollouts(endpoint, **changes).run(plane)


def test_settings_that_cannot_be_are_refused(endpoint: Endpoint) -> None:
    for name in ("group_size", "in_flight", "groups", "max_failures"):
        with pytest.raises(ConfigError, match=f"{name}: 0; must be at least 1"):
            rollouts(endpoint, **{name: 0})


# ------------------------------------------------------------------ what traces can hold


def episode_of(trace: Any) -> Any:
    episode = vf.WireEpisode.model_validate(record())
    episode.traces = [trace]
    trace.record_reward("right", 1.0)
    return episode


def routed_trace() -> Any:
    trace = empty_trace()
    rows = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2)
    routed = {"data": base64.b64encode(rows.tobytes()).decode(), "shape": [5, 2, 2], "start": 0}
    mask = SamplingMask.from_sampling_mask([[20, 30], [7, 21, 22]])
    reply(trace, [user("q")], [(0, 3)], [1, 2, 3, 10], [20, 21], routed_experts=routed, sampling_mask=mask)
    return trace


@pytest.mark.parametrize("make", [branching_trace, routed_trace, image_trace], ids=lambda make: make.__name__)
def test_branches_routing_masks_and_images_arrive(make: Callable[[], Any], endpoint: Endpoint, plane: Plane) -> None:
    """Real traces of the package in place of played ones: the tiny model has no experts and no eyes."""
    span = ImageSpan(hash="c" * 64, grid=(1, 4, 4), offset=0, length=4)
    job = rollouts(endpoint, groups=2, images=lambda url: span)

    async def play(task: Any) -> Any:
        return episode_of(make())

    async def run() -> None:
        env = job.environment.load()
        await verifiers_rollouts._Players(job, plane, play, Tally(), None).run(env)

    asyncio.run(run())
    branches = [branch for branch in make().branches if branch.trainable]
    with plane.source(rank=0) as source:
        step = source.step(timeout=60)
        rows = [(batch, i) for batch in step for i in range(batch.sample_count)]
        assert len(rows) == 8 * len(branches)
        for batch, i in rows:
            cut = slice(int(batch.segments.offsets[i]), int(batch.segments.offsets[i] + batch.segments.lengths[i]))
            ids = batch["token_ids"][cut].tolist()
            (branch,) = [one for one in branches if listed(one.token_ids) == ids]
            if branch.routed_experts is not None:
                assert np.array_equal(batch["routed_experts"][cut][:-1], branch.routed_experts[:-1])
                assert batch["sampling_mask"][cut].lengths.tolist() == branch.sampling_mask.counts.tolist()
            if branch.mm_token_type_ids is not None:
                assert batch["mm_token_type_ids"][cut].tolist() == listed(branch.mm_token_type_ids)
                assert [image.hash for image in batch.images] == [span.hash] * batch.sample_count


def test_episodes_are_kept_as_the_package_keeps_them(endpoint: Endpoint, plane: Plane, tmp_path: Path) -> None:
    rollouts(endpoint, groups=1, traces=tmp_path / "traces").run(plane)
    lines = (tmp_path / "traces" / "traces.jsonl").read_text().splitlines()
    episodes = [vf.WireEpisode.model_validate(json.loads(line)) for line in lines]
    names = {episode.traces[0].info["penstock_sample"] for episode in episodes}
    with plane.source(rank=0) as source:
        rollouts(endpoint, groups=1).run(plane)
        assert names < {name for batch in source.step(timeout=60) for name in batch.segments.ids}

"""The NeMo-Gym door, with Gym's own records, its capture path and its conformance suite."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import typing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.atif_v1_7 import AtifTrajectoryV1_7
from nemo_gym.token_id_capture.config import TokenIdCaptureConfig
from nemo_gym.token_id_capture.conformance import run_conformance
from nemo_gym.token_id_capture.consumer import trajectories_from_source
from nemo_gym.token_id_capture.lineage import FileLineageStore
from nemo_gym.token_id_capture.protocols import LineageResolver, TokenSink, TokenSource
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry
from nemo_gym.token_id_capture.sink import (
    CaptureContext,
    capture_tokens,
    register_call_intent,
    reset_token_sink,
    resolve_parent,
    set_token_sink,
)
from nemo_gym.token_id_capture.store import TokenCaptureStore

import penstock as ps
from penstock.convert import to_samples
from penstock.errors import Conflict
from penstock.integrations.environments.nemo_gym_sink import (
    PenstockLineage,
    PenstockSink,
    PenstockSource,
    put_group,
    trajectory_of,
)
from penstock.integrations.formats.trajectory_files import from_atif
from tests.integrations.test_atif_files import trajectory


@pytest.fixture(autouse=True)
def protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gym looks at what protocols have from Python 3.12 on."""
    if sys.version_info < (3, 12):
        attributes = property(getattr(typing, "_get_protocol_attrs"))  # noqa: B009 - type checkers do not know it
        monkeypatch.setattr(typing._ProtocolMeta, "__protocol_attrs__", attributes, raising=False)


QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.mark.parametrize(
    "backend",
    [(PenstockSink, PenstockSource, PenstockLineage), (TokenCaptureStore, TokenCaptureStore, FileLineageStore)],
    ids=["Penstock", "Gym's own"],
)
def test_gyms_conformance_suite_passes(backend: tuple[Any, Any, Any], tmp_path: Path) -> None:
    passed = asyncio.run(run_conformance(*(partial(one, str(tmp_path)) for one in backend)))
    assert passed == [
        "put_then_freeze_visibility",
        "idempotent_reput",
        "conflicting_reput",
        "mark_incomplete_durability",
        "freeze_idempotency",
        "post_freeze_write_safety",
        "conditional_retirement",
        "lineage_visibility",
        "fresh_client_lineage_visibility",
        "begin_call_custody",
    ]


def capture_config(folder: Path) -> TokenIdCaptureConfig:
    """As Gym reads it from a run's YAML."""
    place = "penstock.integrations.environments.nemo_gym_sink"
    kwargs = {"folder": str(folder)}
    block = {"enabled": True, "sink": f"{place}:PenstockSink", "sink_kwargs": kwargs, "delta_records": True}
    more = {"lineage_store": f"{place}:PenstockLineage", "lineage_store_kwargs": kwargs}
    return TokenIdCaptureConfig.model_validate({"token_id_capture": block | more})


def test_gym_builds_both_by_their_import_path(tmp_path: Path) -> None:
    config = capture_config(tmp_path)
    sink, lineage = config.build_sink(), config.build_lineage_store()
    assert isinstance(sink, TokenSink) and isinstance(lineage, LineageResolver)
    assert lineage.is_process_shared() and isinstance(PenstockSource(str(tmp_path)), TokenSource)


async def serve_call(
    config: TokenIdCaptureConfig, rollout: str, call: str, messages: list[Any], prompt: list[int], reply: list[int]
) -> dict[str, Any]:
    """One model call as Gym's model server makes it: intent, parent, response, capture."""
    sink, lineage = config.build_sink(), config.build_lineage_store()
    context = CaptureContext(
        rollout_id=rollout, model_call_id=call, token_sink=sink, lineage_store=lineage, delta_records=True
    )
    token = set_token_sink(context)
    try:
        await register_call_intent()
        await resolve_parent(messages)
        message = {
            "role": "assistant",
            "content": f"said {reply}",
            "prompt_token_ids": prompt,
            "generation_token_ids": reply,
            "generation_log_probs": [-0.5] * len(reply),
        }
        await capture_tokens({"id": f"resp-{call}", "choices": [{"message": message}]}, messages)
        assert context.committed
    finally:
        reset_token_sink(token)
        for one in (sink, lineage):
            assert one is not None
            await one.close()
    return {"role": "assistant", "content": message["content"]}


async def two_turns(config: TokenIdCaptureConfig, rollout: str, replies: tuple[list[int], list[int]]) -> None:
    """A question, an answer, a second question, an answer; every call by servers of its own."""
    said = await serve_call(config, rollout, "call-1", QUESTION, [1, 2, 3], replies[0])
    more = [*QUESTION, said, {"role": "user", "content": "And tomorrow?"}]
    await serve_call(config, rollout, "call-2", more, [1, 2, 3, *replies[0], 8, 9], replies[1])


def test_calls_of_a_rollout_become_one_trajectory_each_token_once(tmp_path: Path) -> None:
    config = capture_config(tmp_path)
    asyncio.run(two_turns(config, "r0", ([4, 5], [6, 7])))
    snapshot = asyncio.run(PenstockSource(str(tmp_path)).freeze("r0"))
    assert [entry.parent_resolution for entry in snapshot.entries] == [
        ParentResolutionStatus.ROOT,
        ParentResolutionStatus.RESOLVED,
    ]
    assert snapshot.entries[1].prompt_is_delta and snapshot.entries[1].prompt_token_ids == [8, 9]
    trajectory = trajectory_of(snapshot, reward=1.0, env="weather")
    assert [turn.token_ids.tolist() for turn in trajectory.turns] == [[1, 2, 3], [4, 5], [8, 9], [6, 7]]
    assert [turn.sampled for turn in trajectory.turns] == [False, True, False, True]
    assert trajectory.error is None and (trajectory.id, trajectory.env) == ("r0", "weather")


def test_what_penstock_trains_is_what_gym_would_have_built(tmp_path: Path) -> None:
    asyncio.run(two_turns(capture_config(tmp_path), "r0", ([4, 5], [6, 7])))
    source = PenstockSource(str(tmp_path))
    built = asyncio.run(trajectories_from_source("r0", source))
    assert built is not None and not built["mask_sample"]
    last = built["rebuilt_response"]["output"][-1]
    snapshot = asyncio.run(source.freeze("r0"))
    tokens = [t for turn in trajectory_of(snapshot, reward=1.0).turns for t in turn.token_ids.tolist()]
    assert tokens == last["prompt_token_ids"] + last["generation_token_ids"]


def test_rollouts_are_put_as_a_group_and_freeing_when_it_is_durable(tmp_path: Path) -> None:
    folder, config = tmp_path / "capture", capture_config(tmp_path / "capture")
    for number in range(3):
        asyncio.run(two_turns(config, f"r{number}", ([4, 5 + number], [6, 7])))
    asyncio.run(PenstockSink(str(folder)).mark_incomplete("r2", "call-3"))
    rewards: dict[str, float | None] = {"r0": 1.0, "r1": 0.0, "r2": 1.0, "never": 0.0}
    with ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1) as plane:
        group = put_group(plane, str(folder), rewards, prompt="weather", policy_version=3)
        assert len(group) == 3 and group.rollouts.errored.tolist() == [False, False, True]
        assert plane.ledger.accepted == 3 and plane.ledger.discarded == {"nemo-gym: nothing captured": 1}
        with plane.source(rank=0, prefetch=0) as trainer:
            step = trainer.step(timeout=60)
            assert step.loss_tokens == 8, "the rollout that lost a call trains nothing"
            trainer.commit(step)
            trainer.flush()
        with pytest.raises(Conflict, match="cannot be read again"):
            put_group(plane, str(folder), rewards, prompt="weather", policy_version=3)
    snapshot = asyncio.run(PenstockSource(str(folder)).freeze("r2"))
    assert len(snapshot.entries) == 2, "a rollout with an error stays"


def test_a_put_that_was_cut_short_is_put_again_as_the_same_group(tmp_path: Path) -> None:
    folder, config = tmp_path / "capture", capture_config(tmp_path / "capture")
    for number in range(2):
        asyncio.run(two_turns(config, f"r{number}", ([4, 5], [6, number])))
    rewards: dict[str, float | None] = {"r0": 1.0, "r1": 0.0}

    class Killed(BaseException): ...

    def dies(*_: object) -> None:
        raise Killed

    with ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1) as plane:
        from penstock.integrations.environments.call_store import CallStore

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(CallStore, "drop", dies)
            put_group(plane, str(folder), rewards, prompt="weather")
        put_group(plane, str(folder), rewards, prompt="weather")
        assert plane.ledger.accepted == 2


def entry(call: str, prompt: list[int], reply: list[int], parent: str | None = None) -> TokenEntry:
    from nemo_gym.token_id_capture.records import stamp_lineage

    found = TokenEntry(
        rollout_id="r",
        model_call_id=call,
        prompt_token_ids=prompt,
        generation_token_ids=reply,
        generation_log_probs=[-0.5] * len(reply),
        response_id=f"resp-{call}",
    )
    how = ParentResolutionStatus.ROOT if parent is None else ParentResolutionStatus.RESOLVED
    return stamp_lineage(found, parent, parent_resolution=how)


def frozen(folder: Path, *entries: TokenEntry) -> Any:
    async def work() -> Any:
        sink = PenstockSink(str(folder))
        for one in entries:
            await sink.put(one)
        await sink.close()
        return await PenstockSource(str(folder)).freeze("r")

    return asyncio.run(work())


def test_two_chains_are_trained_together_only_when_asked(tmp_path: Path) -> None:
    snapshot = frozen(
        tmp_path,
        entry("a", [1, 2], [3]),
        entry("b", [1, 2, 3, 4], [5], "a"),
        entry("c", [1, 2, 3, 6], [7], "a"),
    )
    assert "2 chains of calls" in str(trajectory_of(snapshot, reward=1.0).error)
    both = trajectory_of(snapshot, reward=1.0, all_chains=True)
    assert both.error is None and both.parents == (-1, 0, 1, 2, 1, 4)
    assert [turn.token_ids.tolist() for turn in both.turns] == [[1, 2], [3], [4], [5], [6], [7]]
    scored = trajectory_of(snapshot, reward=1.0, response={"id": "resp-c"})
    assert scored.error is None and [turn.token_ids.tolist() for turn in scored.turns] == [[1, 2], [3], [6], [7]]


def test_a_parent_that_is_not_the_prefix_trains_nothing(tmp_path: Path) -> None:
    snapshot = frozen(tmp_path, entry("a", [1, 2], [3]), entry("b", [1, 9, 3, 4], [5], "a"))
    assert "could not be verified" in str(trajectory_of(snapshot, reward=1.0).error)


def test_a_call_that_sampled_nothing_trains_nothing(tmp_path: Path) -> None:
    trajectory = trajectory_of(frozen(tmp_path, entry("a", [1, 2], [])), reward=1.0)
    assert trajectory.error is not None and trajectory.num_output_tokens == 0


SERVER = """
import asyncio, sys
from tests.upstream import conftest
from tests.upstream.test_nemo_gym import PenstockSink, entry

async def work():
    sink = PenstockSink(sys.argv[1])
    for number in range(10_000):
        one = entry(f"call-{number}", [1, 2], [number])
        await sink.put(one)
        print(number, flush=True)

asyncio.run(work())
"""


def test_a_killed_server_loses_no_call_that_it_acknowledged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        acknowledged = [int(server.stdout.readline()) for _ in range(50)]
        server.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in server.stdout.read().split()]
    snapshot = asyncio.run(PenstockSource(str(tmp_path)).freeze("r"))
    kept = {one.generation_token_ids[0] for one in snapshot.entries}
    assert kept >= set(acknowledged) and len(kept) <= len(acknowledged) + 1


def test_a_trajectory_of_gyms_atif_export_becomes_samples() -> None:
    record = AtifTrajectoryV1_7.model_validate(trajectory()).model_dump(mode="json", exclude_none=True)
    [rollout] = from_atif(record)
    [sample] = to_samples(rollout)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and sample.loss_tokens == 3

"""TRL's own rollout worker on a plane: nothing of it is lost, in its log or by a `kill -9`."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

import penstock as ps
from penstock.errors import ConfigError
from penstock.integrations.trainers.trl_rollouts import ChildLoop, GroupBuffer, put_prompts
from penstock.integrations.trainers.trl_worker import Durable, Handed
from penstock.runs import read_run
from penstock.testing.trl_cpu import NoTransfer, VllmStandIn, byte_model, trl_on_cpu
from tests.support.plane_processes import alive, children, wait_until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent


def brevity(completions: list[Any], **_: Any) -> list[float]:
    return [-float(len(messages[-1]["content"])) for messages in completions]


def some(completions: list[Any], **_: Any) -> list[float | None]:
    """Scores half of the answers."""
    return [1.0 if len(messages[-1]["content"]) % 2 else None for messages in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Recorder(Durable):
    """Writes down what TRL was given."""

    given: list[Any]

    def taken(self, handed: Handed) -> Any:
        sample = super().taken(handed)
        self.given = [*getattr(self, "given", []), *([] if sample is None else [sample])]
        return sample


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # TRL's own
def test_trl_logs_and_trains_what_it_would_without_a_plane(tmp_path: Path) -> None:
    model = byte_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Sag {i}: ä"}] for i in range(5)]})
    settings: dict[str, Any] = {"max_steps": 3, "num_generations": 4, "token_budget": 2500}
    settings |= {"max_staleness": 99, "logging_steps": 1, "bf16": False, "use_cpu": True, "save_strategy": "no"}
    with VllmStandIn() as server:
        with trl_on_cpu():
            worker = AsyncRolloutWorker(
                model_name="model",
                dataset=prompts,
                reward_funcs=[brevity, some],
                tools=[add],
                processing_class=tokenizer,
                eos_token_ids=[tokenizer.eos_token_id],
                num_generations=4,
                max_inflight_tasks=8,
                queue_maxsize=32,
                max_tokens=100,
                vllm_server_url=server.url,
            )
            durable = Recorder(worker, plane=tmp_path / "run")
            trainer = AsyncGRPOTrainer(
                str(model),
                args=AsyncGRPOConfig(str(tmp_path / "out"), report_to="none", disable_tqdm=True, **settings),
                train_dataset=prompts,
                processing_class=tokenizer,
                rollout_worker=durable,
                weight_transfer=NoTransfer(),
            )
        trainer.train()
    logged = {name for row in trainer.state.log_history for name, value in row.items() if value is not None}
    assert logged >= {"reward", "reward_std", "rewards/brevity", "rewards/some", "tools/call_frequency"}
    assert logged >= {"tools/add/call_total", "tools/latency_s", "completions/mean_length", "completions/clipped_ratio"}
    assert logged >= {"rollout/duration_s", "rollout/turns_mean", "rollout/generated_tok_s"}
    groups = defaultdict(list)
    for sample in durable.given:
        groups[sample.group_id].append(sample)
        assert sample.prompt[0]["content"].startswith("Sag ") and sample.prompt[0]["content"].endswith("ä")
        assert sample.completion[-1]["role"] == "assistant"
        assert sample.metrics["rewards/some"] == 1.0 or math.isnan(sample.metrics["rewards/some"])
    complete = [samples for samples in groups.values() if len(samples) == 4]
    assert len(complete) >= 6 and set(groups) == set(range(len(groups)))
    for samples in complete:  # as TRL computes them: divided by the standard deviation
        rewards = np.array([sample.metrics["reward"] for sample in samples])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        np.testing.assert_allclose([sample.advantage for sample in samples], expected, atol=1e-5)
    ids = [row["id"] for row in read_run(tmp_path / "run")["groups"]]
    assert len(set(ids)) == len(ids) and max(Counter(ids).values()) == 1


@pytest.mark.timeout(900)
def test_the_script_of_the_page_is_killed_and_continues(tmp_path: Path) -> None:
    """Killed, it asks for nothing more. Continued, it asks for no prompt again whose group was put."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    with VllmStandIn() as server:
        command = [sys.executable, str(ROOT / "examples" / "trl_train.py"), "6", server.url]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
            saved = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
            wait_until(lambda: saved.exists() or process.poll() is not None, 400)
            started = children(process.pid)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL and started
        wait_until(lambda: not any(alive(child) for child in started), 60)
        before, put = len(server.asked), {row["id"] for row in read_run(tmp_path / "run")["groups"]}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.endswith("step 6: 48 samples trained\n"), done.stderr
        again = Counter(prompt_of(ids) for _, ids in server.asked[before:])
    assert len(put) >= 4 and not {f"trl-{index}" for index in again} & put
    run = read_run(tmp_path / "run")
    assert len({row["id"] for row in run["groups"]}) == len(run["groups"]) and run["ledger"]["balanced"]
    page = (ROOT / "docs" / "half-hour-trl.md").read_text()
    assert (ROOT / "examples" / "trl_train.py").read_text().split('"""\n\n', 1)[1] in page


def prompt_of(ids: tuple[int, ...]) -> int:
    """The number in "Say 17."."""
    return int(bytes(i for i in ids if i < 256).decode().rsplit("Say ", 1)[1].split(".")[0])


# ------------------------------------------------------------------ the pieces


class Loop:
    """What `ChildLoop` needs of TRL's loop."""

    def __init__(self, *, rollout_buffer: Any) -> None:
        self.rollout_buffer = rollout_buffer

    async def _score_group(self, group: Any) -> Any:
        return group

    async def _generate_one(self, prompt: Any, *, group_id: int) -> Any:
        return (prompt, group_id)

    def _push_metrics(self, values: dict[str, float]) -> None:
        self.pushed = values

    def _repeat_iterator(self) -> Iterator[tuple[int, Any]]:
        return ((i, f"row {i}") for i in range(6))


@pytest.mark.filterwarnings("default")  # TRL's own
def test_trls_own_loop_passes_over_what_was_put_also_of_an_iterable_dataset(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_model(tmp_path / "model"))
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}"}] for i in range(4)]})
    context = multiprocessing.get_context("spawn")
    shared = {"model_version_value": context.Value("i", 0), "heartbeat_value": context.Value("d", 0.0)}
    for dataset, first in ((rows, 2), (rows.to_iterable_dataset(), 0)):
        loop = ChildLoop(_AsyncRolloutLoop, first, {0, 1, 3, 5}, context.Event())(
            model_name="model",
            dataset=dataset,
            dataset_start_index=first,
            reward_funcs=[brevity],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=2,
            rollout_buffer=queue.Queue(),
            failed_event=context.Event(),
            exception_info_queue=None,
            metrics_queue=queue.Queue(),
            **shared,
        )
        found = [(i, row["prompt"][0]["content"]) for i, row in itertools.islice(loop._repeat_iterator(), 8)]
        loop._loop.close()
        assert found == [(2, "2")] * 2 + [(4, "0")] * 2 + [(6, "2")] * 2 + [(7, "3")] * 2


def test_prompts_that_were_put_are_passed_over_and_ids_go_on() -> None:
    loop = ChildLoop(Loop, 10, {11, 14}, threading.Event())(rollout_buffer=queue.Queue())
    assert list(loop._repeat_iterator()) == [(10, "row 0"), (12, "row 2"), (13, "row 3"), (15, "row 5")]


def test_a_group_is_sent_as_one_item_and_once_however_often_the_queue_is_full() -> None:
    groups: queue.Queue[Any] = queue.Queue(1)
    loop = ChildLoop(Loop, 0, (), threading.Event())(rollout_buffer=groups)
    for name in ("a", "b"):
        rows = asyncio.run(loop._score_group([f"{name}{i}" for i in range(3)]))
        for row in rows[:2]:
            loop.rollout_buffer.put_nowait(row)
        if name == "b":
            for _ in range(2):
                with pytest.raises(queue.Full):
                    loop.rollout_buffer.put_nowait(rows[2])
            assert groups.get_nowait() == ["a0", "a1", "a2"]
        loop.rollout_buffer.put_nowait(rows[2])
    assert groups.get_nowait() == ["b0", "b1", "b2"] and isinstance(loop.rollout_buffer, GroupBuffer)


def test_without_room_no_group_is_begun_and_one_that_was_begun_is_finished() -> None:
    room = threading.Event()
    loop = ChildLoop(Loop, 0, (), room)(rollout_buffer=queue.Queue())

    async def generate() -> tuple[Any, bool]:
        room.set()
        await loop._generate_one("a", group_id=1)
        room.clear()
        waiting = asyncio.create_task(loop._generate_one("c", group_id=2))
        await asyncio.sleep(0)  # let it begin to wait
        same = await loop._generate_one("b", group_id=1)
        done = waiting.done()
        room.set()
        return (same, await waiting), done

    assert asyncio.run(generate()) == ((("b", 1), ("c", 2)), False)
    assert loop.pushed.keys() == {"rollout/backpressure_s"}


def test_a_plane_whose_log_is_elsewhere_is_rejected_for_a_worker_of_trl(tmp_path: Path) -> None:
    with ps.open("memory:", ranks=1, seq_len=8, groups_per_step=1) as plane:
        assert put_prompts(plane) == set()
    with ps.open(tmp_path / "run", ranks=1, seq_len=8, groups_per_step=1) as plane:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match="its log is not on this machine"):
            put_prompts(plane)
        (tmp_path / "elsewhere").rename(tmp_path / "run")

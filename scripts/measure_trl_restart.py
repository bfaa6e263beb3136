"""Measures what a `kill -9` costs a TRL run, with and without a plane: the table of docs/integrations/trl.md.

    python scripts/measure_trl_restart.py [QUEUE]

TRL's real trainer and rollout worker train a tiny model against a stand-in for vLLM's HTTP server, which lists what it
was asked for. Each of the two runs is killed when optimizer step 7 is done, left alone for a few seconds, and resumed
from its last checkpoint, of step 6. No prompt repeats within a run, so a prompt that is asked for again after the
restart was generated in vain before it. At most QUEUE samples wait for training (TRL's `queue_maxsize`), by default 64.
0 is TRL's default: no limit.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

STEPS, KILL_AT, SAVE_EVERY, GENERATIONS = 20, 7, 3, 4
PAUSE_S = 5.0
DELAY_S, STEP_S = 0.02, 0.5
"""Seconds that the stand-in takes for a completion, and that an optimizer step takes longer than the tiny model's."""
MARGIN_S = 1.0
"""A group is complete if all its completions were answered this long before the kill: scoring and putting take time."""


def brevity(completions: list[Any], **_: Any) -> list[float]:
    return [-float(len(messages[-1]["content"])) for messages in completions]


def vowels(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(letter in "aei" for letter in messages[-1]["content"])) for messages in completions]


def train(kind: str, url: str, queue: int) -> None:
    """One start of the run in this folder, "plain" or "durable". Prints a line for every optimizer step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    from penstock.integrations.trainers.transformers_trainer import last_checkpoint
    from penstock.integrations.trainers.trl_worker import Durable
    from penstock.testing.trl_cpu import NoTransfer, byte_model, trl_on_cpu

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            print(f"step {state.global_step}", flush=True)
            time.sleep(STEP_S)

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(byte_model("model"))
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Say {i}."}] for i in range(100_000)]})
    settings: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 8, "token_budget": 0}
    settings |= {"save_steps": SAVE_EVERY, "max_staleness": 1000, "bf16": False, "use_cpu": True, "disable_tqdm": True}
    with trl_on_cpu():
        worker: Any = AsyncRolloutWorker(
            model_name="model",
            dataset=prompts,
            reward_funcs=[brevity, vowels],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=GENERATIONS,
            max_inflight_tasks=8,
            queue_maxsize=queue,
            vllm_server_url=url,
        )
        trainer = AsyncGRPOTrainer(
            "model",
            args=AsyncGRPOConfig("out", report_to="none", **settings),
            train_dataset=prompts,
            processing_class=tokenizer,
            rollout_worker=Durable(worker, plane="run") if kind == "durable" else worker,
            weight_transfer=NoTransfer(),
            callbacks=[Steps()],
        )
    trainer.train(resume_from_checkpoint=last_checkpoint("out"))


def measure(kind: str, folder: Path, queue: int) -> dict[str, int]:
    """Kill and resume one run. Returns completions, by what became of them."""
    from penstock.testing.trl_cpu import VllmStandIn

    with VllmStandIn(delay_s=DELAY_S) as server:
        command = [sys.executable, str(Path(__file__).resolve()), kind, server.url, str(queue)]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True) as first:
            assert first.stdout is not None
            for line in first.stdout:
                if line == f"step {KILL_AT}\n":
                    first.send_signal(signal.SIGKILL)
                    break
            killed = time.monotonic()
        time.sleep(PAUSE_S)
        before = Counter(prompt_of(ids) for when, ids in server.asked if when <= killed)
        orphaned = sum(when > killed for when, _ in server.asked)
        if kind == "plain":
            os.killpg(first.pid, signal.SIGKILL)  # TRL's child process would generate beside the resumed run
        restarted = time.monotonic()
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
        after = Counter(prompt_of(ids) for when, ids in server.asked if when > restarted)
    again = {prompt: count for prompt, count in after.items() if prompt in before}
    answered = Counter(prompt_of(ids) for when, ids in server.answered if when <= killed - MARGIN_S)
    finished = [prompt for prompt in again if answered[prompt] >= GENERATIONS]
    return {
        "asked for up to the kill": sum(before.values()),
        f"asked for in the {PAUSE_S:g} s after it": orphaned,
        "asked for again after the restart": sum(again.values()),
        "of these, of groups that were complete": sum(again[prompt] for prompt in finished),
    }


def prompt_of(ids: tuple[int, ...]) -> str:
    found = re.search(rb"Say (\d+)\.", bytes(i for i in ids if i < 256))
    assert found is not None
    return found.group(1).decode()


def main(queue: int) -> None:
    found = {}
    for kind in ("plain", "durable"):
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = measure(kind, Path(folder), queue)
    print(f"load {os.getloadavg()[0]:.1f}, queue_maxsize={queue}\n")
    print("| completions | plain TRL | with `Durable` |\n|---|---|---|")
    for row, count in found["plain"].items():
        print(f"| {row} | {count} | {found['durable'][row]} |")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)

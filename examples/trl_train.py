"""TRL's AsyncGRPOTrainer with rollouts that survive a crash. Kill it and run it again: it goes on where it was.

    python trl_train.py [STEPS] [URL]

A tiny model, two reward functions and a tool. URL is that of a vLLM server. Without one, a stand-in in this process
answers with random text, so that this runs anywhere in a minute. On a machine with a GPU leave out `trl_on_cpu` and
`weight_transfer`: TRL then sends weights to your vLLM server.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from penstock.integrations.trainers.transformers_trainer import last_checkpoint
from penstock.integrations.trainers.trl_worker import Durable
from penstock.runs import read_run
from penstock.testing.trl_cpu import NoTransfer, VllmStandIn, byte_model, trl_on_cpu


def brevity(completions, **_):
    return [-float(len(messages[-1]["content"])) for messages in completions]


def vowels(completions, **_):
    return [float(sum(letter in "aei" for letter in messages[-1]["content"])) for messages in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def train(steps: int, url: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_model("model"))
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Say {i}."}] for i in range(1000)]})
    args = AsyncGRPOConfig(
        "out",
        max_steps=steps,
        per_device_train_batch_size=8,
        token_budget=0,
        max_staleness=100,
        save_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    with trl_on_cpu():
        rollouts = AsyncRolloutWorker(
            model_name="model",
            dataset=prompts,
            reward_funcs=[brevity, vowels],
            tools=[add],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=4,
            max_inflight_tasks=8,
            queue_maxsize=64,
            max_tokens=100,
            vllm_server_url=url,
        )
        trainer = AsyncGRPOTrainer(
            "model",
            args=args,
            train_dataset=prompts,
            processing_class=tokenizer,
            rollout_worker=Durable(rollouts, plane="run"),
            weight_transfer=NoTransfer(),
        )
    trainer.train(resume_from_checkpoint=last_checkpoint("out"))
    print(f"step {trainer.state.global_step}: {read_run('run')['ledger']['committed']} samples trained")


if __name__ == "__main__":  # TRL's worker starts a process, which imports this file
    torch.set_num_threads(1)
    with VllmStandIn() as server:
        train(int(sys.argv[1]) if len(sys.argv) > 1 else 8, sys.argv[2] if len(sys.argv) > 2 else server.url)

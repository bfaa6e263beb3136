"""TRL's AsyncGRPOTrainer on the rollouts of a durable plane. Kill it and run it again: it goes on where it was.

    python trl_train.py [STEPS]

A tiny model, and rollouts that are there already, so that it runs anywhere in a minute. On a machine with a GPU leave
out `trl_on_cpu` and `weight_transfer`: TRL then sends weights to your vLLM server, and rollout code there puts groups.
"""

import random
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import penstock as ps
from penstock.integrations.trainers.transformers_trainer import last_checkpoint
from penstock.integrations.trainers.trl_worker import PlaneRolloutWorker
from penstock.testing.trl_cpu import NoTransfer, trl_on_cpu

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
torch.set_num_threads(1)
torch.manual_seed(0)

words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 32)}}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<eos>")), eos_token="<eos>")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
Qwen3ForCausalLM(Qwen3Config(vocab_size=32, eos_token_id=0, **sizes, **heads)).save_pretrained("model")
tokenizer.save_pretrained("model")

# Two groups of four make a step of the plane, and of TRL: 8 samples, without a token budget.
plane = ps.open("run", ranks=1, seq_len=64, groups_per_step=2)
rng = random.Random(1)
for i in range(2 * steps + 2):  # TRL reads one micro-batch ahead of what it trains
    with plane.group(f"prompt-{i}", id=f"prompt-{i}", policy_version=0) as group:  # put once, however often it is run
        for _ in range(4):
            said = [rng.randrange(32) for _ in range(rng.randint(1, 6))]
            turns = [ps.Turn([1, 2, 3]), ps.Turn(said, logprobs=[-3.5] * len(said))]
            group.add(ps.Trajectory(turns=turns, reward=len(said) / 6))

worker = PlaneRolloutWorker(plane)
args = AsyncGRPOConfig(
    "out",
    max_steps=steps,
    per_device_train_batch_size=8,
    token_budget=0,
    max_staleness=steps,
    learning_rate=1e-3,
    save_steps=1,
    heartbeat_stale_after_s=60,
    bf16=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
with trl_on_cpu():
    trainer = AsyncGRPOTrainer(
        "model",
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3"]}),  # TRL wants one; the plane's groups are trained
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
        callbacks=[worker.position],
    )
trainer.train(resume_from_checkpoint=last_checkpoint("out"))
print(f"step {trainer.state.global_step}: {plane.ledger.committed} samples trained, version {plane.policy_version}")
plane.close()

"""A verl job without a model: verl's own prompts, agent loop worker, replay buffer and resume, with invented answers.

    python tests/upstream/verl_job.py STORAGE NOTES first      puts, samples and clears until it is killed
    python tests/upstream/verl_job.py STORAGE NOTES second     restores, resumes as verl does, trains what is left

verl has to be on PYTHONPATH, for Ray's workers too. Both write what was acknowledged to NOTES, a file for each process.
`second` writes what it found to NOTES/found.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu

SESSIONS, IN_FLIGHT = 2, 8


def tokens(uid: str, session: int) -> list[int]:
    """The answer to a prompt, which a reader can compute too."""
    number = int(uid.removeprefix("u"))
    return [number * 10 + session] * (3 + number % 5)


class Notes:
    def __init__(self, folder: str) -> None:
        self._file = (Path(folder) / f"{os.getpid()}.jsonl").open("a")

    def add(self, what: str, *names: str) -> None:
        print(json.dumps([what, *names]), file=self._file, flush=True)


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]):  # type: ignore[misc, unused-ignore]
    """verl's worker; only the agent loop, which would ask an inference engine, is another one."""

    def __init__(self, config: Any, notes: str) -> None:
        tq.init()
        self.background_tasks: set[Any] = set()
        self.config, self.notes = config, Notes(notes)
        self.processor = self.reward_loop_worker_handles = None

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **keywords: Any) -> None:
        uid = prompt["uid"]
        await super()._run_prompt(prompt, *args, **keywords)
        self.notes.add("finished", uid)

    async def _run_agent_loop(self, _sampling: Any, trajectory: Any, **prompt: Any) -> None:
        for name in ("agent_name", "trace"):
            prompt.pop(name, None)
        uid, session = prompt["uid"], prompt["session_id"]
        answer = tokens(uid, session)
        await asyncio.sleep(0.05 * len(answer))  # generation: some are still running when the job is killed
        output = AgentLoopOutput(
            prompt_ids=[1, 2, 3],
            response_ids=answer,
            response_mask=[1] * len(answer),
            response_logprobs=[-0.5] * len(answer),
            reward_score=float(session),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": {"acc": session}},
        )
        await self._agent_loop_postprocess(output, trajectory["validate"], **prompt)
        self.notes.add("row", f"{uid}_{session}_0")

    async def _compute_teacher_logprobs(self, *args: Any, **keywords: Any) -> None:
        """No teacher."""


def settings(storage: str) -> Any:
    words = [
        "transfer_queue.backend.storage_backend=Penstock",
        f"+transfer_queue.backend.Penstock.storage={storage}",
        "+transfer_queue.backend.Penstock.restore=true",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=words)


class Job:
    def __init__(self, storage: str, notes: str) -> None:
        self.config, self.notes = settings(storage), Notes(notes)
        tq.init(self.config.transfer_queue)
        actor = ray.remote(num_cpus=0)(Worker)
        self.worker = actor.remote(OmegaConf.create(OmegaConf.to_container(self.config)), notes)
        self.buffer = ReplayBufferAsync(
            trainer_mode="separate_async",
            trainer_config=self.config.trainer,
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
            poll_interval=0.05,
        )

    def submit(self, first: int, count: int) -> None:
        """Register prompts and start their rollouts, as `PPOTrainer._submit_batch_to_rollout` does."""
        uids = [f"u{i}" for i in range(first, first + count)]
        prompts = [[{"role": "user", "content": uid}] for uid in uids]
        columns = {"uid": NonTensorStack(*uids), "raw_prompt": NonTensorStack(*prompts)}
        columns["index"] = NonTensorStack(*range(first, first + count))
        batch = TensorDict(columns, batch_size=count)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags, fields=batch)
        self.notes.add("prompts", *uids)
        self.generate(batch)

    def generate(self, batch: TensorDict) -> None:
        tu.assign_non_tensor_data(batch, "global_steps", 1)
        ray.get(self.worker.generate_sequences.remote(batch))

    def train(self) -> str:
        """Sample one group, read it and clear it, as a training step does."""
        self.notes.add("sampling")
        batch, _ = self.buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        uid = str(batch.keys[0].split("_")[0])
        self.notes.add("sampled", uid)
        data = tq.kv_batch_get(batch.keys, "train", ["responses", "rollout_log_probs", "uid"])
        for key, row in zip(batch.keys, data["responses"].unbind(), strict=True):
            assert row.tolist() == tokens(uid, int(key.split("_")[1])), key
        assert len(batch.keys) == SESSIONS, batch.keys
        tq.kv_clear(keys=batch.keys, partition_id="train")
        self.notes.add("trained", uid)
        return uid


def first(job: Job) -> None:
    job.submit(0, IN_FLIGHT)
    for number in range(IN_FLIGHT, 1_000_000, 2):
        job.submit(number, 2)
        job.train()


def second(job: Job, notes: str) -> None:
    found = tq.kv_list("train")["train"]
    trainer = SimpleNamespace(trainer_mode="separate_async", global_steps=1)
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=job.generate)
    PPOTrainer._reissue_inflight_prompts(trainer)
    left = [key for key, tag in found.items() if tag.get("is_prompt")]
    trained = [job.train() for _ in left]
    (Path(notes) / "found.json").write_text(json.dumps({"keys": found, "trained": trained}))


if __name__ == "__main__":
    place, folder, which = sys.argv[1:]
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"/tmp/ps-{os.getpid()}",
    )
    if which == "first":
        first(Job(place, folder))
    else:
        second(Job(place, folder), folder)
        tq.close()

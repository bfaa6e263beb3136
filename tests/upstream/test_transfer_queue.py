"""The TransferQueue door, with the real package on a real Ray node, beside its own in-memory backend."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from penstock.errors import PenstockError
from penstock.integrations.transfer_queue.backend import register

pytestmark = pytest.mark.filterwarnings("default")  # of packages that are not ours


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """One Ray node for all tests; `make test-upstream` runs this where nothing but this host can be reached."""
    # Ray's sockets are there, whose paths may not be longer than 107 characters.
    folder = Path("/tmp") / f"ps-{os.getpid()}"
    hook = "penstock.integrations.transfer_queue.backend.register"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
        runtime_env={"worker_process_setup_hook": hook},
    )
    register()
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def started(folder: Path | None, units: int = 2) -> None:
    """A TransferQueue on a Penstock folder, or in memory."""
    if folder is None:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}}))
        return
    backend = {
        "storage_backend": "Penstock",
        "Penstock": {"folder": str(folder), "checkpoints": str(folder.parent), "num_units": units},
    }
    tq.init(OmegaConf.create({"backend": backend}))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Path]:
    started(tmp_path / "queue")
    yield tmp_path / "queue"
    tq.close()


def fields(rows: int, seed: int = 0) -> TensorDict:
    """Columns of all kinds that verl puts: dense, ragged, numbers, text, dicts with tensors."""
    maker = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (rows,), generator=maker).tolist()
    ragged = [torch.randint(0, 1000, (length,), generator=maker) for length in lengths]
    return TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "rollout_log_probs": torch.nested.as_nested_tensor(
                [torch.randn(length, generator=maker) for length in lengths], layout=torch.jagged
            ),
            "prompts": torch.randint(0, 9, (rows, 5), generator=maker),
            "hidden": torch.randn(rows, 3, 2, generator=maker).bfloat16(),
            "reward": torch.randn(rows, generator=maker),
            "done": torch.rand(rows, generator=maker) > 0.5,
            "uid": NonTensorStack(*[f"uid-{i}" for i in range(rows)]),
            "extra": NonTensorStack(*[{"n": i, "pixels": torch.ones(i + 1), "none": None} for i in range(rows)]),
        },
        batch_size=rows,
    )


def rows_of(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return list(column.tolist())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return type(a) is type(b) and bool(a == b)


def assert_same(found: TensorDict, wanted: TensorDict) -> None:
    assert set(found.keys()) == set(wanted.keys()) and found.batch_size == wanted.batch_size
    for name in sorted(wanted.keys()):
        ours, theirs = found[name], wanted[name]
        assert type(ours) is type(theirs), name
        if isinstance(theirs, torch.Tensor):
            assert (ours.is_nested, ours.layout, ours.dtype) == (theirs.is_nested, theirs.layout, theirs.dtype), name
        assert all(same(a, b) for a, b in zip(rows_of(ours), rows_of(theirs), strict=True)), name


def test_it_gives_what_the_in_memory_backend_gives(tmp_path: Path) -> None:
    orders = ([3, 1, 2], list(range(12)), [7], [11, 0])
    found: list[list[TensorDict]] = []
    for folder in (None, tmp_path / "queue"):
        started(folder)
        tq.kv_batch_put([f"k{i}" for i in range(12)], "train", fields(12), [{"step": i} for i in range(12)])
        tq.kv_put("k3", "train", {"later": torch.arange(4)})
        tq.kv_batch_put(["k1", "k2"], "train", fields(2, seed=1).select("reward", "uid"))
        got = [tq.kv_batch_get([f"k{i}" for i in order], "train", list(fields(1).keys())) for order in orders]
        got.append(tq.kv_batch_get("k3", "train", "later"))
        assert tq.kv_list("train")["train"]["k5"] == {"step": 5}
        found.append(got)
        tq.close()
    for theirs, ours in zip(*found, strict=True):
        assert_same(ours, theirs)


def test_what_was_cleared_is_gone_and_its_space_is_free(queue: Path) -> None:
    keys = [f"k{i}" for i in range(16)]
    big = TensorDict({"x": torch.ones(16, 1 << 17)}, batch_size=16)
    tq.kv_batch_put(keys, "train", big)
    assert used(queue) >= 8 << 20
    tq.kv_clear(keys, "train")
    deadline = time.monotonic() + 60
    while used(queue) > 1 << 20:
        assert time.monotonic() < deadline, used(queue)
        time.sleep(0.1)
    tq.kv_batch_put(keys, "train", fields(16))
    assert_same(tq.kv_batch_get(keys[:2], "train", ["prompts"]), nested(fields(16).select("prompts"), [0, 1]))


def used(folder: Path) -> int:
    """Bytes that the columns take on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("unit-*/columns/*"))


def nested(data: TensorDict, rows: list[int]) -> TensorDict:
    names = list(data.keys())
    out = {name: torch.nested.as_nested_tensor([data[name][i] for i in rows], layout=torch.jagged) for name in names}
    return TensorDict(out, batch_size=len(rows))


class Producer:
    """Puts rows one by one; says which were acknowledged."""

    def __init__(self) -> None:
        tq.init()

    def put(self, name: str, count: int) -> list[str]:
        done = []
        for number in range(count):
            key = f"{name}-{number}"
            tq.kv_put(key, "train", {"value": torch.full((100,), number)})
            done.append(key)
        return done


def text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def units(count: int = 2) -> list[int]:
    """The processes of the storage units, once they all run."""
    deadline = time.monotonic() + 120
    while True:
        found = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if b"ray::_UnitActor" in text(path)
        ]
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, f"{len(found)} units"
        time.sleep(0.1)


def test_a_killed_storage_loses_nothing_that_was_acknowledged(queue: Path) -> None:
    actor = ray.remote(num_cpus=0)(Producer)
    producers = [actor.remote() for _ in range(2)]
    ray.get([one.put.remote(f"first-{i}", 1) for i, one in enumerate(producers)])
    work = [one.put.remote(f"p{i}", 150) for i, one in enumerate(producers)]
    for _ in range(2):
        ray.wait(work, timeout=1.0)
        for pid in units():
            os.kill(pid, signal.SIGKILL)
    keys = [key for done in ray.get(work, timeout=280) for key in done]
    assert len(keys) == 300
    found = tq.kv_batch_get(keys, "train", "value")["value"]
    assert [int(row[0]) for row in found.unbind()] == [int(key.rsplit("-", 1)[1]) for key in keys]
    lives = ray.get([ray.get_actor(f"PenstockUnit#{i}", namespace="transfer_queue").where.remote() for i in range(2)])
    assert all(life > 1 for _, life in lives), lives


def test_a_checkpoint_is_restored_in_a_new_queue_on_a_new_folder(tmp_path: Path) -> None:
    started(tmp_path / "first")
    keys = [f"k{i}" for i in range(8)]
    tq.kv_batch_put(keys, "train", fields(8), [{"step": 1}] * 8)
    before = tq.kv_batch_get(keys, "train")
    tq.save_checkpoint(tmp_path / "saved", metadata={"step": 1})
    tq.kv_clear(keys[:4], "train")
    tq.kv_put("later", "train", {"prompts": torch.zeros(5, dtype=torch.int64)})
    tq.close()
    started(tmp_path / "second")
    tq.load_checkpoint(tmp_path / "saved")
    assert_same(tq.kv_batch_get(keys, "train"), before)
    assert sorted(tq.kv_list("train")["train"]) == keys
    tq.close()
    files = [path.name for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert {"metadata.json", "controller_state.pkl", "blocks.sqlite"} <= set(files)
    assert [name for name in files if name.endswith(".pkl")] == ["controller_state.pkl"], (
        "TransferQueue's own, not ours"
    )


def test_a_checkpoint_of_the_controller_alone_finds_the_rows_in_the_folder(tmp_path: Path) -> None:
    started(tmp_path / "queue")
    keys = [f"k{i}" for i in range(8)]
    tq.kv_batch_put(keys, "train", fields(8))
    before = tq.kv_batch_get(keys, "train")
    tq.save_checkpoint(tmp_path / "saved", include_storage=False)
    for pid in units():
        os.kill(pid, signal.SIGKILL)
    tq.close()
    started(tmp_path / "queue")
    tq.load_checkpoint(tmp_path / "saved")
    assert_same(tq.kv_batch_get(keys, "train"), before)
    tq.close()


def test_another_number_of_units_is_refused(tmp_path: Path) -> None:
    started(tmp_path / "queue", units=2)
    tq.save_checkpoint(tmp_path / "saved")
    tq.close()
    started(tmp_path / "other", units=1)
    with pytest.raises(Exception, match="penstock-0-of-2"):
        tq.load_checkpoint(tmp_path / "saved")
    tq.close()


class Strange:
    """Something that only a pickle could hold."""


def test_what_only_a_pickle_could_hold_is_refused_and_named(queue: Path) -> None:
    odd = TensorDict({"thing": NonTensorStack(Strange(), Strange())}, batch_size=2)
    with pytest.raises(PenstockError, match=r"thing\[0\]: a .*Strange"):
        tq.kv_batch_put(["a", "b"], "train", odd)
    files = b"".join(path.read_bytes() for path in queue.rglob("*") if path.is_file())
    assert b"\x80\x04\x95" not in files and b"\x80\x05\x95" not in files, "no pickle in our files"


# ------------------------------------------------------------------ verl


def verl_config(folder: Path) -> Any:
    """verl's own settings for training, with the two words of the page on the command line."""
    import verl
    from hydra import compose, initialize_config_dir

    words = [
        "transfer_queue.backend.storage_backend=Penstock",
        f"+transfer_queue.backend.Penstock.folder={folder}",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=words)


def test_verl_knows_the_backend_once_it_is_imported() -> None:
    program = (
        "from tests.upstream import conftest\nimport verl\n"
        "from transfer_queue.storage.managers.base import StorageManagerFactory as factory\n"
        "print('Penstock' in factory._registry)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def put_prompts(uids: list[str], scores: dict[str, list[float]]) -> None:
    """What verl's agent loop puts: prompts with their state, and one row for each trajectory of a prompt."""
    tq.kv_batch_put(
        uids,
        "train",
        TensorDict({"raw_prompt": NonTensorStack(*[[{"role": "user", "content": uid}] for uid in uids])}, len(uids)),
        [{"is_prompt": True, "status": "finished", "global_steps": 1} for _ in uids],
    )
    for uid in uids:
        keys = [f"{uid}_0_{i}" for i in range(len(scores[uid]))]
        rewards = torch.tensor(scores[uid])
        data = fields(len(keys)).exclude("reward")
        data["rm_scores"] = torch.nested.as_nested_tensor(list(rewards.unsqueeze(1)), layout=torch.jagged)
        tags = [{"status": "success", "seq_len": 8, "global_steps": 1} for _ in keys]
        tq.kv_batch_put(keys, "train", data, tags)


def test_verls_replay_buffer_samples_filters_and_clears(tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    config = verl_config(tmp_path / "queue")
    tq.init(config.transfer_queue)
    refilled: list[int] = []
    buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config=config.trainer,
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.1,
        refill_fn=refilled.append,
        filter_groups_metric="reward",
        train_batch_size=4,
        gen_batch_size=1,
    )
    put_prompts(["a", "b", "c"], {"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 0.0]})
    batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["a_0_0", "a_0_1", "c_0_0", "c_0_1"], "no signal in b: it is filtered"
    data = tq.kv_batch_get(batch.keys, "train", ["input_ids", "rm_scores", "uid"])
    assert data["input_ids"].is_nested and [float(row.sum()) for row in data["rm_scores"].unbind()].count(1.0) == 2
    tq.kv_clear(batch.keys, "train")
    assert not (tq.kv_list("train") or {}).get("train")
    tq.close()

"""The TransferQueue backend, with the real package on a real Ray node, beside its own in-memory backend."""

from __future__ import annotations

import os
import shutil
import signal
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
from tensordict.tensorclass import NonTensorData, NonTensorStack

from penstock.errors import PenstockError
from penstock.integrations.transfer_queue.backend import register, restore
from penstock.integrations.transfer_queue.journal import begin
from penstock.storage import FolderStorage

pytestmark = pytest.mark.filterwarnings("default")  # of packages that are not ours


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """One Ray node for all tests; `make test-integrations` runs this where nothing but this host can be reached."""
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


def started(storage: Path | str | None, **settings: Any) -> None:
    """A TransferQueue on a storage of Penstock, or in memory."""
    if storage is None:
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}}))
        return
    backend = {"storage_backend": "Penstock", "Penstock": {"storage": str(storage), **settings}}
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
            "turns": NonTensorData([[i] * i for i in range(rows)], batch_size=(rows,)),
            "extra": NonTensorStack(*[{"n": i, "pixels": torch.ones(i + 1), "none": None} for i in range(rows)]),
        },
        batch_size=rows,
    )


def rows_of(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return list(column)


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
    assert {path.stat().st_mode & 0o077 for path in queue.glob("segments/*")} == {0}, "for this user alone"
    tq.kv_clear(keys, "train")
    deadline = time.monotonic() + 60
    while used(queue) > 1 << 20:
        assert time.monotonic() < deadline, used(queue)
        time.sleep(0.1)
    tq.kv_batch_put(keys, "train", fields(16))
    assert_same(tq.kv_batch_get(keys[:2], "train", ["prompts"]), nested_rows(fields(16).select("prompts"), [0, 1]))


def used(folder: Path) -> int:
    """Bytes that the columns take on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("segments/*"))


class Producer:
    """Puts rows one by one, and writes down which were acknowledged."""

    def __init__(self, name: str, notes: str) -> None:
        tq.init()
        self.name, self.notes = name, Path(notes)

    def put(self) -> None:
        with self.notes.open("w") as file:
            for number in range(1_000_000):
                key = f"{self.name}-{number}"
                tq.kv_put(key, "train", {"value": torch.full((100,), number)}, {"status": "running", "number": number})
                print(key, "put", file=file, flush=True)
                tq.kv_put(key, "train", tag={"status": "finished"})
                print(key, "tagged", file=file, flush=True)
                if number % 3 == 0:
                    tq.kv_clear(key, "train")
                    print(key, "cleared", file=file, flush=True)

    def process(self) -> int:
        return os.getpid()


def changes(notes: list[Path]) -> dict[str, list[str]]:
    """The acknowledged changes of each key."""
    found: dict[str, list[str]] = {}
    for path in notes:
        for line in path.read_text().splitlines() if path.exists() else ():
            key, change = line.split()
            found.setdefault(key, []).append(change)
    return found


def test_killed_producers_and_a_lost_controller_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    started(tmp_path / "queue")
    notes = [tmp_path / f"notes-{i}" for i in range(2)]
    actor = ray.remote(num_cpus=0)(Producer)
    producers = [actor.options(max_concurrency=2).remote(f"p{i}", str(path)) for i, path in enumerate(notes)]
    pids = ray.get([one.process.remote() for one in producers])
    work = [one.put.remote() for one in producers]
    deadline = time.monotonic() + 120
    while min(len(changes([path])) for path in notes) < 40:
        assert time.monotonic() < deadline and not ray.wait(work, timeout=0.1)[0]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for one in work:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(one, timeout=60)
    tq.close()  # the controller, which alone knew the keys, is gone

    started(tmp_path / "queue")
    restored = restore()
    assert restored.keys == len(tq.kv_list("train")["train"]) and not restored.dropped
    known, done = tq.kv_list("train")["train"], changes(notes)
    last = {max(done, key=lambda key: int(key.split("-")[1]) * (key.split("-")[0] == f"p{i}")) for i in range(2)}
    for key, made in done.items():
        if key in last:  # what it was doing when it was killed may be there or not
            continue
        number = int(key.split("-")[1])
        if made[-1] == "cleared":
            assert key not in known
        else:
            assert known[key] == {"status": "finished", "number": number}
    keys = [key for key, made in done.items() if key in known and made[-1] != "cleared"]
    values = tq.kv_batch_get(keys, "train", "value")["value"].unbind()
    assert [row.tolist() for row in values] == [[int(key.split("-")[1])] * 100 for key in keys]
    tq.close()


def test_a_restored_queue_is_as_before_and_restores_again(tmp_path: Path) -> None:
    started(tmp_path / "queue")
    keys = [f"k{i}" for i in range(8)]
    tq.kv_batch_put(keys, "train", fields(8), [{"step": i} for i in range(8)])
    tq.kv_batch_put(keys[2:5], "train", TensorDict({"score": torch.rand(3)}, batch_size=3))
    tq.kv_batch_put(["a", "b"], "val", tags=[{"pending": True}, {"pending": False}])
    tq.kv_put("k3", "train", tag={"step": 33, "seen": [1, 2]})
    tq.kv_clear(keys[:2], "train")
    tq.get_client().put(fields(3), partition_id="low-level")
    before, scores = tq.kv_batch_get(keys[2:], "train"), tq.kv_batch_get(keys[2:5], "train", "score")
    listed = tq.kv_list()
    for _ in range(3):
        tq.close()
        started(tmp_path / "queue")
        restored = restore()
        assert (restored.keys, restored.dropped, restored.keyless, restored.damaged) == (8, 0, 3, ())
        assert {name: rows for name, rows in tq.kv_list().items() if rows} == {
            name: rows for name, rows in listed.items() if rows
        }
        assert_same(tq.kv_batch_get(keys[2:], "train"), before)
        assert_same(tq.kv_batch_get(keys[2:5], "train", "score"), scores)
    meta = tq.kv_batch_put(keys[2:], "train", TensorDict({"reward": torch.arange(6.0)}, batch_size=6))
    assert tq.kv_batch_get_by_meta(meta, "reward")["reward"].tolist() == [0, 1, 2, 3, 4, 5], "it goes on"
    tq.kv_clear(keys[2:], "train")
    tq.close()


def test_restore_can_be_a_setting_and_goes_beyond_a_checkpoint(tmp_path: Path) -> None:
    started(tmp_path / "queue", restore=True)
    keys = [f"k{i}" for i in range(4)]
    tq.kv_batch_put(keys, "train", fields(4), [{"status": "running"}] * 4)
    tq.save_checkpoint(tmp_path / "saved")
    tq.kv_clear(keys[:2], "train")
    tq.kv_put("k3", "train", tag={"status": "finished"})
    tq.kv_put("later", "train", {"prompts": torch.zeros(5, dtype=torch.int64)})
    tq.close()
    started(tmp_path / "queue", restore=True)
    now = {"k2": {"status": "running"}, "k3": {"status": "finished"}, "later": {}}
    assert tq.kv_list("train")["train"] == now
    tq.load_checkpoint(tmp_path / "saved")  # as verl does when it resumes
    assert tq.kv_list("train")["train"] == now
    assert_same(tq.kv_batch_get(["k2", "k3"], "train"), nested_rows(fields(4), [2, 3]))
    tq.close()


def nested_rows(data: TensorDict, rows: list[int]) -> TensorDict:
    """These rows as a queue gives them."""
    out: dict[str, Any] = {}
    for name in list(data.keys()):
        some = [rows_of(data[name])[i] for i in rows]
        if not isinstance(some[0], torch.Tensor):
            out[name] = NonTensorStack(*some)
        elif some[0].dim() == 0:
            out[name] = torch.stack(some)
        else:
            out[name] = torch.nested.as_nested_tensor(some, layout=torch.jagged)
    return TensorDict(out, batch_size=len(rows))


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
    for folder in ("first", "second"):  # into the old folder as well, where four of the rows were deleted
        started(tmp_path / folder)
        tq.load_checkpoint(tmp_path / "saved")
        tq.close()
        started(tmp_path / folder)
        assert restore().keys == 8 and sorted(tq.kv_list("train")["train"]) == keys, "the journal knows what was loaded"
        assert_same(tq.kv_batch_get(keys, "train"), before)
        tq.close()
    pickles = [path.name for path in (tmp_path / "saved").rglob("*.pkl")]
    assert pickles == ["controller_state.pkl"], "TransferQueue's own, not ours"


def test_a_checkpoint_of_the_controller_alone_finds_the_rows_in_the_folder(tmp_path: Path) -> None:
    started(tmp_path / "queue")
    keys = [f"k{i}" for i in range(8)]
    tq.kv_batch_put(keys, "train", fields(8))
    before = tq.kv_batch_get(keys, "train")
    tq.save_checkpoint(tmp_path / "saved", include_storage=False)
    tq.close()
    started(tmp_path / "queue")
    tq.load_checkpoint(tmp_path / "saved")
    assert_same(tq.kv_batch_get(keys, "train"), before)
    tq.close()


def test_a_job_that_another_one_replaced_cannot_write(tmp_path: Path) -> None:
    started(tmp_path / "queue")
    begin(FolderStorage(tmp_path / "queue"))
    with pytest.raises(PenstockError, match="another job started on this storage"):
        tq.kv_put("k", "train", {"x": torch.zeros(3)})
    tq.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage": "queue"}, "give the absolute path"),
        ({"storage": None}, "give the absolute path"),
        ({"storage": "/tmp/q", "num_units": 2}, "unknown num_units"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        tq.init(OmegaConf.create({"backend": {"storage_backend": "Penstock", "Penstock": settings}}))
    tq.close()


def test_one_value_for_all_rows_is_stored_for_each(queue: Path) -> None:
    data = TensorDict({"agent": NonTensorData("tools", batch_size=(3,)), "x": torch.zeros(3)}, batch_size=3)
    tq.kv_batch_put(["a", "b", "c"], "train", data)
    assert tq.kv_batch_get(["a", "c"], "train", "agent")["agent"] == ["tools", "tools"]


class Strange:
    """Something that only a pickle could hold."""


def test_what_only_a_pickle_could_hold_is_refused_and_named(queue: Path) -> None:
    odd = TensorDict({"thing": NonTensorStack(Strange(), Strange())}, batch_size=2)
    with pytest.raises(PenstockError, match=r"thing\[0\]: a .*Strange"):
        tq.kv_batch_put(["a", "b"], "train", odd)
    with pytest.raises(PenstockError, match=r"tags\[0\]\['who'\]: a .*Strange"):
        tq.kv_put("a", "train", tag={"who": Strange()})
    files = b"".join(path.read_bytes() for path in queue.rglob("*") if path.is_file())
    assert b"\x80\x04\x95" not in files and b"\x80\x05\x95" not in files, "no pickle in our files"

"""Whatever is wrong with a file, the answer is our error with its name, or valid samples: never another exception."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.integrations.formats.file_formats import FORMATS, convert_files
from penstock.integrations.formats.shared import Lost, Options, Place
from tests.capture.test_junk import JUNK

MORE: list[Any] = [
    *(value for value in JUNK if value == value and not isinstance(value, bytes)),
    10**400,
    -(2**70),
    [1.5, None],
]
SAMPLE: dict[str, Any] = {
    "id": "a",
    "token_ids": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "logprobs": [0, -0.5, -0.5],
    "sampling_mask": [[], [2], [3]],
    "images": [{"hash": "0" * 64, "grid": [1, 2, 2], "offset": 0, "length": 1}],
    "columns": {"task": ["<u8", "token", 0, False, 0, 0], "more": ["<f8", "token", 0, True, 0, 0]},
    "task": [1, 2, 3],
    "more": [[1.0], [], [2.5]],
    "policy_version": 3,
}
TRL = {
    "input_ids": [1, 2],
    "completion_mask": [0, 1],
    "old_log_probs": [0, -0.5],
    "advantage": 1.0,
    "metrics": {"reward": 1},
}
SLIME = {
    "tokens": [1, 2, 3],
    "response_length": 2,
    "loss_mask": [1, 1],
    "reward": 1.0,
    "rollout_log_probs": [-0.5, -0.5],
    "rollout_top_p_token_ids": [2, 3],
    "rollout_top_p_token_offsets": [0, 1, 2],
    "rollout_routed_experts": [[[1]], [[2]]],
    "weight_versions": ["3"],
    "metadata": {"penstock": {"id": "x"}},
}
REQUEST = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3], "logprobs": {"content": [{"logprob": -0.5}]}}]}
EVENTS = [
    {"event_type": "model_request", "data": {"response": REQUEST, "model_version": 3, "request": {"temperature": 0.7}}},
    {"event_type": "reward", "data": {"value": 1.0}},
]
CALL = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
ATIF = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s",
    "trajectory_id": "t",
    "agent": {"name": "a"},
    "steps": [{"source": "agent", "metrics": CALL, "llm_call_count": 1, "is_copied_context": False}],
    "extra": {"reward": 1.0, "nemo_gym": {"source": {"task_index": 3}}},
}
NODES = [
    {"message": {"role": "user"}, "token_ids": [1, 2], "mask": [False, False], "logprobs": []},
    {"parent": 0, "sampled": True, "token_ids": [3], "mask": [True], "logprobs": [-0.5]},
]
TRACE = {"id": "t", "agent": {"name": "a", "trainable": True}, "nodes": NODES, "info": {"penstock_sample": "p#1/0"}}
RECORDS = {
    "atif": ATIF,
    "verifiers": {"id": "e", "task": {"data": {"name": "n"}, "key": "k"}, "ok": True, "traces": [TRACE]},
    "jsonl": SAMPLE,
    "trl": TRL,
    "slime": SLIME,
    "agent-lightning": {"rollout": {"rollout_id": "r", "input": {"data_id": "d"}}, "events": EVENTS},
}


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *rest) for rest in places(inner))


def changed(record: Any, way: tuple[Any, ...], value: Any) -> Any:
    copied = copy.deepcopy(record)
    at = copied
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = value
    return copied


def check(path: Path, name: str) -> None:
    kind = FORMATS[name]
    assert kind.read is not None
    try:
        for sample in kind.read(Place(str(path)), Lost(), Options()):
            ps.decode(ps.encode([sample]))
    except PenstockError as error:
        assert path.name in str(error)  # noqa: PT017 - either may happen


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_with_any_value_replaced_is_refused_by_name_or_is_a_sample(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.jsonl"
    for way in places(RECORDS[name]):
        for value in MORE:
            path.write_text(json.dumps(changed(RECORDS[name], way, value)) + "\n")
            check(path, name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("parquet", "a.parquet"),
        ("verl", "a.npz"),
        ("verl", "a.safetensors"),
        ("slime", "a.pt"),
        ("prime-rl", "rank_0.bin"),
    ],
)
def test_a_file_with_bytes_changed_or_cut_off_is_refused_by_name_or_holds_samples(
    tmp_path: Path, name: str, file: str
) -> None:
    columns: dict[str, Any] = {"loss_mask": [0, 1, 1], "logprobs": [0, -0.5, -0.25], "rewards": 1.0, "advantages": 1.0}
    samples = [ps.Sample(id=f"g/{i}", group="g", env="math", token_ids=[1, 2, 3], **columns) for i in range(3)]
    (tmp_path / "in.penstock").write_bytes(ps.encode(samples))
    if name == "prime-rl":
        convert_files([str(tmp_path / "in.penstock")], str(tmp_path / "steps"), target=name)
        good = (tmp_path / "steps" / "step_1" / file).read_bytes()
    else:
        convert_files([str(tmp_path / "in.penstock")], str(tmp_path / file))
        good = (tmp_path / file).read_bytes()
    rng, path = random.Random(7), tmp_path / file
    for _ in range(120):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + 1] = rng.choice([b"\x00", b"\xff", b"\x80", struct.pack("<I", rng.randrange(2**32)), b""])
        path.write_bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
        check(path, name)

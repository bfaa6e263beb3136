"""Planes that archive, and buckets to archive to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.archive import RecordedRun
from penstock.encode import encode
from penstock.send.timeouts import Timeouts
from penstock.testing.groups import named_group
from penstock.testing.pace import pace, stretched

FAST = stretched(Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2), pace())
SETTINGS: dict[str, Any] = {"ranks": 2, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are sent as soon as there is something to send."""
    monkeypatch.setattr("penstock.serve.process.archiver.COLLECT_S", 0.0)


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a bucket, and an address in it, which the environment lets us reach."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": s3_endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)

    def bucket(name: str) -> str:
        client: Any = boto3.client(
            "s3",
            endpoint_url=s3_endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket=name)
        client.close()
        return f"s3://{name}/run"

    return bucket


def put(plane: ps.Plane, *names: str, evaluation: bool = False, **more: Any) -> None:
    for name in names:
        plane.put_frame(name, encode(named_group(name, **more)), evaluation=evaluation)


def train(plane: ps.Plane, steps: int, *, version: int = 0) -> list[tuple[str, ...]]:
    """Take and commit so many steps on both ranks, one version each; the digests."""
    from concurrent.futures import ThreadPoolExecutor

    found = []
    with ThreadPoolExecutor() as pool:
        sources = [plane.source(rank=rank, prefetch=0) for rank in range(2)]
        for number in range(1, steps + 1):
            taken = list(pool.map(lambda source: source.step(timeout=60), sources))
            found.append(tuple(step.digest for step in taken))
            for source, step in zip(sources, taken, strict=True):
                source.commit(step, policy_version=version + number)
            list(pool.map(lambda source: source.flush(), sources))
        for source in sources:
            source.close()
    return found


def frames_of(recorded: RecordedRun) -> dict[str, bytes]:
    return {entry.id: recorded.frame(entry.op) for entry in recorded.in_order()}


def folder_of(tmp_path: Path) -> str:
    return str(tmp_path / "archive")

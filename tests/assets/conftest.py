"""Stores for images: in a fresh folder, and in an empty bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.assets import AssetStore, ObjectStore
from penstock.testing import draw_screenshot

_KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
_COUNT = itertools.count()
Picture = Callable[[int], bytes]


@pytest.fixture
def s3_blobs(s3_endpoint: str) -> ObjectStore:
    """An empty bucket."""
    import boto3
    from obstore.store import S3Store

    bucket = f"penstock-{next(_COUNT)}"
    client: Any = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **_KEYS)
    client.create_bucket(Bucket=bucket)
    client.close()
    store = S3Store(
        bucket,
        config={**_KEYS, "endpoint": s3_endpoint, "region": "us-east-1", "allow_http": "true"},
        client_options={"allow_http": True},
    )
    return ObjectStore(store, url=f"s3://{bucket}", touch_after_s=0.0)


@pytest.fixture
def store(tmp_path: Path) -> AssetStore:
    return AssetStore(tmp_path / "assets", run="demo", retries=0)


@pytest.fixture(scope="session")
def picture() -> Callable[[int], bytes]:
    """A small drawn PNG for each seed; the same seed is the same bytes."""
    return lambda seed: draw_screenshot(seed=seed, width=97, height=61)


def files(store: AssetStore) -> list[str]:
    return sorted(info.name for info in store.list())

"""Parquet: the same records, row group by row group; uploads that stream, retry and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.assets import AssetStore
from penstock.errors import CorruptFile, StorageError
from penstock.packing import pack
from penstock.testing import draw_screenshot
from penstock.view import Export, Record, TokenExporter
from penstock.view.parquet import ParquetFile, read_parquet, records_to_parquet, upload_records
from penstock.view.record import FIELDS
from tests.support.exports import Words, make_export, samples_of_step, terms_of

pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[parquet]'")


def same(a: Record, b: Record) -> bool:
    if any(a.fields.get(name) != b.fields.get(name) for name in FIELDS) or set(a.columns) != set(b.columns):
        return False
    return all(
        np.array_equal(a.columns[name], b.columns[name], equal_nan=a.columns[name].dtype.kind == "f")
        for name in a.columns
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parquet") / "run"
    make_export(folder, steps=1, ranks=2, groups=7, size=2)
    return folder


def test_an_export_as_parquet_holds_the_same_records_as_jsonl(tmp_path: Path) -> None:
    batches = pack(samples_of_step(np.random.default_rng(0), Words(), 1, groups=7, size=2), ranks=1, seq_len=512).ranks[
        0
    ]
    for name, file_format in (("lines", None), ("columns", ParquetFile)):
        options: dict[str, Any] = {} if file_format is None else {"file_format": file_format}
        with TokenExporter(tmp_path / name, **options) as exporter:
            for number, batch in enumerate(batches):
                exporter.write(1, batch, terms_of(np.random.default_rng(number), batch), policy_version=2)
            exporter.close_step(1)
    lines, columns = (list(Export(tmp_path / name).step(1).records()) for name in ("lines", "columns"))
    assert len(lines) == 14 and all(same(a, b) for a, b in zip(lines, columns, strict=True))
    file = pq.ParquetFile(tmp_path / "columns/token_exports/step_1/rank_0.parquet")
    assert file.num_row_groups == len(batches)
    assert file.metadata.row_group(0).column(20).compression == "ZSTD"
    assert Export(tmp_path / "columns").step(1).altered() == []


def test_records_are_written_as_they_come(run: Path, tmp_path: Path) -> None:
    """A row group is on disk before the last record is asked for: nothing waits for a whole table."""
    out = tmp_path / "out.parquet"
    sizes = []

    def slowly() -> Iterator[Record]:
        for record in Export(run).step(1).records():
            sizes.append(out.stat().st_size if out.exists() else 0)
            yield record

    assert records_to_parquet(slowly(), out, records_per_group=2) == 14
    assert sizes[2] > 0 and sizes[-1] > sizes[4] > sizes[2]
    assert all(same(a, b) for a, b in zip(Export(run).step(1).records(), read_parquet(out), strict=True))


def test_no_records_make_no_file_and_an_error_leaves_none(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert records_to_parquet([], out) == 0 and not out.exists()

    def failing() -> Iterator[Record]:
        yield from Export(run).step(1).records()
        raise RuntimeError("producer failed")

    with pytest.raises(RuntimeError, match="producer failed"):
        records_to_parquet(failing(), out, records_per_group=1)
    assert not out.exists()


@pytest.mark.parametrize("damage", ["truncated", "empty", "not parquet"])
def test_a_damaged_file_is_our_error(run: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out.parquet"
    records_to_parquet(Export(run).step(1).records(), out)
    data = out.read_bytes()
    out.write_bytes(
        {"truncated": data[: len(data) // 2], "empty": b"", "not parquet": b"PAR1" + b"x" * 99 + b"PAR1"}[damage]
    )
    with pytest.raises(CorruptFile, match=r"out\.parquet"):
        list(read_parquet(out))


def test_images_are_inlined_up_to_the_cap_and_the_store_is_untouched(run: Path, tmp_path: Path) -> None:
    store = AssetStore(tmp_path / "assets")
    small, large = (store.put(draw_screenshot(seed=i, width=32 * i, height=32)) for i in (1, 30))
    record = next(Export(run).step(1).records())
    hashes = [small.hash, large.hash, "0" * 64]
    record.fields["images"] = [{"hash": digest, "offset": 0, "length": 1} for digest in hashes]
    before = {path: path.read_bytes() for path in (tmp_path / "assets").rglob("*.png")}
    out = tmp_path / "out.parquet"
    records_to_parquet([record], out, images=store, max_image_bytes=small.num_bytes)
    assert pq.read_table(out)["image_bytes"].to_pylist() == [[store.get(small.hash), None, None]]
    assert {path: path.read_bytes() for path in (tmp_path / "assets").rglob("*.png")} == before
    assert [image["hash"] for image in next(read_parquet(out)).fields["images"]] == hashes


def test_an_upload_stores_the_file_and_removes_its_temporary_one(run: Path, tmp_path: Path) -> None:
    from obstore.store import MemoryStore

    store: Any = MemoryStore()
    assert upload_records(Export(run).step(1).records(), store, "tokens/1.parquet", temporary=tmp_path) == 14
    import obstore

    (tmp_path / "back.parquet").write_bytes(bytes(obstore.get(store, "tokens/1.parquet").bytes()))
    assert len(list(read_parquet(tmp_path / "back.parquet"))) == 14
    assert [path.name for path in tmp_path.iterdir()] == ["back.parquet"]


def test_a_failing_upload_is_tried_again_from_the_start_and_then_raises(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.store import MemoryStore

    sent: list[bytes] = []
    real = obstore.put

    def failing(store: Any, key: str, file: Path, **options: Any) -> Any:
        sent.append(file.read_bytes())
        if len(sent) < fail_until:
            raise OSError("connection reset")
        return real(store, key, file, **options)

    monkeypatch.setattr(obstore, "put", failing)
    waits: list[float] = []
    fail_until = 3
    assert (
        upload_records(Export(run).step(1).records(), MemoryStore(), "x", wait=waits.append, temporary=tmp_path) == 14
    )
    assert waits == [2.0, 4.0] and sent[0] == sent[1] == sent[2] and sent[0][-4:] == b"PAR1"
    fail_until = 99
    with pytest.raises(StorageError, match="not stored after 3 attempts, the last ended with OSError"):
        upload_records(Export(run).step(1).records(), MemoryStore(), "x", wait=waits.append, temporary=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_upload_to_s3_arrives_whole_in_parts(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a real server that speaks S3: several parts, each bounded, one in flight."""
    from moto.server import ThreadedMotoServer
    from obstore.store import S3Store

    from penstock.view import parquet

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = {
            "endpoint": f"http://{host}:{port}",
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "us-east-1",
        }
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")).close()
        store = S3Store("bucket", **settings, client_options={"allow_http": True}, virtual_hosted_style_request=False)
        file = tmp_path / "large"
        file.write_bytes(np.random.default_rng(0).bytes(13 << 20))
        monkeypatch.setattr(parquet, "PART_BYTES", 5 << 20)
        parquet.upload_file(file, store, "large")
        import obstore

        assert bytes(obstore.get(store, "large").bytes()) == file.read_bytes()
        assert upload_records(Export(run).step(1).records(), store, "tokens/1.parquet", temporary=tmp_path) == 14
    finally:
        server.stop()

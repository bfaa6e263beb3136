"""The page of the HTTP API: its shell block runs as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from penstock.server.http_api import MAX_FRAME_BYTES, MAX_JSON_BYTES, STATUS
from penstock.server.plane_process import PlaneProcess
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "http.md"


def test_the_curl_example_puts_a_group_and_shows_the_ledger(tmp_path: Path) -> None:
    block = re.search(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    words = ["runs/demo", *SMALL, "--listen=tcp://127.0.0.1:*", "--http=127.0.0.1:0"]
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        with PlaneProcess(words) as plane:
            surroundings = {"URL": plane.ready["http"], "PATH": os.environ["PATH"]}
            command = ["bash", "-euc", block[1]]
            done = subprocess.run(command, env=surroundings, cwd=tmp_path, capture_output=True, text=True, check=False)
    finally:
        os.chdir(here)
    assert done.returncode == 0, done.stderr + done.stdout
    put, ledger = re.findall(r"\{.*?\}(?=\{|$)", done.stdout)
    assert json.loads(put) == {"group": "add-17-25#1", "samples": 2, "new": True}
    assert put in block[1], "the page shows what is answered"
    assert ledger.startswith('{"accepted":2,"held":2,"scheduled":0,"delivered":0,"committed":0,')


def test_the_page_has_every_status_and_the_limits() -> None:
    page = PAGE.read_text()
    assert all(re.search(rf"^\| [^|]*\b{status}\b", page, re.MULTILINE) for status in STATUS.values() if status != 404)
    assert f"{MAX_JSON_BYTES >> 20} MiB of JSON, {MAX_FRAME_BYTES >> 20} MiB of frame" in page

"""deploy/compose.yaml: it holds to Compose's schema, and its services run here as processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import penstock as ps
from penstock.cli import main
from penstock.plane.settings import server_settings
from tests.support.plane_processes import wait_until
from tests.support.ports import free_port
from tests.support.postgres_server import PostgresServer
from tests.support.s3_server import s3_environment
from tests.test_deploy import DEPLOY, answer, keys_and_token, running
from tests.test_docs_claims import options

pytestmark = pytest.mark.process

FILE = DEPLOY / "compose.yaml"
SCHEMAS = Path(__file__).parent / "data" / "schemas"
_VARIABLE = re.compile(r"\$\{(\w+)[^}]*\}")


def composed(values: dict[str, str]) -> dict[str, Any]:
    """The file as Compose reads it."""
    text = _VARIABLE.sub(lambda found: values[found[1]], FILE.read_text()).replace("$$", "$")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


VALUES = {
    "PENSTOCK_USER": "1000:1000",
    "PENSTOCK_KEYS": "/home/me/keys",
    "POSTGRES_PASSWORD": "one",
    "S3_ACCESS_KEY": "two",
    "S3_SECRET_KEY": "three",
}


def test_the_file_holds_to_the_schema() -> None:
    schema = json.loads((SCHEMAS / "compose.json").read_text())
    jsonschema.Draft7Validator(schema).validate(composed(VALUES))
    wrong = composed(VALUES)
    wrong["services"]["plane"]["depend_on"] = {}
    with pytest.raises(jsonschema.ValidationError, match="depend_on"):
        jsonschema.Draft7Validator(schema).validate(wrong)


def test_what_the_file_names_is_there() -> None:
    found = composed(VALUES)
    services = found["services"]
    for name, one in services.items():
        assert set(one.get("depends_on", {})) <= services.keys(), name
        for on, how in one.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[on], (name, on)
        assert {config["source"] for config in one.get("configs", ())} <= found["configs"].keys(), name
        volumes = [text.split(":")[0] for text in one.get("volumes", ()) if isinstance(text, str)]
        assert {text for text in volumes if "/" not in text} <= found["volumes"].keys(), name
        assert all(port.startswith("127.0.0.1:") for port in one.get("ports", ())), name
    assert services["bucket"]["command"][0].endswith("/penstock-runs")


def test_every_secret_is_a_variable_that_the_page_sets() -> None:
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text().partition("## Compose")[2].partition("\n## ")[0]
    used = {found[1] for found in _VARIABLE.finditer(FILE.read_text())}
    assert used == VALUES.keys() == set(re.findall(r"(?m)^(?:export )?([A-Z][A-Z0-9_]+)=", page))
    literal = re.findall(r"(?im)^\s+\w*(?:password|secret|access_key)\w*: (?!\$\{)(\S+)", FILE.read_text())
    assert literal == []
    assert not re.search(r"image: [^\s/]*\.[^\s/]*/", FILE.read_text())  # no registry is named


def test_the_plane_has_settings_that_are_taken() -> None:
    found = composed(VALUES)
    plane = found["services"]["plane"]
    assert {word for word in plane["command"] if word.startswith("--")} <= options()["serve"]
    settings = server_settings(tomllib.loads(found["configs"]["plane.toml"]["content"]))
    ports = {int(port.rpartition(":")[2]) for port in plane["ports"]}
    assert ports == {int(text.rpartition(":")[2]) for text in (*settings.listen, str(settings.metrics))}
    assert not settings.folder and plane["read_only"] and plane["cap_drop"] == ["ALL"]
    assert int(plane["stop_grace_period"].rstrip("s")) > settings.watchdog.end_s + settings.watchdog.grace_s


# ------------------------------------------------------------------ running it


@contextmanager
def program(text: str, folder: Path, env: dict[str, str]) -> Iterator[Path]:
    """A program of the file as a process; what it prints is in a file."""
    path = folder / "program.py"
    path.write_text(text)
    with (folder / "printed").open("wb") as printed:
        process = subprocess.Popen([sys.executable, str(path)], stdout=printed, stderr=printed, cwd=folder, env=env)
        try:
            yield folder / "printed"
            assert process.poll() is None, (folder / "printed").read_text()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def keys_of(service: dict[str, Any], keys: Path, folder: Path) -> Path:
    """The key folder that a client's volumes make."""
    (folder / "keys").mkdir(parents=True)
    for volume in service["volumes"]:
        source, target, _ = volume.split(":")
        shutil.copy(keys / Path(source).name, folder / "keys" / Path(target).name)
    return folder / "keys"


def test_the_services_run_here_as_processes(
    tmp_path: Path, s3_bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL and the S3 server are those of the tests; the rest is the file's own, with addresses of this machine.
    The plane is ended and started again beside a worker and a rank, which go on."""
    plane, metrics, keys = free_port(), free_port(), tmp_path / "keys"
    keys_and_token(keys)
    assert main(["keys", str(keys), "--writer", "worker"]) == 0
    found = composed(VALUES | {"PENSTOCK_KEYS": str(keys)})
    services, configs = found["services"], found["configs"]
    without = {name: value for name, value in os.environ.items() if name not in s3_environment("")}
    assert not {name for name in services["worker"].get("environment", {}) if name.startswith("AWS")}
    with PostgresServer() as postgres, ExitStack() as stack:
        ours = {"/keys": str(keys), ":7440": f":{plane}", ":9464": f":{metrics}", "penstock-runs": s3_bucket}
        ours |= {"postgresql://penstock@postgres/runs": postgres.url}
        text = replaced(configs["plane.toml"]["content"], ours)
        (tmp_path / "plane.toml").write_text(text)
        command = [word.replace("/config", str(tmp_path)) for word in services["plane"]["command"]]
        printed: dict[str, Path] = {}
        for start in ("one", "two"):
            (tmp_path / start).mkdir()
            with running(command, cwd=tmp_path / start, env=os.environ | {"AWS_ENDPOINT_URL": s3_endpoint}):
                wait_until(lambda: answer(metrics, "/readyz") == 200)
                for name in ("worker", "rank") if not printed else ():
                    mine = keys_of(services[name], keys, tmp_path / name)
                    text = replaced(configs[f"{name}.py"]["content"], {"tcp://plane:7440": f"tcp://127.0.0.1:{plane}"})
                    env = without if name == "worker" else dict(os.environ)
                    run = program(text.replace('"/keys"', repr(str(mine))), tmp_path / name, env)
                    printed[name] = stack.enter_context(run)
                await_steps(printed["rank"], 3)
                with ps.open(f"tcp://127.0.0.1:{plane}", keys=keys) as client:
                    counts = client.status()["counts"]
                    assert counts["groups_direct"] and counts["urls_signed"]
            assert not list((tmp_path / start).iterdir())


def await_steps(printed: Path, more: int) -> None:
    """Wait until a rank has printed so many more steps."""
    wanted = printed.read_text().count("are trained") + more
    wait_until(lambda: printed.read_text().count("are trained") >= wanted)


def replaced(text: str, ours: dict[str, str]) -> str:
    for old, new in ours.items():
        assert old in text, old
        text = text.replace(old, new)
    return text

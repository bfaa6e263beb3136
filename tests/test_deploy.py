"""What lies in deploy/ starts: its flags, settings and files are those of today, and its commands run here."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock as ps
from penstock.cli import main
from penstock.plane.settings import server_settings
from tests.support.plane_processes import wait_until
from tests.support.ports import free_port
from tests.support.postgres_server import PostgresServer
from tests.test_docs_claims import options

pytestmark = pytest.mark.process

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SLURM = DEPLOY / "slurm" / "penstock.sbatch"


def documents() -> list[dict[str, Any]]:
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text()) if found]


def pods() -> dict[str, dict[str, Any]]:
    """The specification of each workload's pod."""
    workloads = [one for one in documents() if "template" in one.get("spec", {})]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in workloads}


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods().values() for container in pod["containers"]]


def commands() -> list[list[str]]:
    """Every `penstock COMMAND ...` in deploy/, without the name of the program."""
    found = [container["args"] for container in containers()]
    script = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*$", "", SLURM.read_text()))
    return found + [shlex.split(line) for line in re.findall(r"penstock (serve [^'&]*)", script)]


def test_every_command_and_flag_exists() -> None:
    known = options()
    assert {words[0] for words in commands()} == {"serve"}
    for words in commands():
        flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
        assert flags <= known[words[0]], words


def test_the_plane_of_the_manifest_has_settings_that_are_taken() -> None:
    text = next(one["data"]["plane.toml"] for one in documents() if one["kind"] == "ConfigMap")
    settings = server_settings(tomllib.loads(text))
    ports = {port["name"]: port["containerPort"] for port in pods()["penstock-plane"]["containers"][0]["ports"]}
    assert settings.listen == (f"tcp://0.0.0.0:{ports['plane']}",)
    assert settings.metrics == f"0.0.0.0:{ports['metrics']}"
    grace = pods()["penstock-plane"]["terminationGracePeriodSeconds"]
    assert grace > settings.watchdog.end_s + settings.watchdog.grace_s
    assert settings.timeouts.plane_s >= 300  # Kubernetes takes minutes to give a node up
    assert not settings.folder  # no volume


def test_the_files_of_the_secrets_are_those_that_keys_makes(tmp_path: Path) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    made = {path.relative_to(tmp_path / "keys").as_posix() for path in (tmp_path / "keys").rglob("*") if path.is_file()}
    items = next(v["secret"]["items"] for v in pods()["penstock-plane"]["volumes"] if v["name"] == "secret")
    assert {item["path"] for item in items} - {"metrics-token"} <= made
    script = pods()["penstock-plane"]["initContainers"][0]["args"][0]
    names = re.search(r"for file in ([^;]*);", script)
    assert names is not None
    patterns = [name for name in names[1].split() if name != "metrics-token"]
    assert all(fnmatch.filter(made, pattern) for pattern in patterns)


def test_pods_run_without_privileges_and_probe_what_there_is() -> None:
    for name, pod in pods().items():
        for container in pod["containers"]:
            context = pod["securityContext"] | container["securityContext"]
            assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"], name
            assert context["capabilities"] == {"drop": ["ALL"]} and not context["allowPrivilegeEscalation"]
            assert {"readinessProbe", "livenessProbe"} <= container.keys()
    plane = pods()["penstock-plane"]["containers"][0]
    assert plane["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert plane["readinessProbe"]["httpGet"]["path"] == "/readyz"


# ------------------------------------------------------------------ running it


def answer(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def running(words: list[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], start_new_session=True, **more)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def keys_and_token(folder: Path) -> None:
    assert main(["keys", str(folder)]) == 0
    (folder / "metrics-token").write_text("t" * 40)
    (folder / "metrics-token").chmod(0o600)


def test_the_plane_of_the_manifest_starts_here_and_again_on_another_host(tmp_path: Path, s3_bucket: str) -> None:
    """The command of the manifest, with addresses of this machine in place of the pod's."""
    plane, metrics, keys = free_port(), free_port(), tmp_path / "keys"
    keys_and_token(keys)
    text = next(one["data"]["plane.toml"] for one in documents() if one["kind"] == "ConfigMap")
    args = [word.replace("/config", str(tmp_path)) for word in pods()["penstock-plane"]["containers"][0]["args"]]
    with PostgresServer() as postgres:
        ours = {"/keys": str(keys), ":7440": f":{plane}", ":9464": f":{metrics}", "ranks = 64": "ranks = 1"}
        ours |= {"groups = 256": "groups = 2", "postgresql://penstock@postgres/runs": postgres.url}
        ours |= {"penstock-runs": s3_bucket}
        for old, new in ours.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "plane.toml").write_text(text)
        for number, host in enumerate(("one", "two"), start=1):
            (tmp_path / host).mkdir()
            with running(args, cwd=tmp_path / host):
                wait_until(lambda: answer(metrics, "/readyz") == 200)
                assert (answer(metrics, "/healthz"), answer(metrics, "/metrics")) == (200, 401)
                check_learns(f"tcp://127.0.0.1:{plane}", keys, runs=number)
            assert not list((tmp_path / host).iterdir())  # nothing of the run is on the host


def check_learns(url: str, keys: Path, runs: int = 1) -> None:
    """Groups put there come out as a step. `runs` counts the calls for one run."""
    with ps.open(url, keys=keys) as plane, ps.connect(url, rank=0, world=1, keys=keys) as source:
        for name in ("a", "b"):
            with plane.group(f"{name}-{runs}", timeout=60) as group:
                for reward in (0.0, 1.0):
                    group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
        source.commit(source.step(timeout=60))
        source.flush()
        assert plane.ledger.committed == 4 * runs


SRUN = """#!/bin/bash
# Runs the command once, here, as one node would.
while [[ "${1:-}" == --* ]]; do shift; done
SLURMD_NODENAME=$(hostname) exec "$@"
"""
PROGRAM = """
import os
from pathlib import Path
from tests.test_deploy import check_learns
check_learns(os.environ["PENSTOCK_PLANE"].replace("HEAD", "127.0.0.1"), Path(os.environ["PENSTOCK_KEYS"]))
print("learned")
"""


def test_the_slurm_script_runs_a_program_beside_a_plane(tmp_path: Path) -> None:
    """With an `srun` that runs everything on this host, as a job of one node would be."""
    keys_and_token(tmp_path / "keys")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "penstock").write_text(f'#!/bin/bash\nexec {sys.executable} -m penstock "$@"\n')
    (tools / "hostname").write_text("#!/bin/bash\necho 127.0.0.1\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {
        "PENSTOCK_FOLDER": str(tmp_path / "run"),
        "PENSTOCK_KEYS": str(tmp_path / "keys"),
        "PENSTOCK_PORT": str(free_port()),
        "PENSTOCK_PROBE": f"127.0.0.1:{free_port()}",
        "PENSTOCK_GROUPS": "2",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "1",
        "SLURMD_NODENAME": "here",
        "PYTHONPATH": os.pathsep.join([str(DEPLOY.parent / "src"), str(DEPLOY.parent)]),
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(SLURM), sys.executable, str(tmp_path / "program.py")],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and "learned" in done.stdout, done.stdout + done.stderr
    deadline = time.monotonic() + 60
    while answer(int(settings["PENSTOCK_PROBE"].rpartition(":")[2]), "/healthz") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not answer(int(settings["PENSTOCK_PROBE"].rpartition(":")[2]), "/healthz")  # it ended its children


@pytest.mark.parametrize("path", [*MANIFESTS, SLURM, DEPLOY / "Containerfile"], ids=lambda path: path.name)
def test_images_carry_no_address_and_files_no_secret(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"image: [^\s]*/|^FROM [^\s]*\.[^\s]*/", text, re.MULTILINE)
    assert "BEGIN" not in text

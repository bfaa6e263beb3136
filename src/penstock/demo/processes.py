"""Starts the processes of a run, all forked from one fork server: a plane, rollout workers, trainer ranks, a judge.

Importing torch and transformers costs ten seconds of CPU. The fork server of `multiprocessing` pays that once, before
it has any thread, and every process forked from it shares the imported pages. A killed process is replaced in
milliseconds.

Nothing outlives the launcher: each process ends when the launcher or the fork server does.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

from penstock.errors import Closed
from penstock.server import die_with_parent
from penstock.train import ModelConfig, TrainConfig

ABORTED = 3
"""Exit code of a rank that stopped because another process failed: restart all ranks."""
REFUSED = 4
"""Exit code of a process that rejects its settings: a restart would end the same way."""
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = "penstock.demo.roles"
_STEADY = {"TORCH_FR_BUFFER_SIZE": "64"}
"""Torch records its last 2,000 collectives. Those small long-lived objects between short-lived tensors fragment the
heap: with the full record ranks grew by about 3 MB per 100 steps over their first 500, with 64 entries by 0.3."""
_MAX_SOCKET_PATH = 100
"""A Unix socket's path may have 107 characters; ZeroMQ needs a few of them."""


def address(config: TrainConfig) -> str:
    """Return the plane's address for this run: a socket in its folder, or in /tmp if that path is too long."""
    if config.plane:
        return config.plane
    path = Path(config.folder).resolve() / "plane.sock"
    if len(str(path)) > _MAX_SOCKET_PATH:
        path = Path(tempfile.gettempdir()) / f"penstock-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.sock"
    return f"ipc://{path}"


# ------------------------------------------------------------------ in the launcher


def start_fork_server(config: TrainConfig) -> None:
    """Start the fork server, which begins to import. Does nothing if this process already has one."""
    _CONTEXT.set_forkserver_preload([_PRELOAD, *_modules_of(config.model)])
    with _inherited({**_STEADY, **worker_environment(os.environ)}, _server_log(Path(config.folder))):
        forkserver.ensure_running()


@contextmanager
def _inherited(environment: dict[str, str], log: Path) -> Iterator[None]:
    """Change what a process started in this block inherits: `multiprocessing` has no arguments for that.

    Limits on threads must be in the environment before torch is loaded, and warnings of imports must not reach the
    terminal, where the screen is drawn.
    """
    before, output, error = dict(os.environ), os.dup(1), os.dup(2)
    with log.open("ab") as file:
        try:
            os.environ.update(environment)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            os.dup2(output, 1)
            os.dup2(error, 2)
            os.close(output)
            os.close(error)
            os.environ.clear()
            os.environ.update(before)


def _server_log(folder: Path) -> Path:
    return folder / "logs" / "forkserver.log"


def _modules_of(model: ModelConfig) -> list[str]:
    """Name the transformers module of a model. The fork server ignores a module that does not exist."""
    family = model.family
    if model.path:
        family = json.loads((Path(model.path) / "config.json").read_text()).get("model_type", "")
    return [f"transformers.models.{family}.modeling_{family}", "transformers.models.auto.modeling_auto"]


def start(name: str, folder: Path, environment: dict[str, str]) -> ForkServerProcess:
    """Start "plane", "rank-N", "worker-N" or "judge-N" of a run. Waits until the fork server has imported."""
    process = _CONTEXT.Process(target=_main, args=(name, folder, environment), name=name, daemon=True)
    try:
        process.start()
    except EOFError:
        raise Closed(f"{name}: the fork server ended: {last_lines(_server_log(folder))}") from None
    return process


def last_lines(log: Path, count: int = 1) -> str:
    """Return the last lines of a log that are not blank."""
    with suppress(OSError):
        found = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if found:
            return "\n".join(found[-count:])
    return f"it wrote nothing; its log is {log}"


# ------------------------------------------------------------------ in the process


def _main(name: str, folder: Path, environment: dict[str, str]) -> NoReturn:
    """Redirect output to the process's log, run its role and exit with its code."""
    code = 1
    try:
        log = os.open(folder / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which stops us in order
        os.environ.update(environment)
        die_with_parent(os.getppid(), signal.SIGKILL)  # the fork server
        threading.Thread(target=_end_with_launcher, name="launcher-watch", daemon=True).start()
        from penstock.demo.roles import run_role  # already loaded by the fork server, never by the launcher

        code = run_role(name, folder)
    except BaseException:  # noqa: BLE001 - any failure belongs into the log, and the process must end here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without exit handlers: a rank whose peer died could wait in them forever


def _end_with_launcher() -> None:
    """Exit when the launcher is gone, even after SIGKILL: forked processes keep the fork server alive otherwise."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


THREAD_CAPS: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
    "OMP_DYNAMIC": "FALSE",
    "MKL_NUM_THREADS": "1",
    "MKL_DYNAMIC": "FALSE",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
}


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which native libraries use one thread per process, instead of one per core.

    Dozens of workers with a thread pool per core each spend their time on context switches, and each pool has its own
    memory. The limits must be in the environment before a library is loaded, so a child gets them at its start.

    >>> worker_environment({"HOME": "/root", "OMP_NUM_THREADS": "64"})["OMP_NUM_THREADS"]
    '1'
    """
    return {**environment, **THREAD_CAPS}

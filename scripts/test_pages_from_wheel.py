"""Run every page of docs/integrations where only the built wheel is: as it is, and with `kill -9` in the middle.

    .venv/bin/python -m scripts.test_pages_from_wheel                    every page
    .venv/bin/python -m scripts.test_pages_from_wheel --only trl http    some
    .venv/bin/python -m scripts.test_pages_from_wheel --write            also write the table of canary.md

A page's own install line makes its environment, in a folder below build/pages, with the wheel in place of the name
penstock-rl and the newest versions that the extras allow. Commands run in an empty folder. After the kill the same
commands run again in what the first left behind: they have to finish, and nothing that was acknowledged may be missing.
Exits 1 if a page failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from scripts.run_doc_blocks import blocks
from scripts.run_transcript import Command, Differs, File, run_steps, steps
from scripts.test_canary import write_rows
from scripts.test_packaging import ROOT, UV, build, pythons, torch_source

DOCS = ROOT / "docs" / "integrations"
START, END = "<!-- pages: made by scripts/test_pages_from_wheel.py -->", "<!-- end of pages -->"
_LIMIT_S = 900
_LEDGER = "import json, sys; from penstock.runs import read_run; print(json.dumps(read_run(sys.argv[1])['ledger']))"


class Failed(AssertionError):
    """A page does not do what it says."""


@dataclass
class Trial:
    """A page, its environment, and an empty folder."""

    name: str
    environment: Path
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return (DOCS / f"{self.name}.md").read_text()

    @property
    def given(self) -> dict[str, str]:
        """The variables of a user's shell: this environment first on the path, nothing of ours."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{self.environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

    def blocks(self) -> list[str]:
        """The page's Python blocks, also those that the run of all pages leaves out."""
        return [block.code for block in blocks(self.text)]

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, *words: str) -> subprocess.Popen[str]:
        log = (self.folder / "log.txt").open("a")
        one = subprocess.Popen(
            words, cwd=self.folder, env=self.given, stdout=log, stderr=log, text=True, start_new_session=True
        )
        self.started.append(one)
        return one

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command of the page to its end. Returns what it printed."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.given, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
        if done.returncode != code:
            raise Failed(
                f"{shlex.join(words)[:200]}: exit {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-3000:]}"
            )
        return done.stdout

    def kill(self, *words: str, when: Callable[[], bool]) -> None:
        """Start a command, and end its process, and only that, with `kill -9` as soon as `when()` is true."""
        one = self.start(*words)
        self.wait(lambda: one.poll() is not None or when(), shlex.join(words)[:200])
        one.kill()
        if one.wait() != -signal.SIGKILL:
            raise Failed(f"{shlex.join(words)[:200]}: ended before it could be killed\n{self.log()}")

    def wait(self, done: Callable[[], object], what: str) -> None:
        until = time.monotonic() + _LIMIT_S
        while not done():
            if time.monotonic() > until:
                raise Failed(f"{what}: nothing after {_LIMIT_S} s\n{self.log()}")
            time.sleep(0.005)

    def has(self, place: str) -> Callable[[], bool]:
        return lambda: any(self.folder.glob(place))

    def log(self) -> str:
        path = self.folder / "log.txt"
        return path.read_text()[-3000:] if path.exists() else ""

    def ledger(self, run: str) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.run("python", "-c", _LEDGER, run))
        return found

    def close(self) -> None:
        for one in self.started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()


def expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Failed(f"{what}: {found!r}, not {wanted!r}")


def expect_in(printed: str, wanted: str) -> None:
    if wanted not in printed:
        raise Failed(f"printed {printed[-500:]!r}, which should have {wanted!r}")


# ------------------------------------------------------------------ what each page shows


def trl(trial: Trial) -> None:
    _, advantages, export = trial.blocks()
    expect_in(trial.run("python", _trl_script(trial)), "step 8: 64 samples trained\n")
    expect_in(trial.run("python", "-c", advantages), "[1.0, -1.0, -1.0, 1.0]\n")
    trial.run("python", trial.file("export.py", export))
    trial.run("penstock", "tokens", "tokens")


def trl_killed(trial: Trial) -> str:
    command = ("python", _trl_script(trial), "30")
    trial.kill(*command, when=trial.has("out/checkpoint-3/trainer_state.json"))
    expect_in(trial.run(*command), "step 30: 240 samples trained\n")
    return "trainer, after checkpoint 3 of 30: 240 of 240 samples trained"


def _trl_script(trial: Trial) -> str:
    """The script is on the page with a transcript, which the page of the integration links."""
    (script,) = (
        block.code for block in blocks((DOCS.parent / "half-hour-trl.md").read_text()) if "Durable(" in block.code
    )
    return trial.file("trl_train.py", script)


def transformers(trial: Trial) -> None:
    expect_in(trial.run("python", trial.file("train.py", "".join(trial.blocks()))), "4 32\n")


def transformers_killed(trial: Trial) -> str:
    command = ("python", trial.file("train.py", "".join(trial.blocks())))
    trial.kill(*command, when=trial.has("out/checkpoint-1/trainer_state.json"))
    expect(trial.ledger("run")["accepted"], 32, "accepted before the kill")
    expect_in(trial.run(*command), "4 32\n")
    expect(trial.ledger("run")["accepted"], 32, "accepted after the restart")
    return "trainer with its plane, after checkpoint 1: 4 steps, 32 of 32 samples trained once"


def verifiers(trial: Trial) -> None:
    transcript(trial, list(steps(trial.text)))


def verifiers_killed(trial: Trial) -> str:
    """The page kills trainer and plane itself; here the producer is killed as well, and started again."""
    every = list(steps(trial.text))
    (at,) = (i for i, one in enumerate(every) if isinstance(one, Command) and "--traces traces" in one.words)
    again = every[at]
    assert isinstance(again, Command)
    killed = (
        "ROLLOUTS=$!",
        "until [ $(cat traces/traces.jsonl 2>/dev/null | wc -l) -ge 8 ]; do sleep 0.1; done",
        "kill -9 $ROLLOUTS",
        again.words,
    )
    every[at + 1 : at + 1] = [Command(line=again.line, words=words, shown="") for words in killed]
    (at,) = (i for i, one in enumerate(every) if isinstance(one, Command) and "$TRAINER $PLANE" in one.words)
    look = Command(line=0, words=f'python -c "{_LEDGER}" plane > before.json', shown="")
    every.insert(at + 1, look)
    transcript(trial, every)
    before, after = json.loads((trial.folder / "before.json").read_text()), trial.ledger("plane")
    expect((before["balanced"], after["balanced"]), (True, True), "the plane's ledger is balanced")
    for name in ("accepted", "committed"):
        expect(after[name] >= before[name] > 0, True, f"{name}: {before[name]} before the restart, {after[name]} after")
    return "trainer, plane and producer: 20 steps, what was accepted and committed before is there"


def transcript(trial: Trial, every: list[Command | File]) -> None:
    try:
        run_steps(f"{trial.name}.md", every, trial.folder, trial.given)
    except Differs as error:
        raise Failed(f"{error}\n{trial.log()}") from None


def tinker(trial: Trial) -> None:
    asks_a_server = 2
    shown = [block for i, block in enumerate(trial.blocks()) if i != asks_a_server]
    trial.run("python", trial.file("datums.py", "".join(shown)))


def files(trial: Trial) -> None:
    trial.run("python", trial.file("files.py", "".join(trial.blocks())))
    expect_in(trial.run("penstock", "convert", "groups.penstock", "groups.jsonl"), "1 sample in 1 group, 3 tokens")


def files_killed(trial: Trial) -> str:
    made = "ps.Sample(id=f'{i}/0', group=f'{i}', token_ids=[5, 6, 7], loss_mask=[0, 1, 1])"
    more = f"import penstock as ps\nfor i in range(4_000):\n    file.write(ps.encode([{made}]))\n"
    more = f"file = open('many.penstock', 'wb')\n{more}"
    trial.run("python", trial.file("many.py", more))
    command = ("penstock", "convert", "many.penstock", "many.parquet")
    trial.kill(*command, when=trial.has("*many.parquet*"))
    expect((trial.folder / "many.parquet").exists(), False, "a file of that name before it is complete")
    expect_in(trial.run(*command), "4,000 samples in 4,000 groups,")
    trial.run("python", trial.file("files.py", "".join(trial.blocks())))
    trial.run("python", "files.py")
    return "`penstock convert`: no file until it is complete, then 4,000 of 4,000 samples"


def http(trial: Trial) -> None:
    with served(trial) as put:
        expect(put()[0], {"group": "add-17-25#1", "samples": 2, "new": True}, "the first put")


def http_killed(trial: Trial) -> str:
    with served(trial) as put:
        expect(put()[0]["new"], True, "the first put")
    expect(trial.ledger("runs/demo")["accepted"], 2, "accepted after the kill")
    with served(trial) as put:
        answer, ledger = put()
        expect((answer["new"], ledger["accepted"]), (False, 2), "the same put again")
    return "plane, after a put was acknowledged: it has the group, and knows it when it is sent again"


@contextmanager
def served(trial: Trial) -> Iterator[Callable[[], list[dict[str, object]]]]:
    """The page's plane, on free ports; at the end of the block it is killed."""
    line = next(line for line in trial.text.splitlines() if line.startswith("$ penstock serve"))
    words = shlex.split(line.removeprefix("$ ").replace("7441", "0"))
    log = trial.folder / "log.txt"
    log.unlink(missing_ok=True)
    plane = trial.start(*words, "--listen", "tcp://127.0.0.1:*")
    trial.wait(lambda: plane.poll() is not None or (log.exists() and "its token" in log.read_text()), "penstock serve")
    address = re.search(r"http://127\.0\.0\.1:\d+", trial.log())
    if address is None:
        raise Failed(f"{shlex.join(words)}\n{trial.log()}")
    (block,) = re.findall(r"```bash\n(.*?)```", trial.text, re.DOTALL)

    def put() -> list[dict[str, object]]:
        printed = trial.run("env", f"URL={address[0]}", "bash", "-euc", block)
        return [json.loads(found) for found in re.findall(r"\{.*?\}(?=\{|\s*$)", printed)]

    yield put
    plane.kill()
    expect(plane.wait(), -signal.SIGKILL, "exit code of the plane")


def nemo_gym(trial: Trial) -> None:
    trial.run("python", trial.file("gym.py", "".join(trial.blocks())))
    expect(trial.ledger("runs/gym")["held"], 2, "rollouts held by the plane")


def nemo_gym_killed(trial: Trial) -> str:
    command = ("python", trial.file("gym.py", "".join(trial.blocks())))
    trial.kill(*command, when=trial.has("runs/gym"))
    trial.run(*command)
    expect(trial.ledger("runs/gym")["held"], 2, "rollouts held by the plane")
    return "after both rollouts were captured, while they are put: 2 of 2 rollouts held"


def transfer_queue(trial: Trial) -> None:
    alone(trial, trial.file("rows.py", trial.blocks()[0]))
    expect_in(trial.run("penstock", "view", "queue"), "2 keys (train 2)")


def transfer_queue_killed(trial: Trial) -> str:
    """Where the page closes the queue, the driver is killed. A second process does what comes after that."""
    [block] = trial.blocks()
    before, closes, after = re.split(r"(?m)^(tq\.close\(\)  # the controller is gone.*)$", block)
    assert closes
    head = before[: before.index("tq.init(config)")]
    alone(trial, trial.file("first.py", f"{before}import os; os.kill(os.getpid(), 9)\n"), code=-signal.SIGKILL)
    alone(trial, trial.file("second.py", head + after))
    return "driver with Ray and the controller, after puts and tags: 2 of 2 keys with tags and columns"


def alone(trial: Trial, script: str, code: int = 0) -> None:
    """Run a script where Ray reaches this host and nothing else. Ray's own folder must have a short path."""
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as short:
        network = ("unshare", "-rn", "bash", "-c", 'ip link set lo up && exec "$@"', "bash")
        trial.run(*network, "env", f"RAY_TMPDIR={short}", "RAY_USAGE_STATS_ENABLED=0", "python", script, code=code)


def verl(trial: Trial) -> None:
    """The settings of the page, composed by verl, and its plugin."""
    words = re.findall(r"^  (\+?transfer_queue\.backend\S+)", trial.text, re.MULTILINE)
    expect(len(words), 3, "settings on the page")
    program = (
        "import os, sys, verl\nfrom hydra import compose, initialize_config_dir\n"
        "from transfer_queue.storage.managers.base import StorageManagerFactory as factory\n"
        "folder = os.path.join(os.path.dirname(verl.__file__), 'trainer', 'config')\n"
        "with initialize_config_dir(folder, version_base=None):\n"
        "    queue = compose('ppo_trainer', sys.argv[1:]).transfer_queue\n"
        "print('Penstock' in factory._registry, queue.backend.storage_backend, queue.backend.Penstock.restore)\n"
    )
    expect_in(trial.run("python", "-c", program, *words), "True Penstock True\n")


def check_your_trainer(trial: Trial) -> None:
    trial.run("python", trial.file("check.py", "".join(trial.blocks())))


@dataclass(frozen=True, slots=True)
class Page:
    shown: Callable[[Trial], None]
    killed: Callable[[Trial], str] | str
    """Returns what was killed and what was found, or says why nothing is killed."""
    python: str = ""
    """The version to run it with; by default that of this process."""
    unpacked: str = ""
    """A requirement whose wheel is unpacked, because it asks for a newer Python than there is."""
    beside: tuple[str, ...] = ()
    """What that one needs to be imported."""


PAGES = {
    "trl": Page(trl, trl_killed),
    "transformers": Page(transformers, transformers_killed),
    "verifiers": Page(verifiers, verifiers_killed),
    "http": Page(http, http_killed),
    "files": Page(files, files_killed),
    "nemo-gym": Page(
        nemo_gym, nemo_gym_killed, python="3.13", unpacked="nemo-gym==0.7.0", beside=("orjson", "pydantic", "omegaconf")
    ),
    "transfer-queue": Page(transfer_queue, transfer_queue_killed),
    "verl": Page(verl, "its trainer needs an inference engine; `make test-integrations` kills a job without one"),
    "tinker": Page(tinker, "nothing outlives the process: its plane is in memory, and no server is asked"),
    "check-your-trainer": Page(check_your_trainer, "nothing outlives the process"),
}


def install_line(page: str) -> list[str]:
    """The requirements of a page's own install line.

    >>> install_line("Then `pip install 'penstock-rl[tinker]'`.")
    ['penstock-rl[tinker]']
    """
    found = re.search(r"pip install ([^`\n]*penstock-rl[^`\n]*)", page)
    if found is None:
        raise Failed("the page has no install line")
    return shlex.split(found[1], comments=True)


def made(name: str, page: Page, wheel: Path, folder: Path) -> Path:
    """Make the environment of a page."""
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    python = pythons()[page.python] if page.python else Path(sys.executable)
    line = install_line((DOCS / f"{name}.md").read_text())
    words = [word.replace("penstock-rl", str(wheel)) for word in line if word != page.unpacked]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    (folder / "torch.txt").write_text(f"{torch}\n")  # the CPU build that is here
    at = ["--quiet", "--python", str(place / "bin" / "python"), "--override", str(folder / "torch.txt")]
    commands = (["venv", "--quiet", "--python", str(python), str(place)], ["pip", "install", *at, *words, *page.beside])
    for command in commands:
        done = subprocess.run([UV, *command], env=torch_source(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{shlex.join(words)}: {done.stderr[-2000:]}")
    if page.unpacked:
        pip = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--ignore-requires-python"]
        with tempfile.TemporaryDirectory() as below:
            subprocess.run([*pip, "--only-binary=:all:", "--dest", below, page.unpacked], check=True)
            (site,) = place.glob("lib/*/site-packages")
            shutil.unpack_archive(next(Path(below).glob("*.whl")), site, "zip")
    return place


def tried(name: str, wheel: Path, folder: Path) -> tuple[str, str, bool]:
    """Try a page. Returns how it went as it is, how with the kill, and whether both are fine."""
    page = PAGES[name]
    results = ["", page.killed if isinstance(page.killed, str) else ""]
    try:
        environment = made(name, page, wheel, folder)
        for place, work in enumerate((page.shown, page.killed)):
            if isinstance(work, str):
                continue
            with tempfile.TemporaryDirectory(prefix="ps-page-") as empty:
                trial, began = Trial(name, environment, Path(empty)), time.monotonic()
                try:
                    said = work(trial)
                finally:
                    trial.close()
                results[place] = f"{said or 'runs'}, {time.monotonic() - began:.0f} s"
    except (Failed, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr, flush=True)
        return f"FAILS: {str(error).splitlines()[0][:120]}", results[1], False
    return results[0], results[1], True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PAGES), help="these pages")
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    asked = parser.parse_args()
    folder = ROOT / "build" / "pages"
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    (folder / "wheel").mkdir(parents=True)
    wheel, _ = build(folder / "wheel")
    rows: list[tuple[str, ...]] = []
    is_ok = True
    for name in asked.only or PAGES:
        shown, killed, good = tried(name, wheel, folder)
        print(f"{'ok  ' if good else 'FAIL'} {name}: {shown} | {killed}", flush=True)
        rows.append((f"[{name}]({name}.md)", *(re.sub(r", \d+ s$", "", text) for text in (shown, killed))))
        is_ok = is_ok and good
    if asked.write:
        write_rows(START, END, ("page", "as it is", "with `kill -9`"), rows)
    return 0 if is_ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A pytest plugin: the core time of each test, with the processes that it starts.

    .venv/bin/pytest --core-times times.jsonl --workers 2 tests/plane
    .venv/bin/python -m tests.support.core_time times.jsonl

Wall time says little on a busy machine, and nothing about what a test costs the others. For each test this writes the
seconds that the process and all below it spent on a core. What a browser or a process that forks others does between
two tests counts for the one that runs. The second command adds up modules, the most expensive first. When each test
began and in which worker is in the file as well: it shows what the last workers wait for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

_TICK = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core-times", help="append each test's core seconds to this file")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    path = item.config.getoption("--core-times")
    if path is None:
        return (yield)
    began, before = time.time(), _core_s()
    try:
        return (yield)
    finally:
        times = {"core_s": round(_core_s() - before, 3), "began": round(began, 3), "ended": round(time.time(), 3)}
        line = json.dumps({"test": item.nodeid, "worker": os.getpid(), **times})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _core_s() -> float:
    """Seconds of this process, of those it has waited for, and of all that run below it."""
    return time.process_time() + _ended_s("self") + sum(_below_s(pid) for pid in _children("self"))


def _below_s(pid: str) -> float:
    with suppress(FileNotFoundError, ProcessLookupError):  # it ends while we look
        return _own_s(pid) + _ended_s(pid) + sum(_below_s(child) for child in _children(pid))
    return 0.0


def _children(pid: str) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield from (task / "children").read_text().split()


def _own_s(pid: str) -> float:
    return sum(map(int, _fields(pid)[11:13])) / _TICK


def _ended_s(pid: str) -> float:
    return sum(map(int, _fields(pid)[13:15])) / _TICK


def _fields(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def main(words: Sequence[str]) -> None:
    rows = [json.loads(line) for line in Path(words[0]).read_text(encoding="utf-8").splitlines()]
    modules: dict[str, list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        modules[row["test"].partition("::")[0]].append(row)
    print(f"{sum(row['core_s'] for row in rows):9.1f} s of core time in all")
    for module, found in sorted(modules.items(), key=lambda entry: -sum(row["core_s"] for row in entry[1])):
        core_s, wall_s = (sum(map(of, found)) for of in (_core, _wall))
        most = max(map(_core, found))
        print(f"{core_s:9.1f} core, {wall_s:7.1f} wall, {len(found):5} tests, the most {most:6.1f}  {module}")


def _core(row: dict[str, float]) -> float:
    return row["core_s"]


def _wall(row: dict[str, float]) -> float:
    return row["ended"] - row["began"]


if __name__ == "__main__":
    main(sys.argv[1:])

"""A conformance suite for decision logs: subclass it and run it over yours.

    class TestMine(LogSuite):
        opener = "from mine import MyLog\\nlog = MyLog(sys.argv[1])"

Needs the `pytest` package.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.errors import CorruptFile, Fenced, StorageError
from penstock.log import (
    FORMAT,
    Advance,
    Discard,
    GroupOutcome,
    GroupRow,
    HandOut,
    Log,
    LogReader,
    SegmentRow,
    State,
    Summary,
    Unlisted,
    reading,
)

_TAKE_OVER = "print(log.epoch, flush=True)\nsys.stdin.read()\nlog.close()"
_WRITE = """
from penstock.log import GroupRow
op = log.last_op
while True:
    with log.transaction():
        for number in range(3):
            op += 1
            log.add_groups([(GroupRow(op, f"g{op}", b"d" * 16, None, 1, 1, 1, location=f"s@{op}"), b"f")])
        log.set_meta("last", op)
    print(op, flush=True)
"""


SUMMARY = Summary(env="math\0", tenant="t", rewards=b"\0\0\x80?", lengths=b"\x05\0\0\0")
FILTERED = GroupOutcome(outcome="filtered", reason="\0", unlisted=(Unlisted(group="é", prompt="p", summary=SUMMARY),))


def row(op: int, **more: Any) -> GroupRow:
    values: dict[str, Any] = {"id": f"g{op}", "digest": bytes(16), "policy_version": 3, "samples": 2, "tokens": 10}
    return GroupRow(op, **{**values, "size": 100, "location": f"seg@{op}", **more})


def add(log: Log, *ops: int) -> None:
    with log.transaction():
        log.add_groups([(row(op), b"metadata %d" % op) for op in ops])


class LogSuite:
    """Every log passes these tests."""

    opener: ClassVar[str]
    """Python code that opens the log of the folder in sys.argv[1] as `log`, even while another process has it."""

    def open(self, folder: Path, **options: Any) -> Log:
        """Open the log of a folder. The first call creates it, later calls open the same log."""
        raise NotImplementedError

    def set_format(self, folder: Path, number: int) -> None:
        """Change the format number in a closed log."""
        raise NotImplementedError

    def other_process(self, folder: Path, program: str) -> subprocess.Popen[str]:
        """Start a process that opens the same log and runs a program with it."""
        text = f"import sys\n{self.opener_of(folder)}\n{program}"
        command = [sys.executable, "-c", text, str(folder)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    def opener_of(self, folder: Path) -> str:  # noqa: ARG002 - for those that need it
        return self.opener

    # -------------------------------------------------------------- what was written is read

    def test_everything_comes_back_after_a_restart(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        odd = row(
            2, id="a\0b\x1a\x1a0 é'\"%s?", policy_version=None, reason="\0", kinds=(("x", "y"),), run="r", prompt="p"
        )
        with log.transaction():
            log.add_groups([(row(1, size=1 << 60), b"\0facts"), (odd, b"")])
            log.add_record(3, Advance(policy_version=7))
            log.add_record(4, Discard(reason="why", samples=3, key="k\0"))
            log.add_discard("k\0")
            log.add_step(1, 5, b"manifest")
            log.add_segment(SegmentRow("seg", "writer", 1))
            log.add_frees(["seg2", "seg@9"])
            log.set_snapshot(4, b"\0snapshot")
            log.set_meta("count", 17)
            log.set_meta("words", "a\0b")
            log.add_summaries([(1, SUMMARY)])
            log.add_outcomes([(2, GroupOutcome(outcome="trained", step=1, groups=(1, 2))), (3, FILTERED)])
        run_id, commits = log.run_id, log.commits
        log.close()
        again = self.open(tmp_path)
        assert (again.run_id, again.epoch, again.commits) == (run_id, 2, commits + 1)
        assert list(again.groups()) == [row(1, size=1 << 60), odd]
        assert again.digest_of(odd.id) == odd.digest
        assert again.metadata_of([1, 2, 3]) == {1: b"\0facts", 2: b""}
        assert dict(again.records()) == {3: Advance(policy_version=7), 4: Discard(reason="why", samples=3, key="k\0")}
        assert again.is_discarded("k\0")
        assert list(again.steps()) == [(1, 5, b"manifest", State.SCHEDULED)]
        assert again.segments() == [SegmentRow("seg", "writer", 1)]
        assert sorted(again.frees()) == ["seg2", "seg@9"]
        assert again.snapshot() == (4, b"\0snapshot")
        assert (again.meta("count", 0), again.text("words"), again.text("none")) == (17, "a\0b", "")
        assert again.last_op == 5
        assert again.summaries([1, 2]) == {1: SUMMARY}
        assert again.num_events == 3
        assert [number for number, _ in again.outcomes(0, 10)] == [2, 3]
        assert again.outcomes(1, 1)[0][1].groups == (1, 2)
        assert again.outcomes(2, 10) == [(3, FILTERED)]
        assert again.outcomes(3, 10) == []
        again.close()

    def test_prompts_come_back_by_number(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        with log.transaction():
            log.add_prompts(1, [("a", b""), ("b\0\x1a", b'{"x":1}'), ("c", b"\0")])
            log.add_prompts(2, [("other", b"")])  # sent twice: what is there stays
        with log.transaction():
            log.remove_prompts(3)
            log.add_record(1, HandOut(kind="prompt", keys=("k", "l"), worker="w", lease_s=2.5))
        log.close()
        again = self.open(tmp_path)
        assert again.prompts_of([2, 1, 3]) == {1: ("a", b""), 2: ("b\0\x1a", b'{"x":1}')}
        assert again.prompt_names(1, 5) == ["a", "b\0\x1a"]
        assert dict(again.records()) == {1: HandOut(kind="prompt", keys=("k", "l"), worker="w", lease_s=2.5)}
        again.close()

    def test_metadata_kinds_and_frame_of_a_group_are_replaced(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        with log.transaction():
            log.add_groups([(row(1), b"before"), (row(2), b"other")])
        with log.transaction():
            log.set_metadata(1, b"\0after", (("advantages", "with"),))
            log.set_frame(1, "s:7:9", b"\0" * 16)
        log.close()
        again = self.open(tmp_path)
        assert again.metadata_of([1, 2]) == {1: b"\0after", 2: b"other"}
        assert [found.kinds for found in again.groups()] == [(("advantages", "with"),), ()]
        assert (again.location_at(1), again.digest_of(row(1).id)) == ("s:7:9", b"\0" * 16)
        again.close()

    def test_groups_come_in_order_and_as_they_are_asked_for(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        add(log, 9, 2, 5)
        assert [found.op for found in log.groups()] == [2, 5, 9]
        assert [found.op for found in log.groups(after=2)] == [5, 9]
        assert [found.op for found in log.groups_of([9, 2, 9, 4])] == [9, 2, 9]
        assert log.num_frames == 3
        assert (log.location_of("g5"), log.location_at(5), log.location_of("g4")) == ("seg@5", "seg@5", "")
        log.close()

    def test_what_is_known_of_groups_follows_what_is_written(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        log.look_up(["g1", "g2"], ["k"])
        assert (log.digest_of("g1"), log.is_discarded("k")) == (None, False)
        with log.transaction():
            log.add_groups([(row(1, state=State.EVALUATION), b"x")])
            log.add_discard("k")
        assert (log.digest_of("g1"), log.is_evaluation("g1"), log.is_discarded("k")) == (bytes(16), True, True)
        assert log.states_of(["g2", "g1", "g\0"]) == {"g1": (1, State.EVALUATION, "")}
        many = ["g\0", *(f"g{op}" for op in range(100))]
        log.look_up(many, [])
        assert [name for name in many if log.digest_of(name) is not None] == ["g1"]
        with log.transaction():
            log.add_groups([(row(40), b"x"), (row(41, id="g\0"), b"x")])
        assert [name for name in many if log.digest_of(name) is not None] == ["g\0", "g1", "g40"]
        log.look_up(many, [])
        assert [name for name in many if log.digest_of(name) is not None] == ["g\0", "g1", "g40"]
        log.close()

    def test_states_uses_and_frames_change(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        add(log, 1, 2, 3)
        with log.transaction():
            log.set_groups([1, 2], State.QUARANTINED, "odd")
            log.count_uses([3, 3, 2])
            log.forget_frames([2])
            log.mark_settled(1)
        assert [found.op for found in log.groups_in(State.QUARANTINED)] == [2]
        assert log.totals() == {(State.HELD, ""): 4, (State.QUARANTINED, "odd"): 2}
        assert log.with_frames() == {1, 3}
        assert sorted(log.rows("SELECT op, uses FROM groups")) == [(1, 0), (2, 1), (3, 2)]
        log.close()

    def test_what_is_forgotten_leaves_what_a_run_still_needs(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        whole = row(1, kinds=(("logprobs", "with"),), prompt="p", run="r")
        with log.transaction():
            log.add_groups([(whole, b"metadata"), (row(2, kinds=whole.kinds), b"metadata")])
            log.add_step(1, 3, b"plan" * 500)
        with log.transaction():
            log.set_groups([1], State.COMMITTED)
            log.set_steps(1, 1, State.COMMITTED)
            log.forget_frames([1])
            log.set_manifest(1, b"slim")
            log.set_manifest(2, b"unknown")
        kept = replace(whole, state=State.COMMITTED, location="", kinds=())
        assert list(log.groups()) == [kept, row(2, kinds=whole.kinds)]
        assert log.digest_of("g1") == whole.digest
        assert list(log.steps()) == [(1, 3, b"slim", State.COMMITTED)]
        log.close()

    def test_forgotten_plans_give_their_room_back(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        for first in range(1, 401, 40):
            with log.transaction():
                for step in range(first, first + 40):
                    log.add_step(step, step, b"plan" * 500)
                for step in range(first - 40, first) if first > 1 else ():
                    log.set_manifest(step, b"slim")
        log.shrink()
        assert log.used_bytes < 400 << 10  # the plans were 800 kB; 0 for a database on a disk of its own
        log.close()

    def test_steps_that_are_removed_take_later_snapshots_along(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        with log.transaction():
            for step in (1, 2, 3):
                log.add_step(step, 10 * step, b"m")
            log.set_steps(1, 2, State.DELIVERED)
            log.set_snapshot(25, b"s")
        with log.transaction():
            log.remove_steps(3)
        assert log.snapshot() == (25, b"s")
        with log.transaction():
            log.remove_steps(2)
        assert log.snapshot() is None
        assert list(log.steps()) == [(1, 10, b"m", State.DELIVERED)]
        log.close()

    def test_segments_are_sealed_and_freed_by_name(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        with log.transaction():
            log.add_segment(SegmentRow("a", "w", 1))
            log.add_segment(SegmentRow("b", "w", 1))
        with log.transaction():
            log.seal_segment("a", at=12.5, clean=True)
            log.add_frees(["a", "b@1"])
            log.add_frees(["a"])
        assert sorted(log.segments(), key=lambda one: one.name)[0] == SegmentRow("a", "w", 1, 12.5, True)
        with log.transaction():
            log.remove_frees(["a"])
        assert ([one.name for one in log.segments()], log.frees()) == (["b"], ["b@1"])
        log.close()

    # -------------------------------------------------------------- transactions

    def test_a_transaction_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        add(log, 1)
        before = log.commits
        with pytest.raises(ZeroDivisionError), log.transaction():
            log.add_groups([(row(2), b"x")])
            raise ZeroDivisionError
        with pytest.raises(StorageError), log.transaction():  # the same id again: refused by the database itself
            log.add_groups([(row(3), b"x")])
            log.add_groups([(row(4, id="g1"), b"x")])
        assert (log.commits, [found.op for found in log.groups()]) == (before, [1])
        add(log, 2)
        assert (log.commits, [found.op for found in log.groups()]) == (before + 1, [1, 2])
        log.close()

    def test_a_killed_process_loses_nothing_it_reported_and_leaves_no_half(self, tmp_path: Path) -> None:
        self.open(tmp_path).close()
        reported = 0
        for _ in range(3):
            writer = self.other_process(tmp_path, _WRITE)
            assert writer.stdout is not None
            for _ in range(20):
                reported = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            reported = max([reported, *(int(line) for line in writer.stdout.read().split())])
            _end(writer)
            log = self.open(tmp_path)
            last = log.meta("last", 0)
            assert last >= reported
            assert [found.op for found in log.groups()] == list(range(1, last + 1))
            assert len(log.with_frames()) == last
            log.close()

    # -------------------------------------------------------------- ownership

    def test_a_plane_that_was_taken_over_writes_nothing(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        add(log, 1)
        rival = self.other_process(tmp_path, _TAKE_OVER)
        assert rival.stdout is not None
        assert int(rival.stdout.readline()) == 2
        with pytest.raises(Fenced, match="taken over by epoch 2"):
            add(log, 2)
        with pytest.raises(Fenced):
            log.check_epoch()
        log.close()
        rival.communicate("")
        again = self.open(tmp_path)
        assert ([found.op for found in again.groups()], again.epoch) == ([1], 3)
        again.close()

    def test_the_guard_is_asked_before_it_is_taken_over(self, tmp_path: Path) -> None:
        seen: list[dict[str, Any]] = []

        def refuse(**metadata: Any) -> None:
            seen.append(metadata)
            raise CorruptFile("not this one")

        log = self.open(tmp_path, guard=lambda **metadata: seen.append(metadata))
        add(log, 1)
        commits, run_id = log.commits, log.run_id
        log.close()
        with pytest.raises(CorruptFile, match="not this one"):
            self.open(tmp_path, guard=refuse)
        again = self.open(tmp_path)
        assert again.epoch == 2
        again.close()
        assert seen[0] == {"run_id": run_id, "epoch": 1, "commits": 0, "held": 0, "is_new": True}
        assert seen[1] == {"run_id": run_id, "epoch": 2, "commits": commits, "held": 1, "is_new": False}

    @pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
    def test_another_format_is_refused_by_name(self, tmp_path: Path, number: int) -> None:
        log = self.open(tmp_path)
        add(log, 1)
        log.close()
        self.set_format(tmp_path, number)
        with pytest.raises(CorruptFile, match=f"format {number}; this version reads format {FORMAT}"):
            self.open(tmp_path)

    # -------------------------------------------------------------- readers

    def test_a_reader_sees_one_moment_beside_the_plane(self, tmp_path: Path) -> None:
        log = self.open(tmp_path)
        add(log, 1)
        with reading(tmp_path) as reader:
            before = _view(reader)
            add(log, 2)
            assert _view(reader) == before == ([1], str(log.commits - 1), log.run_id)
        with reading(tmp_path) as reader:
            assert _view(reader) == ([1, 2], str(log.commits), log.run_id)
            assert reader.all_meta()["format"] == str(FORMAT)
        log.close()


def _view(reader: LogReader) -> tuple[list[int], str, str]:
    meta = reader.all_meta()
    return [found.op for found in reader.groups()], meta["commits"], meta["run_id"]


def _end(process: subprocess.Popen[str]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()

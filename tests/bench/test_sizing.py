"""A simulated cluster reacts as a real one must, and its utilisation is work over time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.bench.sizing.answers import Sized, as_svg, simulate
from penstock.bench.sizing.calibrate import SIZE, calibrate, make_group
from penstock.bench.sizing.cluster import Simulation
from penstock.bench.sizing.constants import KINDS, SHIPPED, read_constants, write_constants
from penstock.bench.sizing.events import BatchQueue, Clock, Countdown, Queue
from penstock.bench.sizing.model import Cluster, facts_of
from penstock.cli import main
from penstock.encode import encode
from penstock.errors import ConfigError, InvalidInput
from penstock.keep import check_group
from penstock.keep.facts import join_facts
from penstock.pack import Packing, plan

CONSTANTS = read_constants()
SMALL = Cluster(workers=32, ranks=8, nodes=8, groups_per_step=16, steps=3, warm_up=1)


def sized(**changes: object) -> Sized:
    return simulate(replace(SMALL, **changes), CONSTANTS)  # type: ignore[arg-type]


# ------------------------------------------------------------------ the servers


def test_a_queue_works_in_order_and_is_busy_as_long_as_it_works() -> None:
    clock, done = Clock(), list[tuple[str, float]]()
    queue = Queue(clock)
    for name, seconds in (("a", 2.0), ("b", 1.0)):
        queue.do(seconds, lambda name=name: done.append((name, clock.now)))  # type: ignore[misc]
    clock.after(5.0, lambda: queue.do(1.0, lambda: done.append(("c", clock.now))))
    clock.run(lambda: False)
    assert done == [("a", 2.0), ("b", 3.0), ("c", 6.0)]
    assert queue.busy.share == pytest.approx(4 / 6)


def test_long_work_lets_others_in_between_its_slices() -> None:
    clock, done = Clock(), list[tuple[str, float]]()
    queue = Queue(clock, slice_s=1.0)
    queue.do(10.0, lambda: done.append(("long", clock.now)))
    queue.do(0.5, lambda: done.append(("short", clock.now)))
    clock.run(lambda: False)
    assert done == [("short", 1.5), ("long", 10.5)]


def test_a_disk_syncs_what_waits_together() -> None:
    clock, done = Clock(), list[float]()
    disk = BatchQueue(clock, sync_s=1.0, bytes_s=100.0)
    for _ in range(4):
        disk.write(100.0, lambda: done.append(clock.now))
    clock.run(lambda: False)
    assert done == [2.0, 6.0, 6.0, 6.0]  # the first alone, then three with one sync
    assert disk.busy.seconds == 6.0


def test_a_countdown_calls_once() -> None:
    called = list[int]()
    count = Countdown(3, lambda: called.append(1))
    for _ in range(3):
        count()
    assert called == [1]


# ------------------------------------------------------------------ the cluster


def test_utilisation_is_work_over_time_by_hand() -> None:
    """One worker, one node, one rank, one copy: everything that was done can be counted."""
    cluster = Cluster(
        workers=1, ranks=1, nodes=1, copies=1, tokens=512, groups_per_step=2, steps=4, warm_up=1, train_s=0.01
    )
    run = Simulation(cluster, CONSTANTS)
    took, put = list[int](), list[int]()
    take, offer, begin = run._take, run._offer, run._begin_counting

    def note_take(rank: int, parts: dict[int, tuple[int, int]], began: float, everybody: Countdown) -> None:
        took.append(sum(tokens for _, tokens in parts.values()))
        take(rank, parts, began, everybody)

    def note_put(group: Any, worker: int) -> None:
        put.append(group.tokens)
        offer(group, worker)

    def begin_again() -> None:
        took.clear()
        put.clear()
        begin()

    for name, act in (("_take", note_take), ("_offer", note_put), ("_begin_counting", begin_again)):
        setattr(run, name, act)
    run.run()
    kind, plane = CONSTANTS.kinds["text"], CONSTANTS.plane
    seconds = run.clock.now - run.seen.since
    assert (len(took), len(put)) == (4, 8)
    work = sum(kind.keep.of(t) + CONSTANTS.send_byte_s * kind.frame_bytes * t + 2 * CONSTANTS.call_s for t in put)
    work += sum(kind.take.of(t) + CONSTANTS.send_byte_s * kind.taken_bytes * t + CONSTANTS.call_s for t in took)
    assert run.nodes[0].keeper.busy.share == pytest.approx(work / seconds, rel=1e-6)
    written = sum(CONSTANTS.disk.sync_s + kind.frame_bytes * t / CONSTANTS.disk.write_bytes_s for t in put)
    assert run.nodes[0].disk.busy.share == pytest.approx(written / seconds, rel=1e-6)
    assert run.nodes[0].sends.busy.share == 0.0  # everything is on one node
    plane_work = 8 * (plane.accept_s + CONSTANTS.call_s) + 4 * (2 * SIZE * plane.sample_s + plane.rank_s)
    assert run.plane.busy.share == pytest.approx(plane_work / seconds, rel=0.2)  # and some messages


def test_more_nodes_make_keepers_less_busy() -> None:
    few, many = sized(nodes=4), sized(nodes=16)
    # Not a quarter: a rank's samples are on more keepers, and each call costs.
    assert many.busy["keepers"].mean < 0.75 * few.busy["keepers"].mean
    assert many.busy["disks"].mean < 0.5 * few.busy["disks"].mean


def test_router_replay_fills_thin_links_first_and_text_does_not() -> None:
    heavy = sized(columns="r3", link_bytes_s=0.02e9 / 8, steps=5)
    assert heavy.first.startswith("network") and heavy.is_full
    wide = sized(columns="r3", link_bytes_s=100e9 / 8)
    assert wide.put_p99_s < heavy.put_p99_s / 10 and wide.step_p99_s < heavy.step_p99_s / 10
    text = sized(link_bytes_s=0.02e9 / 8)
    assert text.busy["network out"].mean < 0.2


def test_a_second_copy_costs_network_and_disk() -> None:
    one, two = sized(copies=1, columns="r3"), sized(copies=2, columns="r3")
    assert two.busy["disks"].mean > 1.6 * one.busy["disks"].mean
    assert two.node_bytes_s > 1.5 * one.node_bytes_s


def test_what_the_plane_sees_does_not_depend_on_what_a_token_carries() -> None:
    text, heavy = sized(), sized(columns="topk")
    assert heavy.busy["plane"].mean == pytest.approx(text.busy["plane"].mean, rel=0.3)
    assert heavy.node_bytes_s > 30 * text.node_bytes_s


def test_a_slow_trainer_makes_workers_wait_for_room() -> None:
    slow = sized(train_s=10 * SMALL.step_s, steps=4)
    assert slow.workers_wait > 0.3 and slow.trainer_waits < 0.2
    assert sized().workers_wait == 0.0


def test_the_same_seed_gives_the_same_answer_and_another_one_does_not() -> None:
    assert sized(seed=7) == sized(seed=7)
    assert sized(seed=7) != sized(seed=8)


def test_facts_without_samples_plan_as_facts_do() -> None:
    template = check_group(encode(make_group("text", 32)), group="g", seq_len=64)
    lengths = np.arange(10, 10 + SIZE)
    made = plan(join_facts([facts_of(template, "a", lengths)]), Packing(ranks=2, seq_len=64))
    assert sum(int(part.cuts.sum()) for part in made.rank_plans) >= lengths.sum()
    assert made.totals.step.loss_tokens == (lengths * 3 // 4).sum()


@pytest.mark.parametrize(
    ("name", "value"),
    [("workers", 0), ("link_bytes_s", 0.0), ("columns", "pixels"), ("copies", 9), ("groups_per_step", -1)],
)
def test_a_cluster_that_cannot_be_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(SMALL, **{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------ constants and the command


def test_constants_are_measured_in_plausible_sizes(tmp_path: Path) -> None:
    found = calibrate(rounds=1)
    assert set(found.kinds) == set(KINDS)
    for kind in found.kinds.values():
        assert all(0 <= line.token_s < 1e-4 for line in (kind.encode, kind.keep, kind.take, kind.fill))
    assert 3 < found.kinds["text"].frame_bytes < 8 and 300 < found.kinds["r3"].frame_bytes < 400
    assert 0 < found.plane.accept_s < 0.1 and 1e6 < found.disk.write_bytes_s < 1e12
    write_constants(found, tmp_path / "here.json")
    assert read_constants(tmp_path / "here.json") == found


def test_constants_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="calibrate"):
        read_constants(tmp_path / "none.json")
    data = msgspec.json.decode(SHIPPED.read_bytes())
    del data["plane"]["accept_s"]
    (tmp_path / "bad.json").write_bytes(msgspec.json.encode(data))
    with pytest.raises(ConfigError, match="accept_s"):
        read_constants(tmp_path / "bad.json")


def test_the_command_answers_in_words_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "cluster", "--workers", "16", "--ranks", "4", "--tokens", "512", "--steps", "2"]
    assert main([*words, "--plot", str(tmp_path / "sizing.svg")]) == 0
    text = capsys.readouterr().out
    assert "First to be full: " in text and "links are given, not measured" in text and "p99" in text
    picture = (tmp_path / "sizing.svg").read_text()
    assert picture.startswith("<svg") and "keepers" in picture
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["nodes"] == 2 and found["measured"]["date"] == CONSTANTS.date
    assert as_svg(Cluster(**found["cluster"]), sized()).count("<rect") == 1 + 3 * len(found["answer"]["busy"])
    assert main(["simulate", "calibrate"]) == 1
    assert "--out" in capsys.readouterr().err

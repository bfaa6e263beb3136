"""What people see of an object: one short line in a terminal, a small table in a notebook."""

from __future__ import annotations

import importlib
from html.parser import HTMLParser
from typing import Any

import penstock as ps
from penstock.notebook import MAX_ROWS, html_table


class Cells(HTMLParser):
    """Collects tags and texts of a table; raises on tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(thing: Any) -> tuple[str, list[str]]:
    text = repr(thing)
    assert "\n" not in text and len(text) < 160 and " object at 0x" not in text
    return text, Cells(thing._repr_html_()).texts


def test_every_object_of_a_loop_has_a_short_repr_and_a_table() -> None:
    with ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1) as plane:
        with plane.group("<b>prompt</b>", policy_version=0) as builder:
            for reward in (0.0, 1.0):
                builder.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
            assert shown(builder)[0] == "GroupBuilder('<b>prompt</b>', 2 rollouts, policy_version=0)"
            assert "<b>prompt</b>" in shown(builder)[1][0]  # as text: no tag was opened
            assert shown(builder.make())[1].count("3") == 2
        with plane.source(rank=0) as source:
            step = source.step(timeout=60)
            assert shown(step)[0] == "Step(1, rank 0, 1 micro-batches, 2 trained tokens on all ranks)"
            assert shown(step[0])[1][1:4] == ["column", "dtype", "shape"]
            assert shown(source)[0] == "Source(rank 0 of 1, next step 2, committed 0)"
            source.commit(step)
            source.flush()
        assert shown(plane.ledger)[0] == "Ledger(2 accepted = 2 committed (balanced))"
        assert "waiting for" in shown(plane)[1]
        assert repr(plane) == "Plane('memory:', in this process)"
    assert shown(plane)[0] == "Plane('memory:', in this process, closed)"
    packed = ps.pack([ps.Sample(id="a", token_ids=[1, 2], loss_mask=[0, 1])], ranks=2, seq_len=8)
    assert shown(packed)[0] == "PackedStep(2 ranks, 1 micro-batches each, 1 trained tokens)"
    assert shown(packed.ranks[0])[1][1] == "micro-batch"


def test_a_long_table_says_how_many_rows_it_leaves_out() -> None:
    assert Cells(html_table("many", [(i,) for i in range(MAX_ROWS + 7)])).texts[-1] == "and 7 more"


def test_completion_offers_what_a_package_exports() -> None:
    assert {"Timeouts", "Step", "open"} <= set(dir(ps))
    for name in ("train", "packing", "client", "view", "replay"):
        package = importlib.import_module(f"penstock.{name}")
        assert set(package.__all__) == set(dir(package))
    train = importlib.import_module("penstock.train")
    assert {"Dppo", "Grpo", "Ipo", "Opd", "RefKl", "Sft", "ByMode"} <= set(dir(train))


def test_names_are_where_the_docs_use_them() -> None:
    assert ps.Timeouts(plane_s=600).plane_s == 600
    assert ps.Source.step.__annotations__["return"] == "Step" and ps.Step.__module__ == "penstock.client.source"

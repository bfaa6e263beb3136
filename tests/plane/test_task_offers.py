"""Lists that several workers open at the same moment."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from penstock.errors import InvalidInput
from penstock.plane.settings import Target
from penstock.protocol import AddPrompts, OfferPrompts, PromptsOffered, chunk_prompts, list_digest
from tests.support.planes import OpenEngine
from tests.support.task_model import TaskRun

(CHUNK,) = chunk_prompts([("a", b""), ("b", b"")])
OFFER = OfferPrompts(
    ticket=1,
    list="p",
    digest=list_digest((CHUNK.digest,)),
    count=2,
    chunks=(CHUNK.digest,),
    epochs=1,
    seed=0,
    shuffle=True,
    attempts=3,
    again=(),
)


@pytest.fixture
def run(open_engine: OpenEngine) -> TaskRun:
    """With all prompts of the list, which is not open yet."""
    found = TaskRun(open_engine(target=Target(groups=2), ranks=1), random.Random(0))
    assert found._ask(OFFER) == PromptsOffered(ticket=1, missing=(0,))
    assert found._ask(AddPrompts(ticket=2, digest=OFFER.digest, chunk=0, **CHUNK._asdict())) is None
    return found


def offer_at_once(run: TaskRun, **changes: Any) -> list[Any]:
    run.answers.clear()
    for offer in (OFFER, msgspec.structs.replace(OFFER, ticket=3, **changes)):
        run.service.on_message("peer", offer, run.now)
    run.turn()
    run.turn()
    return run.answers


def test_two_that_ask_for_the_same_are_both_answered(run: TaskRun) -> None:
    assert offer_at_once(run) == [PromptsOffered(ticket=1), PromptsOffered(ticket=3)]


def test_the_second_order_is_rejected_also_if_it_comes_before_the_first_is_open(run: TaskRun) -> None:
    first, second = offer_at_once(run, shuffle=False)
    assert first == PromptsOffered(ticket=1)
    assert isinstance(second, InvalidInput) and "asked for in the order Sequential(shuffle=False)" in str(second)


def test_the_same_prompts_under_another_name_are_a_list_of_their_own(run: TaskRun) -> None:
    assert offer_at_once(run, list="q") == [PromptsOffered(ticket=1), PromptsOffered(ticket=3, missing=(0,))]
    assert list(run.engine.state.tasks.lists) == ["p"]
    assert run._ask(AddPrompts(ticket=4, digest=OFFER.digest, chunk=0, **CHUNK._asdict())) is None
    assert run._ask(msgspec.structs.replace(OFFER, ticket=5, list="q")) == PromptsOffered(ticket=5)
    assert list(run.engine.state.tasks.lists) == ["p", "q"]


def test_a_list_does_not_get_prompts_of_an_upload_that_gave_way_to_it(run: TaskRun) -> None:
    """Sixteen lists are on their way, and all but the last are opening. The next one takes the place of the last."""

    def say(message: Any) -> None:
        run.service.on_message("peer", message, run.now)

    def upload(name: str) -> OfferPrompts:
        (chunk,) = chunk_prompts([(f"{name}/0", b""), (f"{name}/1", b"")])
        offer = msgspec.structs.replace(OFFER, list=name, digest=list_digest((chunk.digest,)), chunks=(chunk.digest,))
        say(offer)
        say(AddPrompts(ticket=2, digest=offer.digest, chunk=0, **chunk._asdict()))
        return offer

    say(OFFER)
    for number in range(14):
        say(upload(f"opening {number}"))
    upload("gives way")
    say(upload("takes its place"))
    for _ in range(20):
        run.turn()
    lists = run.engine.state.tasks.lists
    assert len(lists) == 16 and "gives way" not in lists
    for name, found in lists.items():
        names = run.engine.log.prompt_names(found.opened.base, 2)
        assert names == (["a", "b"] if name == "p" else [f"{name}/0", f"{name}/1"])

"""One group's way through a plane, counted: docs/internals/path.md says how often each hop happens, and it is so."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import CodeType, FrameType

import penstock as ps
from penstock.capture import Trajectory, Turn
from penstock.client.source import Source, Step
from penstock.frames import decode, encode
from tests.support.planes import PATIENT

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "internals" / "path.md").read_text()
RANKS, ROLLOUTS = 2, 4
_ON_PUT = "penstock.protocol.admission:Admission._on_put"
_ANSWER = "penstock.protocol.admission:Admission.answer"
_HOP = re.compile(r"(?m)^\|.*\| `(penstock[\w.]+):([\w.]+)` \|(?: ([^|]+) \|)?$")
_CALLS = re.compile(r"(?:(\d+)(?: \+ |$))?(?:(\d+) per (rank|rollout))?")


THROUGH = "## Through the plane"
DIRECT_PART, _, _rest = PAGE.partition(THROUGH)
THROUGH_PART, _, _ = _rest.partition("\n## ")


def hops(text: str = PAGE) -> dict[str, str]:
    """`module:function` of every hop on the page -> how often it says that it happens; empty where it does not say."""
    return {f"{module}:{name}": calls for module, name, calls in _HOP.findall(text)}


def promised(calls: str) -> int:
    """The number that words such as "1 + 1 per rank" mean here."""
    found = _CALLS.fullmatch(calls)
    assert found is not None, calls
    once, each, what = found.groups()
    return int(once or 0) + int(each or 0) * {"rank": RANKS, "rollout": ROLLOUTS, None: 0}[what]


def code_of(hop: str) -> CodeType:
    module, _, name = hop.partition(":")
    found: CodeType = reduce(getattr, name.split("."), importlib.import_module(module)).__code__
    return found


@contextmanager
def counting(hops: list[str]) -> Iterator[Callable[[], dict[str, int]]]:
    """Counts calls of these functions, in this thread and in those begun meanwhile."""
    codes, called = {code_of(hop): hop for hop in hops}, deque[str]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            called.append(codes[frame.f_code])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield lambda: dict(Counter(called))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@contextmanager
def loop_modules(first: str, last: str) -> Iterator[Counter[str]]:
    """Counts calls of our functions in one thread from a call of `first` to the return of `last`, by module.

    Counts code in files only: generated constructors of records have no line that one could read."""
    begin, end, found = code_of(first), code_of(last), Counter[str]()
    threads: set[int] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if event == "call" and code is begin:
            threads.add(thread)
        name = frame.f_globals.get("__name__", "")
        is_ours = name.startswith("penstock.") and code.co_filename.endswith(".py")
        if event == "call" and thread in threads and is_ours:
            found[name] += 1
        if event == "return" and code is end:
            threads.discard(thread)

    threading.setprofile(note)
    try:
        yield found
    finally:
        threading.setprofile(None)


def put_one(plane: ps.Plane) -> None:
    with plane.group("prompt") as group:
        for i in range(ROLLOUTS):
            turns = [Turn(range(40)), Turn([50 + i] * 20, logprobs=[-0.5] * 20)]
            group.add(Trajectory(turns=turns, reward=float(i)))


def trained(
    hops: list[str], where: Path | str = "memory:", *, also: Callable[[Step], object] = lambda _step: None
) -> dict[str, int]:
    """How often each hop happens for one group that is put, drawn, trained and committed."""

    def train(source: Source) -> None:
        step = source.step()
        assert any(not batch.is_dummy for batch in step)
        also(step)
        source.commit(step, policy_version=1)
        source.flush()

    with counting(hops) as counts:
        with ps.open(where, ranks=RANKS, seq_len=64, groups_per_step=1, timeouts=PATIENT) as plane:
            put_one(plane)
            sources = [plane.source(rank, world=RANKS) for rank in range(RANKS)]
            with ThreadPoolExecutor(RANKS) as pool:
                list(pool.map(train, sources))
            for source in sources:
                source.close()
        return counts()


def test_a_group_takes_the_way_that_the_page_describes(tmp_path: Path) -> None:
    counted = {hop: promised(calls) for hop, calls in hops(DIRECT_PART).items() if calls}
    assert len(counted) > 15
    assert trained(list(counted), tmp_path / "run") == counted


def test_a_group_takes_the_other_way_through_the_plane() -> None:
    counted = {hop: promised(calls) for hop, calls in hops(THROUGH_PART).items() if calls}
    assert len(counted) > 5
    assert trained(list(counted)) == counted


def test_straight_to_storage_no_frame_is_joined_decoded_or_gathered(tmp_path: Path) -> None:
    never = [
        "penstock.client.encoded_group:EncodedGroup.frame",
        "penstock.frames.reading:decode",
        "penstock.frames.reading:describe",
        "penstock.frames.gathering:gather",
        "penstock.frames.gathering:open_frame",
    ]
    assert trained(never, tmp_path / "run") == {}


def test_through_the_plane_a_group_is_encoded_checked_gathered_and_decoded_once() -> None:
    assert trained(
        [
            "penstock.frames.writing:encode_group",
            "penstock.frames.metadata:check_group",
            "penstock.frames.gathering:gather",
            "penstock.frames.reading:decode",
            "penstock.frames.reading:describe",
            "penstock.frames.reading:open_stored",
            "penstock.frames.writing:frame_pieces",
        ]
    ) == {
        "penstock.frames.writing:encode_group": 1,
        "penstock.frames.metadata:check_group": 1,
        "penstock.frames.gathering:gather": RANKS,
        "penstock.frames.reading:decode": RANKS,
        "penstock.frames.reading:describe": 1 + RANKS,
        "penstock.frames.reading:open_stored": 1,
        "penstock.frames.writing:frame_pieces": 1 + RANKS,
    }


def test_one_put_touches_few_modules_on_the_loop(tmp_path: Path) -> None:
    """From the message to its answer. The page says how many modules, and how many calls of their functions; more would
    mean that a step of the path was split, or that every put asks again what cannot have changed."""
    with (
        loop_modules(_ON_PUT, _ANSWER) as found,
        ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=9) as plane,
    ):
        put_one(plane)  # warm: the first group of a segment is read back on a worker thread
        found.clear()
        put_one(plane)
    own = {name for name in found if name.startswith("penstock.plane.")}
    stated = re.search(r"touches at most (\d+) modules, (\d+) of them in `penstock.plane`, with (\d+) calls", PAGE)
    assert stated is not None
    assert 10 < len(found) <= int(stated[1]), sorted(found)
    assert 5 < len(own) <= int(stated[2]), sorted(own)
    assert 50 < found.total() <= int(stated[3]), found.most_common()


def test_one_call_more_is_noticed_in_any_thread() -> None:
    again = encode([ps.Sample(id="a", token_ids=[1, 2])])
    counts = trained(["penstock.frames.reading:decode"], also=lambda _step: decode(again))
    assert counts == {"penstock.frames.reading:decode": 2 * RANKS}


def test_every_function_on_the_page_exists() -> None:
    found = hops()
    assert len(found) > 25
    for hop in found:
        module, _, name = hop.partition(":")
        path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
        body: list[ast.stmt] = ast.parse(path.read_text()).body
        for part in name.split("."):
            named = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
            assert named, f"{hop}: {path.name} has no {part}"
            body = named[0].body

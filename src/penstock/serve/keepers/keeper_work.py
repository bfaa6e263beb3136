"""The work of a keeper that depends on the size of data: checking, keeping, gathering. Runs beside its loop."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from penstock.encode import Limits
from penstock.errors import CorruptFrame, InvalidInput, PenstockError
from penstock.keep.facts import GroupFacts, check_group
from penstock.keep.numbered import NumberedFrames
from penstock.send.keeper_events import CheckFrame, KeepFrame, TakeFrame
from penstock.send.keeper_messages import Enlisted
from penstock.send.message_header import MAX_HEADER
from penstock.send.messages import Buffer
from penstock.serve.decisions.intake import facts_for_evaluation


@dataclass(frozen=True, slots=True)
class Checked:
    """A frame that is good."""

    facts: bytes
    evaluation: bytes = b""


@dataclass(frozen=True, slots=True)
class Given:
    """What a `Take` is answered."""

    frame: Buffer
    missing: dict[int, str]
    """Which of its picks cannot be had, and why."""
    damaged: tuple[int, ...] = ()
    """Numbers whose frames cannot be read."""


class Altered(CorruptFrame):
    """Not the bytes that were sent."""


class KeeperWork:
    """Checks, keeps and gives."""

    def __init__(self, frames: NumberedFrames) -> None:
        self._frames = frames

    def check(self, asked: CheckFrame, terms: Enlisted) -> Checked:
        """The facts of a frame; raises what is wrong with it."""
        if xxhash.xxh3_128_digest(asked.frame) != asked.digest:
            raise Altered(f"group {asked.group!r}: not the bytes that were sent")
        limits = Limits(max_tokens=terms.max_tokens, max_bytes=terms.max_bytes, max_samples=terms.max_samples)
        try:
            checked = self._facts(asked, terms.seq_len, limits)
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - a frame must not end the keeper, whatever it provokes
            words = f"group {asked.group!r}: {type(error).__name__}: {error}; its frame cannot be read"
            raise InvalidInput(words) from None
        if len(checked.facts) > MAX_HEADER // 2:
            raise InvalidInput(f"group {asked.group!r}: facts of {len(checked.facts):,} bytes; put smaller groups")
        return checked

    def _facts(self, asked: CheckFrame, seq_len: int, limits: Limits) -> Checked:
        if asked.is_evaluation:
            facts, shown = facts_for_evaluation(asked.group, asked.frame, limits)
            return Checked(facts.to_bytes(), shown.to_bytes())
        found: GroupFacts = check_group(asked.frame, group=asked.group, seq_len=seq_len, limits=limits)
        return Checked(found.to_bytes())

    def keep(self, batch: Sequence[KeepFrame]) -> list[int | PenstockError]:
        """The number of each, with one sync for all of them; or why it is not kept."""
        found: list[int | PenstockError] = [0] * len(batch)
        good = []
        for i, asked in enumerate(batch):
            if isinstance(asked.work, int) or xxhash.xxh3_128_digest(asked.frame) == asked.digest:
                good.append(i)
            else:
                found[i] = Altered(f"group {asked.group!r}: not the bytes that were sent")
        kept: Sequence[int | PenstockError]
        try:
            kept = self._frames.keep([(batch[i].group, batch[i].digest, batch[i].frame) for i in good])
        except PenstockError as error:
            kept = [error] * len(good)
        for i, result in zip(good, kept, strict=True):
            found[i] = result
        return found

    def give(self, batch: Sequence[TakeFrame]) -> list[Given]:
        """One answer for each; a frame that several want is opened once."""
        answers = [self._at_once(asked) for asked in batch]
        plain = [i for i, answer in enumerate(answers) if answer is None]
        try:
            found = self._frames.take([_wanted(batch[i]) for i in plain])
        except Exception:  # noqa: BLE001 - somebody's pick cannot be had: find out whose, one by one
            found = []
        for k, i in enumerate(plain):
            answers[i] = Given(found[k], {}) if found else self._one_by_one(batch[i])
        return [answer for answer in answers if answer is not None]

    def _at_once(self, asked: TakeFrame) -> Given | None:
        """The answer to what is not a slice, or cannot be one; a client may ask for anything."""
        numbers = [number for number, _, _ in asked.picks]
        if len(set(numbers)) < len(numbers):
            return _nothing(asked, "a frame is picked twice")
        if any(a >= b for _, _, rows in asked.picks for a, b in pairwise((-1, *rows))):
            return _nothing(asked, "rows do not ascend from 0")
        if any(not rows for _, _, rows in asked.picks):
            return self._frame(asked)
        known = [self._frames.get(number) for number in numbers]
        good = all(kept is not None and kept.group == pick[1] for kept, pick in zip(known, asked.picks, strict=True))
        return None if good else self._one_by_one(asked)

    def _one_by_one(self, asked: TakeFrame) -> Given:
        """All that can be had."""
        missing: dict[int, str] = {}
        damaged: list[int] = []
        for i, (number, group, rows) in enumerate(asked.picks):
            known = self._frames.get(number)
            if known is None or known.group != group:
                missing[i] = f"no frame of group {group[:80]!r} is kept under number {number}"
                damaged += [number] if known is None else []  # who names another group says nothing of this one
                continue
            try:
                self._frames.take([[(number, rows)]])
            except CorruptFrame as error:
                missing[i] = str(error)
                damaged.append(number)
            except Exception as error:  # noqa: BLE001 - whatever rows provoke
                missing[i] = f"rows {rows[:8]}: {type(error).__name__}: {error}"
        try:
            (frame,) = self._frames.take([_wanted(asked, missing)])
        except Exception as error:  # noqa: BLE001 - frames that do not go together
            return _nothing(asked, f"{type(error).__name__}: {error}")
        return Given(frame, missing, tuple(damaged))

    def _frame(self, asked: TakeFrame) -> Given:
        """A frame as it was kept."""
        number, group, _ = asked.picks[0]
        known = self._frames.get(number)
        if len(asked.picks) != 1 or known is None or known.group != group:
            return Given(b"", dict.fromkeys(range(len(asked.picks)), f"no frame of group {group[:80]!r} alone"))
        try:
            frame = bytes(self._frames.read(number))
        except CorruptFrame as error:
            return Given(b"", {0: str(error)}, (number,))
        if xxhash.xxh3_128_digest(frame) != known.digest:
            return Given(b"", {0: f"group {group!r}: its frame is damaged or gone: other bytes"}, (number,))
        return Given(frame, {})


def _wanted(asked: TakeFrame, missing: Container[int] = ()) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, rows) for i, (number, _, rows) in enumerate(asked.picks) if i not in missing]


def _nothing(asked: TakeFrame, why: str) -> Given:
    return Given(b"", dict.fromkeys(range(len(asked.picks)), why))

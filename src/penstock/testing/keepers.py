"""What every keeper must do, as a suite to run over yours.

    class TestMine(KeeperSuite):
        def keeper(self, folder): return MyKeeper(folder)
        def damage(self, keeper, location): ...

Needs the `pytest` package.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from penstock.arrays import Sample, Samples
from penstock.encode import decode, encode
from penstock.errors import CorruptFrame
from penstock.keep.keeper import DamagedFrame, Keeper, Pick


def kept_group(name: str, *, samples: int = 3, tokens: int = 40) -> list[Sample]:
    """Samples of one prompt, some of whose tokens and experts are shared."""
    rng = np.random.default_rng(list(name.encode()))
    prompt = rng.integers(0, 200, tokens, np.uint32)
    found = []
    for i in range(samples):
        ids = np.concatenate([prompt, rng.integers(0, 200, 5 + i, np.uint32)])
        experts = np.repeat(ids.astype(np.uint8), 6).reshape(-1, 2, 3)
        found.append(Sample(id=f"{name}/{i}", group=name, token_ids=ids, routed_experts=experts))
    return found


def kept_frame(name: str) -> bytes:
    return encode(kept_group(name))


class KeeperSuite:
    """What every keeper must do."""

    def keeper(self, folder: Path) -> Keeper:
        """One without frames."""
        raise NotImplementedError

    def damage(self, keeper: Keeper, location: str) -> None:
        """Alter bytes of a frame where it is kept, as a failing disk would."""
        raise NotImplementedError

    def test_frames_are_given_back_to_the_byte(self, tmp_path: Path) -> None:
        keeper, frames = self.keeper(tmp_path), [kept_frame(name) for name in "abc"]
        locations = keeper.keep(frames)
        assert len(set(locations)) == 3
        assert [bytes(keeper.read(location)) for location in locations] == frames
        keeper.close()

    def test_any_buffer_can_be_kept_and_may_change_afterwards(self, tmp_path: Path) -> None:
        keeper, frame = self.keeper(tmp_path), bytearray(kept_frame("a"))
        expected = bytes(frame)
        locations = keeper.keep([memoryview(frame), frame])
        frame[:] = bytes(len(frame))
        assert [bytes(keeper.read(location)) for location in locations] == [expected, expected]
        keeper.close()

    def test_a_location_stays_valid_while_others_come_and_go(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        first = keeper.keep([kept_frame("first")])[0]
        view = keeper.read(first)
        for name in "abcdef":
            keeper.forget(keeper.keep([kept_frame(name)]))
            assert bytes(keeper.read(first)) == bytes(view) == kept_frame("first")
        keeper.close()

    def test_what_is_taken_are_the_samples_that_were_picked_in_order(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        a, b = keeper.keep([kept_frame("a"), kept_frame("b")])
        picks = [[Pick(a, "a", (0, 2)), Pick(b, "b", (1,))], [], [Pick(b, "b", (0, 1, 2))]]
        first, none, last = keeper.take(picks)
        in_a, in_b = kept_group("a"), kept_group("b")
        assert decode(first) == Samples.of([in_a[0], in_a[2], in_b[1]])
        assert (len(none), decode(last)) == (0, Samples.of(in_b))
        keeper.close()

    def test_what_is_taken_lies_in_the_memory_that_is_given(self, tmp_path: Path) -> None:
        keeper, memory = self.keeper(tmp_path), memoryview(bytearray(1 << 16))
        location = keeper.keep([kept_frame("a")])[0]
        (taken,) = keeper.take([[Pick(location, "a", (1,))]], lambda _size: memory)
        assert taken.obj is memory.obj
        keeper.close()

    def test_what_was_taken_outlives_what_it_was_taken_from(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        location = keeper.keep([kept_frame("a")])[0]
        (taken,) = keeper.take([[Pick(location, "a", (0, 1, 2))]])
        keeper.forget([location])
        keeper.close()
        assert decode(taken) == Samples.of(kept_group("a"))

    def test_bytes_are_counted_as_they_come_and_go(self, tmp_path: Path) -> None:
        keeper, frames = self.keeper(tmp_path), [kept_frame(name) for name in ("a", "bb", "ccc")]
        assert keeper.num_bytes == 0
        a, b, c = keeper.keep(frames)
        assert keeper.num_bytes == sum(map(len, frames))
        keeper.forget([b])
        assert keeper.num_bytes == len(frames[0]) + len(frames[2])
        keeper.retain([c])
        assert keeper.num_bytes == len(frames[2])
        keeper.forget([a, c])
        assert keeper.num_bytes == 0
        keeper.close()

    def test_what_is_forgotten_cannot_be_taken_and_is_named(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        a, b = keeper.keep([kept_frame("a"), kept_frame("b")])
        keeper.forget([a])
        keeper.sweep()
        with pytest.raises(DamagedFrame, match="group 'a': its frame is damaged or gone"):
            keeper.take([[Pick(a, "a", (0,)), Pick(b, "b", (0,))]])
        assert bytes(keeper.read(b)) == kept_frame("b")
        keeper.close()

    def test_forgetting_twice_takes_nothing_from_others(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        a, b = keeper.keep([kept_frame("a"), kept_frame("b")])
        for _ in range(3):
            keeper.forget([a, a])
        assert keeper.num_bytes == len(kept_frame("b"))
        keeper.retain([b])
        assert bytes(keeper.read(b)) == kept_frame("b")
        keeper.close()

    def test_only_what_is_retained_stays(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        a, b, c = keeper.keep([kept_frame(name) for name in "abc"])
        keeper.retain([a, c])
        assert [bytes(keeper.read(location)) for location in (a, c)] == [kept_frame("a"), kept_frame("c")]
        assert keeper.num_bytes == len(kept_frame("a")) + len(kept_frame("c"))
        assert b not in keeper.keep([kept_frame("d")])
        keeper.close()

    def test_a_location_of_nobody_is_an_error_in_words(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        for location in ("", "nowhere", "../../etc/passwd", "000001-000009:0:64", "999999"):
            with pytest.raises(CorruptFrame, match=r"location|No such file"):
                keeper.read(location)
        keeper.close()

    def test_a_damaged_frame_names_its_group_and_harms_no_other(self, tmp_path: Path) -> None:
        keeper = self.keeper(tmp_path)
        good, bad = keeper.keep([kept_frame("good"), kept_frame("bad")])
        self.damage(keeper, bad)
        with pytest.raises(DamagedFrame, match="group 'bad': its frame is damaged or gone") as found:
            keeper.take([[Pick(good, "good", (0,))], [Pick(bad, "bad", (0,))]])
        assert found.value.group == "bad"
        assert str(copy.copy(found.value)) == str(found.value)
        assert decode(keeper.take([[Pick(good, "good", (0, 1, 2))]])[0]) == Samples.of(kept_group("good"))
        keeper.close()

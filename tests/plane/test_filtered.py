"""When filters drop everything, ranks and `penstock top` say so instead of waiting without a word."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.commands.top import looking, page
from penstock.errors import WaitTimeout
from penstock.plane.engine import MANY_FILTERED
from tests.support.groups import named_group
from tests.support.pace import eventually
from tests.support.planes import FAST


def test_ranks_and_top_name_the_filter_that_drops_every_group(tmp_path: object) -> None:
    with ps.open(
        "memory:", ranks=1, seq_len=64, groups_per_step=8, listen=[f"ipc://{tmp_path}/s"], timeouts=FAST
    ) as plane:

        def waits_for() -> str:
            return str(plane.status()["waiting_for"])

        with plane.source(0, prefetch=0) as source:
            for number in range(MANY_FILTERED - 1):
                plane.discard("zero variance", 4, group=f"g{number}")
            with pytest.raises(WaitTimeout):
                source.step(timeout=0.1)
            eventually(lambda: waits_for().startswith("generation: 0 of 8 groups"))
            assert "filtered" not in waits_for()
            for number in range(120 - MANY_FILTERED + 1):
                plane.discard("zero variance", 4, group=f"h{number}")
            wanted = "generation: 0 of 8 groups; the last 120 groups were filtered: zero variance"
            eventually(lambda: waits_for() == wanted)

            def is_said() -> bool:
                with pytest.raises(WaitTimeout) as error:
                    source.step(timeout=0.2)
                return wanted in str(error.value)

            eventually(is_said)  # the rank hears it with a heartbeat
            with looking(plane.url) as look:
                assert any(wanted in line for line in page(look(), {}))
            plane.put(named_group("good"))
            eventually(lambda: waits_for() == "generation: 1 of 8 groups")

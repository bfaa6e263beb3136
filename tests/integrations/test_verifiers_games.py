"""Episodes of several agents: what was played is what was put, also where an agent never got a turn.

`kuhn-poker` is verifiers' own and not on the package index. Give the folder `environments` of a clone of verifiers to
play it too: PENSTOCK_VERIFIERS_ENVIRONMENTS=verifiers/environments pytest tests/integrations/test_verifiers_games.py
"""

from __future__ import annotations

import importlib
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.demo.endpoint import Endpoint, Engine, save_model
from penstock.integrations.environments.verifiers_rollouts import Environment, Rollouts

pytestmark = [pytest.mark.deep, pytest.mark.filterwarnings("ignore")]
TASKSETS = Path(__file__).parent / "tasksets"
CLONE = os.environ.get("PENSTOCK_VERIFIERS_ENVIRONMENTS", "")
CHAT = {"harness": {"id": "penstock_chat"}}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with Endpoint(Engine(save_model(tmp_path_factory.mktemp("model") / "bytes", kind="bytes"))) as found:
        yield found


def play(endpoint: Endpoint, game: str, seats: tuple[str, str], folder: Path) -> tuple[Any, Any, Any]:
    """Play, and return the rewards as played and as put, by seat and deal, and the ledger."""
    rollouts = Rollouts(
        environment=Environment(name=game, runtime="subprocess", settings=dict.fromkeys(seats, CHAT)),
        endpoint=endpoint.url,
        renderer="qwen3",
        sampling={"temperature": 1.0, "max_tokens": 4},
        group_size=8,
        groups=5,
        in_flight=8,
        traces=folder,
    )
    put: Any = defaultdict(Counter)
    with ps.open("memory:", ranks=1, seq_len=8192, groups_per_step=1, retain="all") as plane:
        tally = rollouts.run(plane)
        with plane.source(rank=0) as source:
            for _ in range(tally.groups):
                step = source.step(timeout=60)
                for batch in step:
                    for i, name in enumerate(batch.segments.ids):
                        first = "." not in name.rsplit("/", 1)[1]  # further branches of a rollout have its reward too
                        at = int(batch.segments.offsets[i])
                        deal, _, seat = batch.segments.prompts[i].partition("/")
                        values = float(batch["rewards"][at]), float(batch["advantages"][at])
                        put[seat, deal].update([values] if first else [])
                source.commit(step)
        return played(folder / "traces.jsonl"), put, (tally, plane.ledger)


def played(path: Path) -> Any:
    found: Any = defaultdict(list)
    for line in path.read_text().splitlines():
        episode = json.loads(line)
        for trace in episode["traces"]:
            reward = sum(one["score"] * one["weight"] for one in trace["rewards"].values())
            found[trace["agent"]["name"], episode["task"]["data"]["name"]].append((reward, bool(trace["nodes"])))
    return found


@pytest.mark.parametrize(
    ("game", "seats"),
    [
        ("forfeits", ("first", "second")),
        pytest.param(
            "kuhn-poker",
            ("player0", "player1"),
            marks=pytest.mark.skipif(
                not CLONE,
                reason="needs a clone of verifiers: PENSTOCK_VERIFIERS_ENVIRONMENTS=CLONE/environments",
            ),
        ),
    ],
)
def test_what_was_played_is_what_was_put(
    game: str, seats: tuple[str, str], endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    if game == "kuhn-poker":
        monkeypatch.syspath_prepend(Path(CLONE) / "kuhn_poker")
        # A model without training never makes a legal move of poker: let a coin decide which ones are.
        coin = random.Random(0)
        referee = importlib.import_module("kuhn_poker.taskset")
        monkeypatch.setattr(referee, "parse_action", lambda _, legal: coin.choice([None, None, None, *legal]))
    games, put, (tally, ledger) = play(endpoint, game, seats, tmp_path)
    silent = sum(not spoke for rows in games.values() for _, spoke in rows)
    assert silent > 4 and tally.failed == 0 and tally.silent == silent
    assert ledger.discarded["agent without a message"] == silent
    # The first seat moves in every game: each of its payoffs is there, whatever became of the second one.
    assert sum(len(games[key]) for key in games if key[0] == seats[0]) == 40
    for key, rows in games.items():
        spoken = [reward for reward, spoke in rows if spoke]
        mean = sum(spoken) / max(len(spoken), 1)
        assert sorted(reward for reward, _ in put[key].elements()) == sorted(spoken), key
        assert all(advantage == pytest.approx(reward - mean, abs=1e-6) for reward, advantage in put[key]), key
    if game == "kuhn-poker":
        means = [sum(reward for key in games if key[0] == seats[0] for reward, _ in games[key]) / 40]
        means.append(sum(reward for key in put if key[0] == seats[0] for reward, _ in put[key].elements()) / 40)
        assert means[0] == means[1]
        print("player 0, mean payoff as played and as put:", means, "games without a word of player 1:", silent)

"""Read verifiers' `traces.jsonl`: one episode per line, also as `penstock rollouts verifiers --traces` writes them.

Samples have the names and groups under which Penstock put them. Those of other programs are grouped by the episode's
group, or else by its task. Traces of agents that are not trained, without a message, or dropped by the environment are
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.arrays import Sample
from penstock.capture import field_of, from_verifiers, is_silent, located, optional_list
from penstock.convert import to_samples
from penstock.integrations.formats.file_or_stream import Lost, Place, json_lines

SAMPLE = "penstock_sample"
"""Key in a trace's `info`: the prefix of its samples' ids."""


def read_traces(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of all traces that are trained, in the order of the file."""
    for where, episode in json_lines(place):
        with located(where):
            for trace in [episode] if "nodes" in episode else optional_list(episode, "traces", "episode"):
                yield from _samples(episode, trace, lost)


def _samples(episode: dict[str, Any], trace: Any, lost: Lost) -> list[Sample]:
    agent = field_of(trace, "agent")
    reasons = {
        "trace of an agent that is not trained": not field_of(agent, "trainable", True),
        "trace dropped by the environment": field_of(trace, "dropped") is not None,
        "trace without a message": is_silent(trace),
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is not None:
        lost.unread[reason] += 1
        return []
    (rollout,) = from_verifiers({**episode, "traces": [trace]} if trace is not episode else trace)
    put = field_of(field_of(trace, "info"), SAMPLE)
    task = field_of(episode, "task")
    names = [field_of(field_of(task, "data"), key) for key in ("name", "id", "idx")]
    prompt = str(next((name for name in (*names, field_of(task, "key")) if name is not None), ""))
    group = str(put).rpartition("/")[0] if put else str(rollout.info.get("group") or prompt)
    group = group if put or not rollout.agent else f"{group}/{rollout.agent}"
    return to_samples(rollout, group=group, prompt=prompt, id=str(put or rollout.id))

"""NeMo-Gym: a sink for captured tokens, the store that resolves lineage, and rollouts as groups on a plane.

Model servers write each call while the rollout goes on (`PenstockSink`) and look up what a request continues
(`PenstockLineage`); whoever knows the rewards puts finished rollouts (`put_group`). All are given one folder of the
host. What continues what is Gym's to say: its matcher resolves parents, its builder verifies them by digest and sets
retries aside. A rollout that Gym would mask gets an error: it is kept and trains nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from penstock.capture import Trajectory, Turn
from penstock.client import Plane
from penstock.convert import Group
from penstock.errors import InvalidInput
from penstock.integrations.environments.call_store import CallStore, Snapshot

GROUP_LOST = "nemo-gym: nothing captured"
"""Under which rollouts without a captured call are counted at the plane."""


class PenstockSink:
    """Gym's `TokenSink`: `token_id_capture.sink: penstock.integrations.environments.nemo_gym_sink:PenstockSink`."""

    def __init__(self, folder: str) -> None:
        self._store = CallStore(folder)

    async def put(self, entry: Any) -> None:
        """Keep one call; durable, and visible to every process of the host, when this returns."""
        bad = next((p for p in entry.generation_log_probs if not math.isfinite(p)), None)
        if bad is not None:
            raise InvalidInput(f"call {entry.model_call_id!r}.generation_log_probs: {bad}; must be finite")
        # Equal entries are equal bytes, whatever the order of their fields.
        text = msgspec.json.encode(entry.model_dump(mode="json"), order="sorted")
        await asyncio.to_thread(self._store.put, entry.rollout_id, entry.model_call_id, text)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """A call is about to be made; if it never arrives, the rollout is incomplete."""
        await asyncio.to_thread(self._store.begin, rollout_id, model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await asyncio.to_thread(self._store.mark_incomplete, rollout_id, f"call {model_call_id!r} was not captured")

    async def close(self) -> None:
        self._store.close()


class PenstockSource:
    """Gym's `TokenSource`: frozen rollouts, as Gym's own records."""

    def __init__(self, folder: str) -> None:
        self._store = CallStore(folder)

    async def freeze(self, rollout_id: str) -> Any:
        return _for_gym(await asyncio.to_thread(self._store.freeze, rollout_id))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return bool(await asyncio.to_thread(self._store.drop, [(rollout_id, snapshot_id, version)]))

    async def close(self) -> None:
        self._store.close()


class PenstockLineage:
    """Gym's `LineageResolver` over the calls of a folder; the matching is Gym's."""

    def __init__(self, folder: str) -> None:
        self._store = CallStore(folder)
        self._gym = _lineage(self._store)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """Which call a request continues: a root, resolved, or unresolved; never a guess."""
        return await self._gym.resolve(rollout_id, request_items)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None:
        await self._gym.close()
        self._store.close()


def _lineage(store: CallStore) -> Any:
    from nemo_gym.token_id_capture.lineage import IncrementalLineageStore

    class Lineage(IncrementalLineageStore):  # type: ignore[misc, unused-ignore]
        """What Gym's resolver asks of a backend: calls since the last look, and one by its number."""

        def _fetch_new_entries(self, rollout_id: str, cursor: int | None) -> tuple[list[tuple[Any, int]], int]:
            found = store.after(rollout_id, cursor or 0)
            return [(_entry(text), number) for number, text in found], found[-1][0] if found else cursor or 0

        def _load_entry(self, rollout_id: str, ref: int) -> Any:
            return _entry(store.one(rollout_id, ref))

    return Lineage()


def _entry(text: bytes) -> Any:
    from nemo_gym.token_id_capture.records import TokenEntry

    return TokenEntry.model_validate(msgspec.json.decode(text))


def _for_gym(snapshot: Snapshot) -> Any:
    from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot

    return TokenCaptureSnapshot(
        rollout_id=snapshot.rollout,
        entries=tuple(_entry(text) for text in snapshot.entries),
        incomplete=snapshot.incomplete is not None,
        snapshot_id=snapshot.id,
        version=snapshot.version,
    )


# ------------------------------------------------------------------ trajectories


def put_group(
    plane: Plane,
    folder: str,
    rewards: Mapping[str, float | None],
    *,
    prompt: str,
    id: str | None = None,  # noqa: A002 - the field's own name
    responses: Mapping[str, Mapping[str, Any]] | None = None,
    policy_version: int | None = None,
    all_chains: bool = False,
) -> Group:
    """Put finished rollouts of one prompt as a group; what is durable at the plane is given back in the folder.

    `rewards` has the rollouts' ids. `responses` are the responses that were scored, by rollout: they say which chain of
    calls earned the reward. Rollouts with an error stay in the folder, to be looked at. The same rollouts make the same
    group: after a crash call this again; `Conflict` says that they were put.
    """
    name = id or f"{prompt[:200]}#{xxhash.xxh3_64_hexdigest(chr(0).join(sorted(rewards)).encode())}"
    store = CallStore(folder)
    try:
        snapshots = {rollout: store.freeze(rollout) for rollout in rewards}
        lost = [rollout for rollout, snapshot in snapshots.items() if not snapshot.entries]
        if lost:
            plane.discard(GROUP_LOST, len(lost), key=f"{name}: {GROUP_LOST}")
        builder = plane.group(prompt, id=name, policy_version=policy_version)
        trajectories = {}
        for rollout in (rollout for rollout in rewards if rollout not in lost):
            response = (responses or {}).get(rollout)
            trajectory = trajectory_of(
                _for_gym(snapshots[rollout]),
                reward=rewards[rollout],
                response=response,
                incomplete=snapshots[rollout].incomplete,
                all_chains=all_chains,
            )
            trajectories[rollout] = trajectory
            builder.add(trajectory)
        group = builder.put()
        done = [snapshots[rollout] for rollout, trajectory in trajectories.items() if trajectory.error is None]
        store.drop((snapshot.rollout, snapshot.id, snapshot.version) for snapshot in done)
        return group
    finally:
        store.close()


def trajectory_of(
    snapshot: Any,
    *,
    reward: float | None,
    response: Mapping[str, Any] | None = None,
    incomplete: str | None = None,
    all_chains: bool = False,
    **fields: Any,
) -> Trajectory:
    """A frozen rollout as a trajectory. `fields` are `Trajectory`'s.

    Trained is the chain of calls that ends with `response`, or the only one. With `all_chains` it is every chain that
    Gym could verify: sub-agents, and what came before and after a compaction.
    """
    from nemo_gym.token_id_capture.builder import prefix_merging
    from nemo_gym.token_id_capture.terminal import resolve_terminal

    entries = list(snapshot.entries)
    terminal = resolve_terminal(entries, None if response is None else dict(response)).model_call_id
    built = prefix_merging(entries, terminal)
    delivered = built.notes.terminal_chain == "delivered"
    error = incomplete or ("a call was lost" if snapshot.incomplete else None)
    error = error or _why_not(built.notes, response, terminal, delivered, all_chains)
    chains = built.chains[:1] if delivered and not all_chains else built.chains
    turns, parents = _tree(chains)
    if not turns:
        turns, parents = [Turn(_some_prompt(entries, snapshot.rollout_id))], [-1]
        error = error or "no call sampled anything"
    routed = sum(entry.routed_experts is not None for entry in entries)
    said = None if error is None else f"nemo-gym: {error}"
    fields = {"id": snapshot.rollout_id, "routing_gaps": routed, "error": said} | fields
    return Trajectory(turns=turns, parents=parents, reward=reward, **fields)


def _why_not(notes: Any, response: object, terminal: str | None, delivered: bool, all_chains: bool) -> str | None:
    """Why Gym would mask the rollout; None if it would not."""
    if delivered:
        return None
    if terminal is not None:
        return f"the chain that ends with call {terminal!r} is {notes.terminal_chain or 'missing'}"
    if notes.unresolved_parent_calls:
        return f"call {notes.unresolved_parent_calls[0]!r} continues a call that could not be verified"
    if notes.unresolved_retries:
        return f"call {notes.unresolved_retries[0]!r} was made twice; which was kept is not known"
    if notes.chains != 1 and not all_chains:
        known = "the response belongs to none of them" if response is not None else "give the response that was scored"
        return f"{notes.chains} chains of calls; {known}, or all_chains=True"
    return None


def _tree(chains: list[Any]) -> tuple[list[Turn], list[int]]:
    """Each call once: what its prompt added to its parent, then what it sampled."""
    turns: list[Turn] = []
    parents: list[int] = []
    ends: dict[str, int] = {}
    """Call -> the turn it sampled."""
    for chain in chains:
        at = -1
        for step, link in enumerate(chain.links):
            call = link.entry
            if call.model_call_id not in ends:
                added = link.interstitial if step else chain.root_prompt
                if added:
                    turns.append(Turn(added, where=f"call {call.model_call_id!r} prompt"))
                    parents.append(at)
                    at = len(turns) - 1
                where = f"call {call.model_call_id!r}"
                turns.append(
                    Turn(call.generation_token_ids, logprobs=call.generation_log_probs, role="assistant", where=where)
                )
                parents.append(at)
                ends[call.model_call_id] = len(turns) - 1
            at = ends[call.model_call_id]
    return turns, parents


def _some_prompt(entries: list[Any], rollout: str) -> list[int]:
    found = next((entry.prompt_token_ids for entry in entries if entry.prompt_token_ids), None)
    if found is None:
        raise InvalidInput(f"rollout {rollout!r}: {len(entries)} calls without a token; there is nothing to put")
    tokens: list[int] = found
    return tokens

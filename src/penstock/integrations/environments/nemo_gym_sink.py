"""NeMo-Gym: a sink for captured tokens, a lineage resolver, and finished rollouts as groups on a plane.

Model servers store each call during the rollout (`PenstockSink`) and look up which call a request continues
(`PenstockLineage`). The process that knows the rewards puts finished rollouts (`put_group`). All of them use one folder
of the host. Gym decides which call continues which: its matcher resolves parents, its builder verifies them by digest
and sets retries aside. A rollout that Gym would mask gets an error: it is stored and trains nothing.
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
"""The reason under which the plane counts rollouts without a captured call."""


class PenstockSink:
    """Gym's `TokenSink`: `token_id_capture.sink: penstock.integrations.environments.nemo_gym_sink:PenstockSink`."""

    def __init__(self, folder: str) -> None:
        self._store = CallStore(folder)

    async def put(self, entry: Any) -> None:
        """Store one call. It is durable and visible to every process of the host when this returns."""
        bad = next((p for p in entry.generation_log_probs if not math.isfinite(p)), None)
        if bad is not None:
            raise InvalidInput(f"call {entry.model_call_id!r}.generation_log_probs: {bad}; must be finite")
        # Sorted, so that equal entries are equal bytes whatever the order of their fields.
        text = msgspec.json.encode(entry.model_dump(mode="json"), order="sorted")
        await asyncio.to_thread(self._store.put, entry.rollout_id, entry.model_call_id, text)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record that a call is about to be made. If it never arrives, the rollout is incomplete."""
        await asyncio.to_thread(self._store.begin, rollout_id, model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await asyncio.to_thread(self._store.mark_incomplete, rollout_id, f"call {model_call_id!r} was not captured")

    async def close(self) -> None:
        self._store.close()


class PenstockSource:
    """Gym's `TokenSource`: returns frozen rollouts as Gym's own records."""

    def __init__(self, folder: str) -> None:
        self._store = CallStore(folder)

    async def freeze(self, rollout_id: str) -> Any:
        return _for_gym(await asyncio.to_thread(self._store.freeze, rollout_id))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return bool(await asyncio.to_thread(self._store.drop, [(rollout_id, snapshot_id, version)]))

    async def close(self) -> None:
        self._store.close()


class PenstockLineage:
    """Gym's `LineageResolver` for the calls in a folder. Gym's code does the matching."""

    def __init__(self, folder: str) -> None:
        self._store = CallStore(folder)
        self._gym = _lineage(self._store)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """Return which call a request continues: root, resolved or unresolved. Never guesses."""
        return await self._gym.resolve(rollout_id, request_items)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None:
        await self._gym.close()
        self._store.close()


def _lineage(store: CallStore) -> Any:
    from nemo_gym.token_id_capture.lineage import IncrementalLineageStore

    class Lineage(IncrementalLineageStore):  # type: ignore[misc, unused-ignore]
        """The backend of Gym's resolver: calls since the last query, and one call by number."""

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
    """Put finished rollouts of one prompt as a group, then delete their calls from the folder.

    The keys of `rewards` are the rollouts' ids. `responses` are the scored responses by rollout: they tell which chain
    of calls earned the reward. Rollouts with an error stay in the folder for inspection. The group's id is made from
    the rollouts, so after a crash call this again; `Conflict` means that they were put before.
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
        # Only now: the group is durable at the plane. A crash before this line puts the same group again.
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
    """Convert a frozen rollout into a trajectory. `fields` are fields of `Trajectory`.

    Trains the chain of calls that ends with `response`, or the only chain. With `all_chains`, trains every chain that
    Gym could verify: sub-agents, and the calls before and after a compaction.
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
    message = None if error is None else f"nemo-gym: {error}"
    fields = {"id": snapshot.rollout_id, "routing_gaps": routed, "error": message} | fields
    return Trajectory(turns=turns, parents=parents, reward=reward, **fields)


def _why_not(notes: Any, response: object, terminal: str | None, delivered: bool, all_chains: bool) -> str | None:
    """Return why Gym would mask the rollout, or None."""
    if delivered:
        return None
    if terminal is not None:
        return f"the chain that ends with call {terminal!r} is {notes.terminal_chain or 'missing'}"
    if notes.unresolved_parent_calls:
        return f"call {notes.unresolved_parent_calls[0]!r} continues a call that could not be verified"
    if notes.unresolved_retries:
        return f"call {notes.unresolved_retries[0]!r} was made twice; which one was used is not known"
    if notes.chains != 1 and not all_chains:
        known = "the response belongs to none of them" if response is not None else "give the response that was scored"
        return f"{notes.chains} chains of calls; {known}, or all_chains=True"
    return None


def _tree(chains: list[Any]) -> tuple[list[Turn], list[int]]:
    """Build the turns of each call once: the tokens its prompt adds to its parent, then the sampled ones.

    Two chains a-b and a-c share call a: its turns are added with the first chain, and c's turns follow a's last one.
    """
    turns: list[Turn] = []
    parents: list[int] = []
    ends: dict[str, int] = {}
    """Call -> index of the turn it sampled."""
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
        raise InvalidInput(f"rollout {rollout!r}: {len(entries)} calls without tokens; there is nothing to put")
    tokens: list[int] = found
    return tokens

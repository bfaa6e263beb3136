"""A group: the samples of one prompt's rollouts, with their rewards.

The unit of replay: accepted, held, sampled and dropped as one, so that a baseline always belongs to the rollouts it was
computed from. All per-rollout data is filtered together. The numbers of dropped rollouts stay in `rollouts`, their
tokens do not.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import NO_COLUMNS, TOKEN_COLUMNS, Own, Sample, Values, check_text
from penstock.capture import Trajectory
from penstock.convert.advantages import Advantage, advantage_of, grpo
from penstock.convert.branches import to_samples
from penstock.convert.branching import branch_causes
from penstock.convert.filters import Filter, apply_filters, split_filters
from penstock.convert.rollouts import Rollouts
from penstock.errors import Conflict, InvalidInput, UnknownKey
from penstock.notebook import html_table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The samples of one prompt. Built by `make_group`; empty if filters dropped every rollout."""

    id: str
    """Unique: the plane identifies the group by it."""
    samples: Sequence[Sample]
    """In rollout order; a tuple once built."""
    origins: NDArray[np.int64]
    """[samples] index of the rollout each sample came from."""
    rollouts: Rollouts
    """Rewards and counts of all rollouts, including dropped ones."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """How many rollouts each filter dropped."""
    branches: Mapping[str, int] = field(default_factory=dict)
    """How often its rollouts branched, by cause: see `penstock.convert.branching`."""
    unrouted: int = 0
    """Samples without routed experts although the server reported some: rows were missing."""
    late_advantage: str = ""
    """The advantage that the plane computes when late rewards arrive; empty if no reward is missing."""
    late_filters: tuple[str, ...] = ()
    """Filters that it applies then."""

    def __post_init__(self) -> None:
        check_text({"id": self.id, "mode": "rl"}, "group")
        object.__setattr__(self, "samples", tuple(self.samples))
        ids = [sample.id for sample in self.samples]
        if len(set(ids)) != len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise Conflict(f"group {self.id!r}: two samples are named {twice!r}; ids must be unique")
        if len(self.origins) != len(ids) or (len(ids) and not 0 <= self.origins.max() < len(self.rollouts)):
            raise InvalidInput(
                f"group {self.id!r}.origins: {len(self.origins)} for {len(ids)} samples of {len(self.rollouts)} "
                "rollouts; must name the rollout of each sample"
            )

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled any of its tokens, from which staleness counts. None = not known."""
        versions = [sample.policy_version for sample in self.samples]
        known = [version for version in versions if version is not None]
        return min(known) if known and len(known) == len(versions) else None

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples: what is sent, and what a token budget counts."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def loss_tokens(self) -> int:
        return sum(sample.loss_tokens for sample in self.samples)

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[rollouts] NaN = not scored."""
        return self.rollouts.rewards

    def with_advantages(self, advantage: Advantage) -> Group:
        """Return the group with advantages recomputed from its rewards: for replay under another rule."""
        values = advantage(self.rollouts)
        samples = [s.replace(advantages=float(values[i])) for s, i in zip(self.samples, self.origins, strict=True)]
        return replace(self, samples=samples)

    def attach(self, name: str, values: Mapping[str, Values]) -> Group:
        """Return the group with one more column on its samples, by sample id."""
        return replace(self, samples=attach(self.samples, name, values))

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        counts = f"{len(self.rollouts)} rollouts, {len(self)} samples, {self.num_tokens} tokens"
        return f"Group({self.id!r}, {counts}, dropped={dict(self.dropped)})"

    def _repr_html_(self) -> str:
        rows = [(s.id, s.num_tokens, s.loss_tokens, s.env, s.policy_version) for s in self.samples]
        return html_table(self, rows, ("sample", "tokens", "trained", "env", "policy version"))


def unique_id(prompt: str) -> str:
    """Return an id for one more group of a prompt: its name, shortened if necessary, and 64 random bits.

    >>> unique_id("17").startswith("17#")
    True
    """
    return f"{prompt[:200]}#{secrets.token_hex(8)}"


def make_group(
    trajectories: Iterable[Trajectory],
    *,
    id: str,  # noqa: A002 - the field's own name
    prompt: str = "",
    policy_version: int | None = None,
    advantage: Advantage | str | None = grpo,
    filters: Iterable[Filter | str] = (),
    columns: Own = NO_COLUMNS,
) -> Group:
    """Build the group of one prompt's rollouts.

    `id` is the group's own and unique; `prompt` is the prompt's name, which occurs again whenever the prompt is
    sampled. Samples are named `{id}/{rollout}`, further branches of a rollout `{id}/{rollout}.{branch}`: the same
    rollouts give the same names. `advantage=None` leaves advantages as the turns have them (usually none), as for sft
    and opd; with any other, turns that have advantages are rejected. Advantages and filters may be given by name
    (`ADVANTAGES`, `FILTERS`). If rewards are missing, an advantage given by name is left to the plane, which computes
    it when they are attached, and so are the filters that have a name. `policy_version` applies to every rollout that
    has none of its own. `columns` declares the turns' columns that Penstock does not know.

    >>> from penstock.capture import Turn
    >>> def rollout(reward):
    ...     return Trajectory(turns=[Turn([1, 2]), Turn([3, 4], logprobs=[-0.5, -0.25])], reward=reward)
    >>> group = make_group([rollout(1.0), rollout(0.0)], id="17#a", prompt="17", policy_version=3)
    >>> [(s.id, float(s["advantages"])) for s in group.samples]
    [('17#a/0', 0.5), ('17#a/1', -0.5)]
    """
    rows = list(trajectories)
    if not rows:
        raise InvalidInput(f"group {id!r}: no rollouts; a group has at least one")
    rollouts = Rollouts.of(rows)
    is_late = isinstance(advantage, str) and bool((~rollouts.scored & ~rollouts.errored).any())
    function = advantage_of(advantage, f"group {id!r:.80}")
    if function is not None:
        _check_no_advantages(rows, id)
    now, late = split_filters(filters, is_late=is_late)
    # Advantages first, filters second: a baseline covers all rollouts, including those that are not trained.
    values = None if function is None or is_late else _advantages(function, rollouts, rows, id)
    kept, reasons = apply_filters(rollouts, now)
    samples: list[Sample] = []
    origins: list[int] = []
    unrouted = 0
    for i in np.flatnonzero(kept).tolist():
        own = to_samples(
            rows[i],
            group=id,
            prompt=prompt,
            id=f"{id}/{i}",
            policy_version=policy_version if rows[i].policy_version is None else None,
            advantage=None if values is None else float(values[i]),
            columns=columns,
        )
        samples += own
        origins += [i] * len(own)
        if rows[i].routing_gaps or any("routed_experts" in turn.columns for turn in rows[i].turns):
            unrouted += sum("routed_experts" not in sample for sample in own)
    return Group(
        id=id,
        samples=samples,
        origins=np.array(origins, np.int64),
        rollouts=replace(rollouts, trajectories=()),
        dropped=dict(reasons),
        branches=dict(sum((branch_causes(row) for row in rows), Counter())),
        unrouted=unrouted,
        late_advantage=advantage if is_late and isinstance(advantage, str) else "",
        late_filters=late,
    )


def _check_no_advantages(rows: Sequence[Trajectory], name: str) -> None:
    """Raise InvalidInput if a rollout has advantages, which those of the group would replace."""
    for i, row in enumerate(rows):
        if any("advantages" in turn.columns for turn in row.turns):
            raise InvalidInput(
                f"group {name!r} rollout {i} ({row.where}): its turns have advantages, and those computed from rewards "
                "would replace them; give advantage=None to train with the turns' own, or leave them out of the turns"
            )


def _advantages(advantage: Advantage, rollouts: Rollouts, rows: Sequence[Trajectory], name: str) -> NDArray[np.float64]:
    unscored = np.flatnonzero(~rollouts.scored & ~rollouts.errored)
    if len(unscored):
        i = int(unscored[0])
        raise InvalidInput(
            f"group {name!r} rollout {i} ({rows[i].where}).reward: none, and no error either; give a reward, an error, "
            "or advantage=None; if the reward is attached later, give the advantage by name, such as 'grpo'"
        )
    found = advantage(rollouts)
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that numpy cannot read
        raise InvalidInput(f"group {name!r}: advantages: {found!r:.60} ({error}); return one number each") from None
    if values.shape != (len(rollouts),):
        raise InvalidInput(f"group {name!r}: advantages of shape {values.shape} for {len(rollouts)} rollouts")
    return values


def attach(samples: Iterable[Sample], name: str, values: Mapping[str, Values]) -> list[Sample]:
    """Return the samples with one more column (teacher logprobs, advantages, weights, ...), matched by id.

    Every sample must have a value and every value a sample. Lengths are checked as for any column.

    >>> sample = Sample(id="17/0", token_ids=[1, 2, 3], loss_mask=[0, 1, 1])
    >>> [scored] = attach([sample], "teacher_logprobs", {"17/0": [0.0, -0.5, -0.25]})
    >>> scored["teacher_logprobs"].tolist(), "teacher_logprobs" in sample
    ([0.0, -0.5, -0.25], False)
    """
    rows = list(samples)
    known = {sample.id for sample in rows}
    if name not in TOKEN_COLUMNS or name == "token_ids":
        raise UnknownKey(f"attach: unknown column {name!r}; known are {', '.join(TOKEN_COLUMNS)}")
    if len(known) != len(rows):
        twice = Counter(sample.id for sample in rows).most_common(1)[0][0]
        raise Conflict(f"attach {name}: two samples are named {twice!r}; ids must be unique to attach by them")
    unknown = [key for key in values if key not in known]
    if unknown:
        raise UnknownKey(f"attach {name}: {len(unknown)} ids of no sample, first {unknown[0]!r}; nothing was attached")
    missing = [sample.id for sample in rows if sample.id not in values]
    if missing:
        raise InvalidInput(
            f"attach {name}: no value for {len(missing)} of {len(rows)} samples, first {missing[0]!r}; none attached"
        )
    return [sample.replace(**{name: values[sample.id]}) for sample in rows]

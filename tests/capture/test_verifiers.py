"""The reader against the real package: its objects, its dumps, its wire, and episodes recorded with real engines."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import verifiers.v1 as vf
from verifiers.v1.errors import HarnessError
from verifiers.v1.graph import prepare_turn
from verifiers.v1.serve.encoding import msgpack_encoder
from verifiers.v1.types import AssistantMessage, Response, SamplingMask, TurnTokens, UserMessage

import penstock as ps
from penstock.arrays import ImageSpan, Sample
from penstock.capture import SAMPLER_TOPK, Trajectory, failure_of, from_verifiers
from penstock.convert import to_samples
from penstock.errors import InvalidInput

pytestmark = pytest.mark.deep

DATA = Path(__file__).parents[1] / "data" / "verifiers"
RECORDED = sorted(path.stem for path in DATA.glob("*.json"))


def record(name: str = "two_turns") -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def empty_trace() -> Any:
    trace = vf.WireTrace.model_validate(record()["traces"][0])
    trace.nodes.clear()
    trace.calls.clear()
    return trace


def user(text: str) -> Any:
    return UserMessage(content=text)


def reply(
    trace: Any, prompt: list[Any], spans: list[tuple[int, int]], ids: list[int], said: list[int], **more: Any
) -> Any:
    """One model call as verifiers commits it: the whole prompt with its message spans, and the completion."""
    message = AssistantMessage(content=f"said {said}")
    logprobs = [-0.1234567 * (i + 1) for i in range(len(said))]
    tokens = TurnTokens(
        prompt_ids=ids, completion_ids=said, completion_logprobs=logprobs, message_spans=list(spans), **more
    )
    turn = prepare_turn(trace, prompt)
    turn.commit(Response(id="r", created=0, model="m", message=message, finish_reason="stop", tokens=tokens))
    return message


def branching_trace() -> Any:
    """Three calls: a question, its follow-up, and another follow-up to the same answer."""
    trace = empty_trace()
    first = [user("q")]
    a1 = reply(trace, first, [(0, 3)], [1, 2, 3, 10], [20, 21])
    second = [*first, a1, user("more")]
    reply(trace, second, [(0, 3), None, (6, 8)], [1, 2, 3, 10, 20, 21, 4, 5, 10], [22])  # type: ignore[list-item]
    third = [*first, a1, user("other")]
    reply(trace, third, [(0, 3), None, (6, 7)], [1, 2, 3, 10, 20, 21, 6, 10], [23, 24])  # type: ignore[list-item]
    return trace


def narrow(values: list[float]) -> list[float]:
    """As float32, which is what is kept."""
    narrowed: list[float] = np.asarray(values, np.float32).tolist()
    return narrowed


def listed(values: Any) -> Any:
    """A stream as a list: verifiers 0.4.0 has lists, 0.4.1 numpy arrays."""
    return np.asarray(values).tolist()


def views(trace: Any) -> list[tuple[list[int], list[bool], list[float]]]:
    """What verifiers itself says its branches are."""
    return sorted((listed(b.token_ids), listed(b.sampled_mask), narrow(b.logprobs)) for b in trace.branches)


@pytest.mark.parametrize("form", ["objects", "dump", "wire"])
def test_sampling_masks_are_those_of_the_packages_own_branches(form: str) -> None:
    trace = empty_trace()
    mask = SamplingMask.from_sampling_mask([[20, 30], [7, 21, 22]])
    said = reply(trace, [user("q")], [(0, 3)], [1, 2, 3, 10], [20, 21], sampling_mask=mask)
    reply(trace, [user("q"), said, user("more")], [(0, 3), None, (6, 8)], [1, 2, 3, 10, 20, 21, 4, 5, 10], [22])  # type: ignore[list-item]
    record_of = {
        "objects": lambda: trace,
        "dump": lambda: trace.model_dump(),
        "wire": lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(trace.model_dump(), enc_hook=msgpack_encoder)),
    }
    (rollout,) = from_verifiers(record_of[form]())
    (sample,) = to_samples(rollout)
    (branch,) = trace.branches
    assert sample["sampling_mask"].tolist() == [[], [], [], [], [20, 30], [7, 21, 22], [], [], [], []]
    assert sample["sampling_mask"].lengths.tolist() == branch.sampling_mask.counts.tolist()
    assert sample["sampling_mask"].values.tolist() == branch.sampling_mask.ids.tolist()


def test_samples_are_the_packages_own_branches() -> None:
    trace = branching_trace()
    [rollout] = from_verifiers(trace)
    samples = to_samples(rollout)
    expected = views(trace)
    assert sorted(s.token_ids.tolist() for s in samples) == [tokens for tokens, _, _ in expected]
    for sample in samples:
        _, mask, logprobs = next(view for view in expected if view[0] == sample.token_ids.tolist())
        assert not (sample.loss_mask & ~np.array(mask)).any()
        trained = np.flatnonzero(sample.loss_mask)
        assert sample["logprobs"][trained].tolist() == [logprobs[i] for i in trained]
    # Nodes 1 (two tokens), 3 and 5 were sampled: each token is trained once, although node 1 is on two branches.
    assert sum(s.loss_tokens for s in samples) == sum(sum(node.mask) for node in trace.nodes) == 5
    assert rollout.num_turns == trace.num_turns == 3


@pytest.mark.parametrize("name", RECORDED)
def test_every_form_of_a_recorded_episode_reads_the_same(name: str) -> None:
    episode = vf.WireEpisode.model_validate(record(name))
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(episode.model_dump(mode="python"), enc_hook=msgpack_encoder))
    forms = [episode, record(name), episode.model_dump(), episode.to_record(float_decimals=None), wire]
    read = [[to_samples(t) for t in from_verifiers(form)] for form in forms]
    assert all(samples == read[0] for samples in read[1:])
    [[sample]] = read[0]
    branch = episode.traces[0].branches[0]
    assert sample.token_ids.tolist() == listed(branch.token_ids)
    assert sample.loss_mask.tolist() == listed(branch.sampled_mask)
    assert sample["logprobs"].tolist() == narrow(branch.logprobs)


STREAMS = {"token_ids": "int32", "mask": "bool", "is_content": "bool", "logprobs": "float32"}


def with_streams(episode: Any, form: str) -> Any:
    """An episode's record with its streams as verifiers 0.4.1 holds them in memory, or sends them to a client."""
    for trace in episode["traces"]:
        for node in trace["nodes"]:
            for name, dtype in STREAMS.items():
                values = np.asarray(node.get(name, []), dtype)
                packed = {"__nd__": True, "dtype": dtype, "shape": list(values.shape), "data": values.tobytes()}
                node[name] = values if form == "arrays" else packed
    return episode


@pytest.mark.parametrize("form", ["arrays", "packed"])
@pytest.mark.parametrize("name", RECORDED)
def test_streams_may_be_arrays_or_arrays_on_the_wire(name: str, form: str) -> None:
    [[expected]] = [to_samples(t) for t in from_verifiers(record(name))]
    [[found]] = [to_samples(t) for t in from_verifiers(with_streams(record(name), form))]
    assert found == expected


def test_annotations_may_be_arrays_on_the_wire() -> None:
    episode = with_streams(record(), "packed")
    for node in episode["traces"][0]["nodes"]:
        count = int(np.frombuffer(node["mask"]["data"], np.bool_).sum())
        packed = {"__nd__": True, "dtype": "float32", "shape": [count], "data": np.full(count, 0.5, "<f4").tobytes()}
        node["advantages"], size = packed, node["token_ids"]["shape"]
        node["loss_weights"] = {"ce": {**packed, "shape": size, "data": np.ones(size, "<f4").tobytes()}}
    [sample] = to_samples(from_verifiers(episode)[0])
    [plain] = to_samples(from_verifiers(record())[0])
    assert np.array_equal(sample["advantages"] != 0, plain.loss_mask)
    assert sample["ce_weights"].all()


def test_a_trace_that_the_environment_dropped_is_left_out() -> None:
    episode = record()
    episode["traces"].append(
        {**copy.deepcopy(episode["traces"][0]), "id": "unscored", "dropped": "the judge abstained"}
    )
    assert [rollout.id for rollout in from_verifiers(episode)] == ["trace-two_turns"]


def test_an_agent_that_never_spoke_is_left_out_alone() -> None:
    episode = record()
    episode["traces"].insert(0, {**copy.deepcopy(episode["traces"][0]), "id": "silent", "nodes": [], "calls": []})
    assert [rollout.id for rollout in from_verifiers(episode)] == ["trace-two_turns"]
    with pytest.raises(InvalidInput, match=r"trace 'silent'.nodes: empty"):
        from_verifiers(episode["traces"][0])


def test_versions_of_weights_come_from_spans_over_the_sampled_tokens() -> None:
    episode = record()
    node = next(node for node in episode["traces"][0]["nodes"] if sum(node["mask"]) > 2)
    count = sum(node["mask"])
    node["weight_versions"] = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": count}]
    [sample] = to_samples(from_verifiers(episode)[0])
    sampled = sample["weight_versions"][sample.loss_mask]
    assert sampled[:4].tolist() == [7, 7, 8, 8] and (sample["weight_versions"][~sample.loss_mask] == -1).all()
    node["weight_versions"][1]["end"] = 99
    with pytest.raises(InvalidInput, match=r"weight_versions\[1\]: tokens 2 to 99 of ."):
        from_verifiers(episode)
    node["weight_versions"] = [{"version": "step-7", "start": 0, "end": 1}]
    [sample] = to_samples(from_verifiers(episode)[0])
    assert "weight_versions" not in sample


@pytest.mark.parametrize("packed", [False, True])
def test_the_samplers_top_k_becomes_two_columns(packed: bool) -> None:
    episode = record()
    node = next(node for node in episode["traces"][0]["nodes"] if any(node["mask"]))
    counts = np.zeros(sum(node["mask"]), np.int32)
    counts[:2] = [2, 1]
    head = {"ids": np.array([5, 6, 7], np.int32), "logprobs": np.array([-0.5, -1, -2], np.float32), "counts": counts}
    node["top_logprobs"] = (
        head
        if not packed
        else {
            name: {"__nd__": True, "dtype": str(a.dtype), "shape": list(a.shape), "data": a.tobytes()}
            for name, a in head.items()
        }
    )
    [sample] = to_samples(from_verifiers(episode)[0])
    at = int(np.argmax(sample.loss_mask))
    assert sample["sampler_topk_ids"].tolist()[at - 1 : at + 3] == [[], [5, 6], [7], []]
    assert sample["sampler_topk_logprobs"].tolist()[at : at + 2] == [[-0.5, -1.0], [-2.0]]
    with ps.open("memory:", ranks=1, seq_len=128, groups_per_step=1, columns=list(SAMPLER_TOPK)) as plane:
        with plane.group("p") as group:
            group.add(from_verifiers(episode)[0])
        with plane.source(rank=0) as source:
            (batch,) = source.step(timeout=60)
            assert batch["sampler_topk_ids"].tolist()[at : at + 2] == [[5, 6], [7]]
    head["counts"] = counts[:-1]
    node["top_logprobs"] = head
    with pytest.raises(InvalidInput, match=r"top_logprobs: . counts and 3 logprobs for . sampled tokens with 3 ids"):
        from_verifiers(episode)


def test_the_object_keeps_the_digits_that_a_record_rounds_off() -> None:
    trace = branching_trace()
    [exact], [rounded] = from_verifiers(trace), from_verifiers(trace.to_record())
    exact_logprobs, rounded_logprobs = exact.turns[1].logprobs, rounded.turns[1].logprobs
    assert exact_logprobs is not None and rounded_logprobs is not None
    assert exact_logprobs[0] == np.float32(-0.1234567)
    assert rounded_logprobs[0] == np.float32(-0.1235)


def test_the_outcome_of_a_trace_comes_along() -> None:
    episode = vf.WireEpisode.model_validate(record("two_turns"))
    episode.group = vf.WireEpisode.model_fields["group"].annotation.__args__[0](id="g7")
    trace = episode.traces[0]
    trace.record_reward("bonus", 2.0, weight=0.25)
    [rollout] = from_verifiers(episode)
    assert isinstance(rollout, Trajectory)
    assert rollout.reward == trace.reward == 0.5
    assert (rollout.env, rollout.agent, rollout.id) == ("tiny-reverse", "agent", trace.id)
    assert rollout.truncated == trace.is_truncated is True
    assert rollout.error is None
    assert rollout.info["group"] == "g7"
    assert [turn.role for turn in rollout.turns] == ["system", "user", "assistant", "user", "assistant"]
    [sample] = to_samples(rollout)
    assert float(sample["temperatures"]) == 1.0


def test_a_failed_trace_keeps_its_tokens_and_trains_nothing() -> None:
    trace = branching_trace()
    trace.record_error(RuntimeError("the sandbox died"))
    [rollout] = from_verifiers(trace)
    assert rollout.error == "RuntimeError: the sandbox died"
    samples = to_samples(rollout)
    assert sorted(s.token_ids.tolist() for s in samples) == [tokens for tokens, _, _ in views(trace)]
    assert sum(s.loss_tokens for s in samples) == 0
    assert any(s["logprobs"].any() for s in samples)


def test_the_reason_is_what_the_harness_said_last_not_where() -> None:
    trace = branching_trace()
    tail = 'lib/python3.11/asyncio/runners.py", line 984, in main\n    raise\nopenai.BadRequestError: no tools here\n'
    trace.record_error(HarnessError(f"harness 'bash' exited 1: {tail}"))
    [rollout] = from_verifiers(trace)
    assert rollout.error == "HarnessError: harness 'bash' exited 1: openai.BadRequestError: no tools here"
    # The model call that failed is the cause, and the harness's own words are only its consequence.
    error = {"type": "NotImplementedError", "message": "DefaultRenderer does not support tools"}
    record_ = {**trace.model_dump(), "calls": [{"node": None, "error": error}]}
    assert failure_of(record_) == "NotImplementedError: DefaultRenderer does not support tools"


def test_traces_of_agents_that_are_not_trained_are_left_out() -> None:
    episode = vf.WireEpisode.model_validate(record())
    judge = copy.deepcopy(episode.traces[0])
    judge.agent.trainable = False
    episode.traces.append(judge)
    assert len(from_verifiers(episode)) == 1


def test_routed_experts_of_the_real_attribution_survive_the_wire() -> None:
    trace = empty_trace()
    rows = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2)
    routed = {"data": base64.b64encode(rows.tobytes()).decode(), "shape": [5, 2, 2], "start": 0}
    reply(trace, [user("q")], [(0, 3)], [1, 2, 3, 10], [20, 21], routed_experts=routed)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(trace.model_dump(mode="python"), enc_hook=msgpack_encoder))
    for form in (trace, wire):
        [sample] = to_samples(from_verifiers(form)[0])
        assert np.array_equal(sample["routed_experts"], trace.branches[0].routed_experts)


def test_an_abandoned_compaction_attempt_is_not_trained() -> None:
    trace = branching_trace()
    link = type(trace.nodes[0]).model_fields["semantic_parents"].annotation.__args__[0]
    leaf = len(trace.nodes) - 1
    trace.nodes[leaf].semantic_parents.append(link(node=1, type="compaction_attempt"))
    kept = [listed(b.token_ids) for b in trace.branches if b.trainable]
    [rollout] = from_verifiers(trace)
    assert [s.token_ids.tolist() for s in to_samples(rollout)] == kept
    trace.nodes[2].semantic_parents.append(link(node=leaf, type="compaction"))
    [rollout] = from_verifiers(trace)
    assert len(to_samples(rollout)) == 2


def test_annotations_become_columns() -> None:
    trace = branching_trace()
    for node in trace.nodes:
        count = sum(node.mask)
        node.reference_logprobs = [-2.0] * count
        node.advantages = [0.5] * count
    trace.nodes[2].loss_weights = {"ce": [1.0] * len(trace.nodes[2].token_ids)}
    samples = {tuple(s.token_ids.tolist()): s for s in to_samples(from_verifiers(trace)[0])}
    sample = next(s for ids, s in samples.items() if 4 in ids)
    branch = next(b for b in trace.branches if 4 in b.token_ids)
    assert sample["teacher_logprobs"].tolist() == listed(branch.reference_logprobs)
    assert sample["advantages"].tolist() == listed(branch.advantages)
    assert sample["ce_weights"].tolist() == listed(branch.loss_weights("ce"))
    # The observation is trained by cross-entropy and by nothing else.
    extra = sample["ce_weights"] != 0
    assert sample.loss_mask[extra].all() and not sample["rl_weights"][extra].any()


def image_trace() -> Any:
    trace = empty_trace()
    part = {"type": "image_url", "image_url": {"url": "file:///images/cat.png"}}
    message = UserMessage.model_validate({"content": [{"type": "text", "text": "what?"}, part]})
    reply(trace, [message], [(0, 6)], [1, 7, 7, 7, 7, 2, 10], [20], mm_token_type_id_map={7: 1})
    return trace


def test_images_are_looked_up_by_url_and_placed_on_their_tokens() -> None:
    def lookup(url: str) -> ImageSpan:
        assert url == "file:///images/cat.png"
        return ImageSpan(hash="c" * 64, grid=(1, 4, 4), offset=0, length=4)

    trace = image_trace()
    [sample] = to_samples(from_verifiers(trace, images=lookup)[0])
    assert [(span.offset, span.length) for span in sample.images] == [(1, 4)]
    assert sample["mm_token_type_ids"].tolist() == listed(trace.branches[0].mm_token_type_ids)


def test_image_tokens_without_a_way_to_the_image_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"nodes\[0\]: 4 image tokens; pass `images`"):
        from_verifiers(image_trace())
    wrong = ImageSpan(hash="c" * 64, grid=(1, 2, 4), offset=0, length=2)
    with pytest.raises(InvalidInput, match=r"nodes\[0\]: 4 image tokens, but its 1 images take another number"):
        from_verifiers(image_trace(), images=lambda url: wrong)


def test_a_sampled_image_placeholder_is_refused() -> None:
    trace = branching_trace()
    trace.mm_token_type_id_map = {20: 1}
    with pytest.raises(InvalidInput, match=r"nodes\[1\].token_ids\[1\]: the model sampled the image placeholder 20"):
        from_verifiers(trace)


def broken(change: str) -> Any:
    data = record("two_turns")
    nodes = data["traces"][0]["nodes"]
    match change:
        case "forward parent":
            nodes[1]["parent"] = 4
        case "no tokens":
            nodes[4]["token_ids"], nodes[4]["mask"] = [], []
        case "tokens None":
            nodes[3]["token_ids"] = None
        case "short mask":
            nodes[2]["mask"].pop()
        case "short logprobs":
            nodes[4]["logprobs"].pop()
        case "no logprobs":
            nodes[4]["logprobs"] = []
        case "negative id":
            nodes[2]["token_ids"][3] = -1
        case "routed list":
            nodes[2]["routed_experts"] = [1, 2]
        case "routed short":
            nodes[2]["routed_experts"] = {"__nd__": True, "dtype": "uint8", "shape": [25, 1, 1], "data": b"123"}
        case "weights":
            nodes[2]["loss_weights"] = {"dpo": [1.0] * 25}
    return data


BROKEN = {
    "forward parent": r"nodes\[1\].parent: 4",
    "no tokens": r"nodes\[4\].token_ids: empty for a sampled message",
    "tokens None": r"nodes\[3\].token_ids: None",
    "short mask": r"nodes\[2\].mask: 24 values for 25 tokens",
    "short logprobs": r"nodes\[4\].logprobs: 7 values for 8 sampled",
    "no logprobs": r"turns\[4\].logprobs: missing for 8 sampled tokens",
    "negative id": r"nodes\[2\].token_ids\[3\]: -1",
    "routed list": r"nodes\[2\].routed_experts: a list",
    "routed short": r"nodes\[2\].routed_experts: a packed array that cannot be read",
    "weights": r"nodes\[.\].loss_weights: unknown stream 'dpo'",
}


@pytest.mark.parametrize("change", BROKEN)
def test_a_broken_trace_is_rejected_whole(change: str) -> None:
    data = broken(change)
    before = copy.deepcopy(data)
    with pytest.raises(InvalidInput, match="'trace-two_turns'.*" + BROKEN[change]):
        from_verifiers(data)
    assert data == before


def test_reading_does_not_change_the_trace() -> None:
    trace = branching_trace()
    before = trace.model_dump(mode="python")
    samples = [sample for rollout in from_verifiers(trace) for sample in to_samples(rollout)]
    assert all(isinstance(sample, Sample) for sample in samples)
    assert trace.model_dump(mode="python") == before

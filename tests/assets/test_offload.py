"""Images leave messages on arrival, in every form they come in, without the input noticing."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import BaseModel

from penstock.assets import QWEN3_VL, AssetStore, ObjectStore, image_lookup, inline_messages, offload_messages, span
from penstock.assets.sources import path_of
from penstock.errors import ImageRefused, InvalidReference
from penstock.testing import as_data_uri

Picture = Callable[[int], bytes]


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_data_uri(data), "detail": "high"}}


def test_the_input_is_untouched_and_what_has_no_image_is_shared(store: AssetStore, picture: Picture) -> None:
    text = {"role": "system", "content": "be brief"}
    messages = [text, user({"type": "text", "text": "look"}, shown(picture(1)))]
    before = copy.deepcopy(messages)
    out, refs = offload_messages(messages, store)
    assert messages == before
    assert out[0] is text
    assert out[1]["content"][0] is messages[1]["content"][0]
    assert out[1]["content"][1] == {"type": "image_url", "image_url": {"url": store.url(refs[0]), "detail": "high"}}


def test_a_second_pass_changes_nothing(store: AssetStore, picture: Picture) -> None:
    once, refs = offload_messages([user(shown(picture(1)), shown(picture(2)), shown(picture(1)))], store)
    twice, again = offload_messages(once, store)
    assert twice == once
    assert twice[0] is once[0]
    assert again == refs
    assert [ref.hash for ref in refs] == [refs[0].hash, refs[1].hash, refs[0].hash]


def test_live_prompt_and_history_stay_equal(store: AssetStore, picture: Picture) -> None:
    """The same message, once fresh from the environment and once from storage, is one prefix."""
    live = [user(shown(picture(1)))]
    history, _ = offload_messages(copy.deepcopy(live), store)
    answered = [*live, {"role": "assistant", "content": "a desk"}, user(shown(picture(2)))]
    prompt, refs = offload_messages(answered, store)
    assert prompt[: len(history)] == history
    assert len(refs) == 2


@dataclass(frozen=True)
class Url:
    url: str


@dataclass(frozen=True)
class Part:
    type: str
    image_url: Url


class PydanticUrl(BaseModel):
    url: str


class PydanticPart(BaseModel):
    type: str = "image_url"
    image_url: PydanticUrl


class PydanticMessage(BaseModel):
    role: str = "user"
    content: list[PydanticPart]


def test_every_form_of_an_image_part_is_found(tmp_path: Path, picture: Picture) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.png").write_bytes(picture(1))
    store = AssetStore(tmp_path / "assets", files_from=[tmp_path / "in"])
    uri = as_data_uri(picture(1))
    parts: list[Any] = [
        {"type": "image_url", "image_url": uri},
        {"type": "input_image", "image_url": uri},
        {"type": "image", "image": uri},
        {"type": "image", "image": picture(1)},
        {"type": "image", "image": f"file://{tmp_path}/in/x.png"},
        {"type": "image", "url": uri},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(1)).decode()},
        },
        {"type": "image", "source": {"type": "url", "url": uri}},
        {"type": "tool_result", "content": [{"type": "image", "image": uri}]},
        Part("image_url", Url(uri)),
        SimpleNamespace(type="image_url", image_url=SimpleNamespace(url=uri)),
    ]
    messages: list[Any] = [
        user(*parts),
        SimpleNamespace(role="tool", content=(parts[0],)),
        PydanticMessage(content=[PydanticPart(image_url=PydanticUrl(url=uri))]),
    ]
    out, refs = offload_messages(messages, store)
    assert len(refs) == len(parts) + 2
    assert len(set(refs)) == 1
    assert "base64," not in repr(out)
    assert repr(picture(1))[:20] not in repr(out)
    assert out[2].content[0].image_url.url == store.url(refs[0])
    assert messages[2].content[0].image_url.url == uri
    assert parts[9].image_url.url == parts[10].image_url.url == uri
    assert offload_messages(out, store) == (out, refs)


def test_a_pillow_image_in_a_message_is_stored(store: AssetStore) -> None:
    out, refs = offload_messages([user({"type": "image", "image": Image.new("RGB", (9, 5))})], store)
    assert (refs[0].width, out[0]["content"][0]["image"]) == (9, store.url(refs[0]))


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}, InvalidReference),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, ImageRefused),
        ({"type": "image_url"}, ImageRefused),
        ({"type": "image", "source": {"type": "file", "file_id": "x"}}, ImageRefused),
    ],
)
def test_an_image_that_cannot_be_taken_names_its_message(
    part: dict[str, Any], error: type[Exception], store: AssetStore, picture: Picture
) -> None:
    with pytest.raises(error, match=r"messages\[1\]: "):
        offload_messages([user(shown(picture(1))), user(part)], store)
    assert len(list(store.list())) == 1


def test_nesting_is_bounded(store: AssetStore) -> None:
    content: Any = "x"
    for _ in range(100):
        content = [{"type": "tool_result", "content": content}]
    with pytest.raises(ImageRefused, match="nested"):
        offload_messages([{"role": "tool", "content": content}], store)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "text", "name"]), inner),
    max_leaves=10,
)


@settings(max_examples=50)
@given(st.lists(json_like, max_size=4))
def test_messages_without_images_come_back_as_they_are(messages: list[Any]) -> None:
    from obstore.store import MemoryStore

    store = AssetStore(ObjectStore(MemoryStore(), url="memory://text"))
    out, refs = offload_messages(messages, store)
    assert all(a is b for a, b in zip(out, messages, strict=True))
    assert refs == []
    assert list(store.blobs.list("")) == []


def test_inlining_gives_back_the_bytes_and_spares_large_and_missing_ones(store: AssetStore, picture: Picture) -> None:
    original = [user(shown(picture(1)), shown(picture(2)), {"type": "text", "text": "x"})]
    out, refs = offload_messages(original, store)
    assert inline_messages(out, store) == original
    assert inline_messages(out, store, max_bytes=10) == out
    Path(path_of(store.url(refs[0]))).unlink()
    fresh = AssetStore(Path(path_of(store.blobs.url("images"))).parent, run="demo", retries=0)
    mixed = inline_messages(out, fresh)
    assert mixed[0]["content"][0] == out[0]["content"][0]
    assert mixed[0]["content"][1] == original[0]["content"][1]
    foreign = [user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})]
    assert inline_messages(foreign, store) == foreign


def test_a_lookup_gives_readers_the_descriptor_of_a_url(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    assert image_lookup(store, QWEN3_VL)(store.url(ref)) == span(ref, QWEN3_VL, offset=0)


@pytest.mark.parametrize("kind", ["video_url", "input_video", "video"])
def test_a_video_is_refused_and_its_message_named(store: AssetStore, kind: str) -> None:
    messages = [
        user({"type": "text", "text": "watch"}),
        user({"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}),
    ]
    with pytest.raises(ImageRefused, match=rf"messages\[1\]: a part of type '{kind}'; videos are not supported"):
        offload_messages(messages, store)
    assert inline_messages(messages, store) == messages  # a log is better with it than not written

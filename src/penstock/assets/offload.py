"""Replace the images in messages by URLs of the store, in what is buffered, logged and sent on.

`offload_messages` runs where a message arrives, before anything stores it, and over the live prompt and the history
alike. If only one of them were rewritten, the same message would differ from itself, and prefix rules would open a new
branch every turn. `inline_messages` does the reverse, for logs that must be self-contained.

Parts are found in dicts and in objects with the same attribute names:

    {"type": "image_url", "image_url": {"url": ...}}     (or the URL itself)
    {"type": "input_image", "image_url": ...}
    {"type": "image", "image": ...}                      (bytes, a Pillow image, a data: URI or a file: URL)
    {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}

Videos (`video_url`, `input_video`, `video`) are rejected: no later stage could train on them.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.arrays import ImageSpan
from penstock.assets.store import AssetStore, Geometry, ImageRef, span
from penstock.errors import AssetError, ImageRefused, StorageError

_TYPES = ("image_url", "input_image", "image")
_VIDEOS = ("video_url", "input_video", "video")
_MAX_DEPTH = 16
INLINE_BYTES = 2 << 20

Replace = Callable[[Any], Any]


def offload_messages(messages: Sequence[Any], store: AssetStore) -> tuple[list[Any], list[ImageRef]]:
    """Return the messages with every image replaced by its URL in the store, and the images in reading order.

    The input is not changed, and parts without images are shared with it. A second pass changes nothing. An image that
    cannot be stored raises an error that names its message, as does a video. Images stored before it stay stored.

    >>> import tempfile
    >>> from penstock.testing import as_data_uri, draw_screenshot
    >>> store = AssetStore(tempfile.mkdtemp())
    >>> part = {"type": "image_url", "image_url": {"url": as_data_uri(draw_screenshot(seed=1))}}
    >>> messages, refs = offload_messages([{"role": "user", "content": [part]}], store)
    >>> messages[0]["content"][0]["image_url"]["url"] == store.url(refs[0])
    True
    """
    refs: list[ImageRef] = []

    def to_url(source: Any) -> str:
        refs.append(store.put(source))
        return store.url(refs[-1])

    def refuse(part: Any) -> Any:
        raise ImageRefused(f"a part of type {_field(part, 'type')!r}; videos are not supported, leave the message out")

    return _each(messages, to_url, refuse), refs


def image_lookup(store: AssetStore, layout: Geometry) -> Callable[[str], ImageSpan]:
    """Return a function from an image's URL to its span, for readers that place the placeholders themselves."""
    return lambda url: span(store.put(url), layout, offset=0)


def inline_messages(messages: Sequence[Any], store: AssetStore, *, max_bytes: int = INLINE_BYTES) -> list[Any]:
    """Return the messages with the store's own images as data: URIs. Larger or unreadable ones keep their URL."""
    seen: dict[str, str] = {}

    def to_data(source: Any) -> Any:
        if not isinstance(source, str) or source[:5].lower() == "data:":
            return source
        if source not in seen:
            seen[source] = _inlined(source, store, max_bytes)
        return seen[source]

    return _each(messages, to_data)


def _inlined(url: str, store: AssetStore, max_bytes: int) -> str:
    try:
        image = store.own_hash(url)
        ref = None if image is None else store.ref(image)
        if ref is None or ref.num_bytes > max_bytes:
            return url
        return f"data:{ref.media_type};base64,{base64.b64encode(store.get(ref.hash)).decode()}"
    except (AssetError, StorageError):
        return url  # a log with a URL in it is better than no log


def _as_it_is(part: Any) -> Any:
    return part


def _each(messages: Sequence[Any], replace: Replace, video: Replace = _as_it_is) -> list[Any]:
    done = []
    for i, message in enumerate(messages):
        try:
            done.append(_walk(message, replace, video, 0))
        except AssetError as error:
            missing = error.missing
            raise type(error)(f"messages[{i}]: {error}", error_type=error.error_type, missing=missing) from error
    return done


def _walk(value: Any, replace: Replace, video: Replace, depth: int) -> Any:
    """Return the value with its images replaced, or the same object if it has none."""
    if depth > _MAX_DEPTH:
        raise ImageRefused(f"message content is nested more than {_MAX_DEPTH} deep; flatten it")
    if isinstance(value, (list, tuple)):
        items = [_walk(item, replace, video, depth + 1) for item in value]
        # Unchanged content keeps its identity, so that a second pass and prefix comparisons cost nothing.
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    if _field(value, "type") in _TYPES:
        return _image_part(value, replace)
    if _field(value, "type") in _VIDEOS:
        return video(value)
    content = _field(value, "content")
    if isinstance(content, (list, tuple)):
        return _with(value, "content", _walk(content, replace, video, depth + 1))
    return value


def _image_part(part: Any, replace: Replace) -> Any:
    for name in ("image_url", "image", "url"):
        holder = _field(part, name)
        if holder is None:
            continue
        if isinstance(holder, (str, bytes, bytearray, memoryview)) or hasattr(holder, "getbands"):
            return _with(part, name, replace(holder))
        url = _field(holder, "url")
        if url is not None:
            return _with(part, name, _with(holder, "url", replace(url)))
    source = _field(part, "source")
    if _field(source, "type") == "base64":
        uri = f"data:{_field(source, 'media_type')};base64,{_field(source, 'data')}"
        new = replace(uri)
        return part if new is uri else _with(part, "source", {"type": "url", "url": new})
    if _field(source, "type") == "url":
        return _with(part, "source", _with(source, "url", replace(_field(source, "url"))))
    raise ImageRefused("an image part without an image; give image_url, image or source")


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _with(value: Any, name: str, new: Any) -> Any:
    """Return a shallow copy of a dict or object with one field changed, or the same object if the field is equal."""
    if _field(value, name) is new or (isinstance(new, str) and _field(value, name) == new):
        return value
    if isinstance(value, Mapping):
        return {**value, name: new}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: new})
    if hasattr(value, "model_copy"):  # pydantic
        return value.model_copy(update={name: new})
    changed = copy.copy(value)
    setattr(changed, name, new)
    return changed

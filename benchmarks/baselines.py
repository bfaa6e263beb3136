"""The two wire formats in use elsewhere, small enough to write down: Python lists, and byte arrays per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import Sample
from penstock.arrays.columns import Array

_PACK = msgspec.msgpack.Encoder()
Lists = dict[str, Any]


def as_lists(samples: Sequence[Sample]) -> list[Lists]:
    """Samples as list-based trainers hold them: prompt and completion as lists of Python numbers."""
    out = []
    for s in samples:
        start = s.num_tokens if not s.loss_tokens else int(np.argmax(s.loss_mask))
        ids, mask, logprobs = s.token_ids, s.loss_mask, s["logprobs"]
        out.append(
            {
                "prompt_ids": ids[:start].tolist(),
                "prompt_mask": mask[:start].tolist(),
                "completion_ids": ids[start:].tolist(),
                "completion_mask": mask[start:].tolist(),
                "completion_logprobs": logprobs[start:].tolist(),
                "temperature": float(s["temperatures"]),
                "advantage": float(s["advantages"]),
                "reward": float(s["rewards"]),
                "env": s.env,
            }
        )
    return out


def encode_lists(samples: list[Lists]) -> bytes:
    """msgpack of Python lists, positional as the originals are."""
    return _PACK.encode([list(s.values()) for s in samples])


def decode_lists(data: bytes) -> list[list[Any]]:
    decoded: list[list[Any]] = msgspec.msgpack.decode(data)
    return decoded


_DTYPES = {"ids": np.uint32, "logprobs": np.float32}


def encode_byte_arrays(samples: list[Lists]) -> bytes:
    """Per sample: ids as uint32 bytes, masks bit-packed, log-probabilities as float32 bytes; lists on input."""
    packed = []
    for s in samples:
        fields: list[Any] = []
        for name, value in s.items():
            if name.endswith("_mask"):
                fields.append([np.packbits(np.array(value, np.bool_), bitorder="little").tobytes(), len(value)])
            elif isinstance(value, list):
                fields.append([np.array(value, _DTYPES[name.rsplit("_", 1)[1]]).tobytes(), len(value)])
            else:
                fields.append(value)
        packed.append(fields)
    return _PACK.encode(packed)


def decode_byte_arrays(data: bytes) -> list[list[Any]]:
    """Back to Python lists, as the receiving packer needs them."""
    out = []
    for prompt_ids, prompt_mask, ids, mask, logprobs, *rest in msgspec.msgpack.decode(data):
        out.append(
            [
                np.frombuffer(prompt_ids[0], np.uint32).tolist(),
                _bits(prompt_mask).tolist(),
                np.frombuffer(ids[0], np.uint32).tolist(),
                _bits(mask).tolist(),
                np.frombuffer(logprobs[0], np.float32).tolist(),
                *rest,
            ]
        )
    return out


def _bits(field: list[Any]) -> Array:
    return np.unpackbits(np.frombuffer(field[0], np.uint8), count=field[1], bitorder="little").astype(np.bool_)

"""Convert samples to `Datum`s of the Tinker API, for `forward_backward`, and back.

A datum's input is all tokens but the last, and the target of each is the token after it:

    sample          a b c d e            model_input      a b c d
    loss_mask       0 0 1 1 0            target_tokens    b c d e
    logprobs        0 0 x y 0            weights          0 1 1 0
                                         logprobs         0 x y 0

The loss `cross_entropy` takes weights. The others take log-probabilities and advantages, which are 0.0 on tokens that
are not trained. `forward_backward` returns outputs in the order of the datums, and `by_sample` maps them to the tokens
of each sample, by id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import numpy as np

try:
    from tinker import Datum, EncodedTextChunk, ModelInput
    from tinker.types import ImageChunk, LossFnType, PromptProvenanceSpan, SampledProvenanceSpan
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.integrations.formats.tinker_datums", error) from None

from penstock.arrays import Array, ImageSpan, Sample
from penstock.errors import InvalidInput
from penstock.integrations.formats.shared import once, per_token

CROSS_ENTROPY = "cross_entropy"
_FORMATS = {"image/png": "png", "image/jpeg": "jpeg"}
ImageBytes = Callable[[str], bytes]
"""Returns the bytes of an image by its hash, like `AssetStore.get`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datums:
    """Datums, and the sample each was made from."""

    datums: list[Datum]
    """For `TrainingClient.forward_backward`."""
    ids: tuple[str, ...]
    """The sample's id of each datum."""

    def by_sample(self, outputs: Sequence[Mapping[str, Any]], name: str = "logprobs") -> dict[str, Array]:
        """Return one output of `forward_backward` per token of each sample, by id.

        `outputs` are `ForwardBackwardOutput.loss_fn_outputs`. The first token of a sample has no output: NaN.
        """
        if len(outputs) != len(self.ids):
            raise InvalidInput(f"outputs: {len(outputs)} for {len(self.ids)} datums; give the outputs of the same call")
        return {
            sample: np.concatenate([[np.float32(np.nan)], np.asarray(_array(output[name]), np.float32)])
            for sample, output in zip(self.ids, outputs, strict=True)
        }


def to_datums(
    samples: Iterable[Sample],
    *,
    loss_fn: str = "importance_sampling",
    images: ImageBytes | None = None,
    provenance: bool = False,
) -> Datums:
    """Make one datum per sample, with the inputs of `loss_fn`.

    `images` returns the bytes of images, for example `AssetStore.get`. Each image becomes a chunk in place of its
    tokens. With `provenance`, a datum's spans record the sample of its tokens and which of them were sampled. Leave it
    off for a server that checks spans against sequences it sampled itself.

    >>> sample = Sample(id="a", token_ids=[5, 6, 7], loss_mask=[0, 1, 1], logprobs=[0, -0.5, -0.25], advantages=1.0)
    >>> [datum] = to_datums([sample]).datums
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([5, 6], [6, 7])
    >>> datum.loss_fn_inputs["advantages"].tolist(), datum.loss_fn_inputs["logprobs"].tolist()
    ([1.0, 1.0], [-0.5, -0.25])
    """
    if loss_fn not in get_args(LossFnType):
        raise InvalidInput(f"loss_fn {loss_fn!r:.60}: unknown to tinker; use one of {', '.join(get_args(LossFnType))}")
    rows = list(samples)
    made = [_datum(sample, loss_fn, images, provenance) for sample in rows]
    return Datums(datums=made, ids=tuple(sample.id for sample in rows))


def _datum(sample: Sample, loss_fn: str, images: ImageBytes | None, provenance: bool) -> Datum:
    where = f"sample {sample.id!r}"
    if sample.num_tokens < 2:
        raise InvalidInput(f"{where}: 1 token; a datum needs at least two, an input and its target")
    targets: Array = sample.token_ids.astype(np.int64)
    for span in sample.images:
        targets[span.offset : span.end] = 0
    inputs: dict[str, Any] = {"target_tokens": targets[1:], **_loss_inputs(sample, loss_fn, where)}
    datum = Datum(model_input=_model_input(sample, images, where), loss_fn_inputs=inputs)
    if not provenance:
        return datum
    return datum.with_provenance(
        model_input=_spans(sample, slice(0, -1)), loss_fn_inputs=_spans(sample, slice(1, None))
    )


def _loss_inputs(sample: Sample, loss_fn: str, where: str) -> dict[str, Array]:
    mask = sample.loss_mask
    if loss_fn == CROSS_ENTROPY:
        weights = per_token(sample, "ce_weights")
        return {"weights": np.where(mask, 1.0 if weights is None else weights, 0.0).astype(np.float32)[1:]}
    given: dict[str, Array] = {}
    for name in ("logprobs", "advantages"):
        values = per_token(sample, name)
        if values is None:
            raise InvalidInput(f"{where}.{name}: none; loss {loss_fn!r} needs them, or pass loss_fn={CROSS_ENTROPY!r}")
        given[name] = np.where(mask, values, 0.0).astype(np.float32)[1:]
    if (weights := per_token(sample, "rl_weights")) is not None:
        given["advantages"] *= weights[1:]  # a datum has no field for them, and losses are linear in the advantage
    return given


def _model_input(sample: Sample, images: ImageBytes | None, where: str) -> ModelInput:
    ids: list[int] = sample.token_ids.tolist()
    if max(ids) >= 2**31:
        raise InvalidInput(f"{where}.token_ids: {max(ids)}; ids of a datum must be below 2**31")
    chunks: list[Any] = []
    at, last = 0, len(ids) - 1
    for i, span in enumerate(sample.images):
        if span.end > last:
            raise InvalidInput(
                f"{where}.images[{i}]: ends the sample; add a token, because an image cannot be a target"
            )
        chunks += [EncodedTextChunk(tokens=ids[at : span.offset])] if span.offset > at else []
        chunks.append(_image(span, images, f"{where}.images[{i}]"))
        at = span.end
    chunks += [EncodedTextChunk(tokens=ids[at:last])] if last > at else []
    return ModelInput(chunks=chunks)


def _image(span: ImageSpan, images: ImageBytes | None, where: str) -> Any:
    if images is None:
        raise InvalidInput(f"{where}: no bytes; pass images=, for example AssetStore.get")
    data = images(span.hash)
    kind = "image/png" if data[:4] == b"\x89PNG" else "image/jpeg" if data[:2] == b"\xff\xd8" else span.media_type
    if kind not in _FORMATS:
        raise InvalidInput(f"{where}: {kind or 'of an unknown type'}; Tinker takes png and jpeg")
    return ImageChunk(data=data, format=_FORMATS[kind], expected_tokens=span.length)


def _spans(sample: Sample, cut: slice) -> list[Any]:
    """Return spans of sampled and other tokens that cover a slice of the sample. Offsets count the sample's tokens.

    Mask 0 0 1 1 0 cut to [1:] is 0 1 1 0: spans (offset 1, length 1), (2, 2) and (4, 1).
    """
    mask = sample.loss_mask[cut]
    start = range(sample.num_tokens)[cut].start
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [
        (SampledProvenanceSpan if mask[a] else PromptProvenanceSpan)(
            sequence_id=sample.id, offset=start + a, length=b - a
        )
        for a, b in pairwise(edges)
    ]


def _array(tensor: Any) -> Any:
    return tensor.to_numpy() if hasattr(tensor, "to_numpy") else tensor


# ------------------------------------------------------------------ and back


def sample_ids(datum: Datum) -> tuple[str, ...]:
    """Return the sample or sequence ids in a datum's spans, in order; empty without provenance."""
    spans = [*(datum.model_input_spans or ()), *(datum.loss_fn_input_spans or ())]
    return tuple(dict.fromkeys(span.sequence_id for span in spans))


def from_datums(datums: Iterable[Datum], *, ids: Sequence[str] | None = None) -> list[Sample]:
    """Convert datums of text back to samples, named by `ids`, by their provenance, or by their number.

    Tokens are trained where the spans say sampled; without spans where `mask` (the cookbook's) is not 0; without a mask
    where weights are not 0; without weights where log-probabilities or advantages are not 0. Weights other than 1
    become `ce_weights`, and the mode is sft.
    """
    rows = list(datums)
    if ids is not None and len(ids) != len(rows):
        raise InvalidInput(f"ids: {len(ids)} for {len(rows)} datums; give one each")
    return [_sample(datum, ids[i] if ids is not None else _id(datum, i)) for i, datum in enumerate(rows)]


def _id(datum: Datum, number: int) -> str:
    named = sample_ids(datum)
    return named[0] if len(named) == 1 else str(number)


def _sample(datum: Datum, id: str) -> Sample:  # noqa: A002 - the field's own name
    where = f"datum {id!r}"
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        raise InvalidInput(f"{where}: has chunks that are not text; keep the original samples and their ids")
    inputs = {name: np.asarray(_array(tensor)) for name, tensor in datum.loss_fn_inputs.items()}
    tokens = np.array(datum.model_input.to_ints(), np.int64)
    targets = inputs.get("target_tokens")
    if targets is None or targets.shape != tokens.shape:
        raise InvalidInput(f"{where}.target_tokens: not one for each of {len(tokens)} input tokens; give one each")
    columns: dict[str, Any] = {name: _shifted(inputs[name]) for name in ("logprobs", "advantages") if name in inputs}
    weights = inputs.get("weights")
    trained = _trained(datum, inputs, len(tokens), where)
    if weights is not None and not np.array_equal(weights, trained):
        columns["ce_weights"] = _shifted(weights)
    if "advantages" in columns:
        columns["advantages"] = once(columns["advantages"], np.concatenate([[False], trained]))
    return Sample(
        id=id,
        mode="sft" if weights is not None else "rl",
        token_ids=np.concatenate([tokens, targets[-1:]]),
        loss_mask=np.concatenate([[False], trained]),
        **columns,
    )


def _trained(datum: Datum, inputs: Mapping[str, Array], count: int, where: str) -> Array:
    if datum.loss_fn_input_spans is not None:
        marks = [(isinstance(span, SampledProvenanceSpan), span.length) for span in datum.loss_fn_input_spans]
        return np.repeat([mark for mark, _ in marks], [length for _, length in marks])
    for name in ("mask", "weights"):
        if name in inputs:
            if inputs[name].shape != (count,):
                raise InvalidInput(f"{where}.{name}: {inputs[name].shape} values for {count} targets; give one each")
            return np.asarray(inputs[name] != 0)
    trained = np.zeros(count, np.bool_)
    for name in ("logprobs", "advantages"):
        trained |= inputs[name] != 0 if name in inputs else False
    return trained


def _shifted(values: Array) -> Array:
    """Extend values to all tokens: the first is not predicted and gets 0."""
    return np.concatenate([np.zeros(1, np.float32), values.astype(np.float32)])

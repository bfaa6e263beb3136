"""Hugging Face models on packed rows: build one, run it, and verify that packing does not change its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
    from torch import Tensor
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.model", error) from None

from penstock.arrays import TOPK, Ragged, arrays_in
from penstock.errors import ConfigError, InvalidInput
from penstock.packing import MicroBatch, grow, positions_of
from penstock.train.attention import buckets_of, register_attention, tree_of, without_masks
from penstock.train.logits import kept_of, predictions_of, token_logprobs
from penstock.train.run_config import ModelConfig
from penstock.train.tensors import FOREST

ID_COLUMNS = ("token_ids", "sampling_mask", TOPK[0])
"""Columns that hold vocabulary ids. Columns of named teachers start with the last of these."""
TOLERANCE = 1e-4
"""Largest difference in log-probability between packed and unpacked rows that counts as rounding."""
HALF_TOLERANCE = 0.05
"""The same for weights of 16 bits."""
_PER_TOKEN = ("full_attention", "sliding_attention", "moe", "dense")
"""Kinds of layers that mix tokens through attention alone. All others carry a state from token to token."""
_OFF = "set packing.trees = false"


def build_model(config: ModelConfig, *, seed: int = 0) -> Any:
    """Build a causal or image-text model from a folder or from scratch, with attention for packed rows."""
    import transformers

    name = register_attention()
    torch.manual_seed(seed)
    if config.path:
        if not (Path(config.path) / "config.json").is_file():
            raise ConfigError(f"model.path: {config.path!r} has no config.json; give the folder of a saved model")
        found = transformers.AutoConfig.from_pretrained(config.path, local_files_only=True)
    else:
        found = _config(transformers, config)
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    auto = kinds[hasattr(found, "vision_config")]
    if config.path:
        return auto.from_pretrained(config.path, local_files_only=True, attn_implementation=name)
    return auto.from_config(found, attn_implementation=name)


def _config(transformers: Any, config: ModelConfig) -> Any:
    try:
        return transformers.AutoConfig.for_model(config.family, **config.config)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: cannot build {config.family!r} from model.config: {str(error)[:200]}") from None


def forward(
    model: Any, tensors: dict[str, Tensor], extra: dict[str, Any] | None = None, *, places: Tensor | None = None
) -> Tensor:
    """Return the [1, T, vocabulary] logits of a packed row; of a forest [1, U, vocabulary], or only those of `places`.

    Passes `use_cache=False` and no attention mask: with either, the model would attend across segments.
    """
    tree = f"{FOREST}token_ids" in tensors
    ids, positions = (tensors[f"{FOREST if tree else ''}{name}"] for name in ("token_ids", "position_ids"))
    if tree:
        segments: Any = tree_of(*(tensors[f"{FOREST}{name}"].cpu().numpy() for name in ("lengths", "parents")))
    else:
        segments = buckets_of(tensors["sequence_lengths"], len(ids))
    keeps = places is not None and "logits_to_keep" in signature(getattr(model, "module", model).forward).parameters
    with without_masks():
        out = model(
            input_ids=ids[None],
            position_ids=positions.unsqueeze(-2),  # [1, T], or [4, 1, T] of an image model
            use_cache=False,
            segments=segments,
            **({"logits_to_keep": places} if keeps else {}),
            **(extra or {}),
        )
    logits: Tensor = out.logits
    return logits if keeps or places is None else logits[:, places]


def row_logprobs(
    model: Any,
    tensors: dict[str, Tensor],
    extra: dict[str, Any] | None = None,
    *,
    needed: Tensor | None = None,
    never_sampled: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Return the [T] log-probability and entropy of every token of a packed row, at its temperature, over the kept ids.

    In a forest, `needed` restricts this to some tokens. Ids in `never_sampled` get no probability.
    """
    predictions = places = None
    if f"{FOREST}index" in tensors:
        predictions = predictions_of(tensors, needed=needed)
        places = predictions.places
    logits = forward(model, tensors, extra, places=places)
    if never_sampled:
        logits = logits.index_fill(-1, torch.tensor(never_sampled), float("-inf"))
    return token_logprobs(
        logits,
        tensors["token_ids"],
        tensors["sequence_lengths"],
        tensors.get("temperatures"),
        kept=kept_of(tensors),
        predictions=predictions,
    )


def check_packing(model: Any, *, vocabulary: int, lengths: tuple[int, ...] = (5, 1, 9, 3)) -> float:
    """Return the largest difference in log-probability between a packed row and its samples run one by one.

    Raises if that is more than rounding: the model attends across samples, and packing would silently train it on
    garbage.
    """
    generator = torch.Generator().manual_seed(0)
    samples, last = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths], lengths[-1]
    row = {
        "token_ids": torch.cat(samples),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]),
        "sequence_lengths": torch.tensor(lengths),
    }
    worst, tolerance = difference(model, row, samples), TOLERANCE
    if next(model.parameters()).dtype.itemsize < 4:
        # Rounding depends on the shapes that a kernel gets: 0.006 for bfloat16 and sdpa. So also see whether the last
        # samples notice that the first ones have other tokens. There the shapes are the same.
        tolerance = HALF_TOLERANCE
        other = row | {"token_ids": torch.cat([(row["token_ids"][:-last] + 1) % vocabulary, samples[-1]])}
        worst = max(worst, HALF_TOLERANCE / TOLERANCE * _leak(model, row, other, last))
    if not worst <= tolerance:
        raise ConfigError(
            f"model {type(model).__name__}: packed and unpacked log-probabilities differ by {worst:.3g}; its attention "
            "mixes samples, so it cannot be trained on packed rows"
        )
    return worst


def _leak(model: Any, row: dict[str, Tensor], other: dict[str, Tensor], last: int) -> float:
    """Return by how much the log-probabilities of the last tokens of two rows differ."""
    device = next(model.parameters()).device
    with _evaluating(model):
        found = [
            torch.log_softmax(forward(model, {n: v.to(device) for n, v in one.items()}).float(), -1)[0, -last:]
            for one in (row, other)
        ]
    return float((found[0] - found[1]).abs().max())


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Run the block without dropout and without gradients."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def difference(model: Any, row: dict[str, Tensor], samples: list[Tensor], index: Tensor | None = None) -> float:
    """Return the largest difference in log-probability between a row (at `index`, if given) and its samples alone."""
    device = next(model.parameters()).device
    row, samples = {name: values.to(device) for name, values in row.items()}, [sample.to(device) for sample in samples]
    with _evaluating(model):
        together = torch.log_softmax(forward(model, row).float(), -1)[0]
        alone = torch.cat(
            [torch.log_softmax(model(input_ids=s[None], use_cache=False).logits.float(), -1)[0] for s in samples]
        )
    return float(((together if index is None else together[index]) - alone).abs().max())


def check_vocabulary(batch: MicroBatch, vocabulary: int) -> None:
    """Raise if a token id has no embedding, which means sampler and trainer use different models or tokenizers."""
    for name in [name for name in batch if name in ID_COLUMNS or name.startswith(TOPK[0])]:
        cells = batch[name]
        ids = arrays_in(cells)[0].reshape(-1)
        if int(ids.max(initial=0)) < vocabulary:
            continue
        at = int(ids.argmax())
        ends = (
            cells.offsets[1:]
            if isinstance(cells, Ragged)
            else np.arange(1, len(cells) + 1) * (cells.size // len(cells))
        )
        # A ragged column with offsets [0, 2, 5] has value 2 in token 1: the first whose end is beyond it.
        token = int(np.searchsorted(ends, at, side="right"))
        raise InvalidInput(
            f"sample {batch.sample_at(token)!r}.{name}: id {int(ids[at])} for a model of {vocabulary} tokens; use the "
            "same vocabulary in sampler and trainer"
        )


def check_trees(model: Any, *, vocabulary: int, longest: int) -> float:
    """Check that a model can compute a shared prefix once. Returns the largest difference in log-probability.

    First rejects models by their layers: a layer that carries a state from token to token has one state, not one per
    branch, and a sliding window shorter than `longest` tokens is not implemented here. Then compares a small forest
    with its samples one by one and raises ConfigError if they differ by more than rounding.
    """
    name = type(model).__name__
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    for number, kind in enumerate(kinds):
        if kind not in _PER_TOKEN:
            raise ConfigError(
                f"model {name}: layer {number} is {kind}, whose state follows one sequence and cannot branch; {_OFF}"
            )
    window = getattr(text, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
    if window is not None and window < longest:
        raise ConfigError(
            f"model {name}: a sliding window of {window} tokens with samples of up to {longest} is not supported; "
            f"{_OFF}, or seq_len to at most {window}"
        )
    worst = _measured(model, vocabulary)
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"model {name}: log-probabilities of samples that share tokens differ by {worst:.3g} from those of the "
            f"samples alone; the model does not compute each token from its path: {_OFF}"
        )
    return worst


def _measured(model: Any, vocabulary: int) -> float:
    """Measure the difference on a forest with two branchings, a sample that is a prefix of another, and two roots."""
    lengths, shared = np.array([9, 7, 6, 4, 3]), np.array([0, 5, 3, 3, 0])
    own = int((lengths - shared).sum())
    ids = torch.randint(0, vocabulary, (own,), generator=torch.Generator().manual_seed(0))
    forest = grow(lengths, shared, columns={})
    index = torch.from_numpy(forest.index)
    row = {
        "forest.token_ids": ids,
        "forest.position_ids": torch.from_numpy(positions_of(lengths, shared, 0)),
        "forest.lengths": torch.from_numpy(forest.lengths),
        "forest.parents": torch.from_numpy(forest.parents),
    }
    return difference(model, row, list(ids[index].split(lengths.tolist())), index)

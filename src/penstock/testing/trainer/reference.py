"""The reference of `penstock.testing.trainer`: log-probabilities of one sequence, and their gradients, in float64.

It shares nothing with a trainer: no rows, no packing, no padding, no micro-batches, no shift over a boundary. Each
sequence goes through the user's own forward pass alone. `pull` multiplies the gradients of its log-probabilities with
coefficients, so the gradient of any loss is `pull(sequence, d loss / d logprobs)`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput

Vector: TypeAlias = NDArray[np.float64]
Forward: TypeAlias = Callable[[Any, Any, Any], Any]
"""model, token_ids [T], position_ids [T] -> logits [T, V] of one sequence, without padding."""

_LARGEST = 4096
"""Number of values of a gradient that are compared. A longer one is summed into this many, with random signs."""
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence1:
    """One sequence as a model computes it."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    temperatures: Vector
    shift: int = 1
    """The logits of token t - shift predict token t."""

    @property
    def key(self) -> bytes:
        return b"|".join(
            (self.token_ids.tobytes(), self.positions.tobytes(), self.temperatures.tobytes(), bytes([self.shift]))
        )


class Flat:
    """Writes named gradients into one vector, always of the same parameters, of at most a few thousand values.

    Adding values up with random signs is linear: equal gradients stay equal, and lengths and angles hardly change.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        total = sum(math.prod(shape) for shape in shapes.values())
        cap = max(16, _LARGEST // len(shapes)) if total > _LARGEST else total
        self.slices: dict[str, slice] = {}
        self._sketch: dict[str, tuple[NDArray[np.int64], Vector]] = {}
        start, rng = 0, np.random.default_rng(0)
        for name, shape in shapes.items():
            size = math.prod(shape)
            if size > cap:
                self._sketch[name] = (rng.integers(0, cap, size), rng.choice([-1.0, 1.0], size))
            self.slices[name] = slice(start, start + min(size, cap))
            start += min(size, cap)
        self.size = start

    def __call__(self, gradients: Mapping[str, Vector]) -> Vector:
        out = np.zeros(self.size)
        for name, at in self.slices.items():
            if name not in gradients:
                continue
            values: NDArray[Any] = gradients[name].reshape(-1)
            if name in self._sketch:
                buckets, signs = self._sketch[name]
                values = np.bincount(buckets, weights=values * signs, minlength=at.stop - at.start)
            out[at] = values
        return out


class Reference:
    """The user's model in float64: log-probabilities of a sequence, and gradients of them."""

    def __init__(self, model: Any, forward: Forward | None) -> None:
        import torch

        self._torch = torch
        own = model if isinstance(model, torch.nn.Module) else model()
        self._model = copy.deepcopy(own).double().eval()
        self._forward = forward or _forward_of(self._model)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        if not self._parameters:
            raise InvalidInput("model: no parameter requires a gradient; pass the model as it is trained")
        self.flat = Flat(self.shapes)
        self._graphs: dict[bytes, Any] = {}
        self._matrices: dict[bytes, Vector] = {}
        self._pulls: dict[bytes, int] = {}

    def logprobs(self, sequence: Sequence1) -> Vector:
        """Return [T] log-probabilities. First tokens, which nothing predicts, have that of a uniform model."""
        return np.array(self._graph(sequence)[0].detach().numpy(), np.float64)

    def entropies(self, sequence: Sequence1) -> Vector:
        return np.array(self._graph(sequence)[1].detach().numpy(), np.float64)

    def pull(self, sequence: Sequence1, coefficients: Vector) -> Vector:
        """Return the gradient of `coefficients @ logprobs`."""
        if not np.any(coefficients):
            return np.zeros(self.flat.size)
        key = sequence.key
        self._pulls[key] = self._pulls.get(key, 0) + 1
        if key not in self._matrices and self._pulls[key] > 3:
            rows = np.eye(len(coefficients))
            self._matrices[key] = np.stack([self._backward(self._graph(sequence)[0], row) for row in rows])
        if key in self._matrices:
            pulled: Vector = coefficients @ self._matrices[key]
            return pulled
        return self._backward(self._graph(sequence)[0], coefficients)

    def pull_entropy(self, sequence: Sequence1, coefficients: Vector) -> Vector:
        """Return the gradient of `coefficients @ entropies`."""
        return self._backward(self._graph(sequence)[1], coefficients)

    def weights(self) -> Vector:
        """Return the parameters: weight decay adds a multiple of them."""
        return self.flat({n: p.detach().numpy().astype(np.float64) for n, p in self._parameters.items()})

    def rounded(self) -> Reference:
        """Return the model with weights rounded to bfloat16, to see how large the effect of rounding is."""
        torch = self._torch
        other = copy.copy(self)
        other._model = copy.deepcopy(self._model)
        with torch.no_grad():
            for parameter in other._model.parameters():
                parameter.copy_(parameter.bfloat16().double())
        other._parameters = {n: p for n, p in other._model.named_parameters() if p.requires_grad}
        other._graphs, other._matrices, other._pulls = {}, {}, {}
        return other

    def _backward(self, outputs: Any, coefficients: Vector) -> Vector:
        if not np.any(coefficients) or not outputs.requires_grad:
            return np.zeros(self.flat.size)
        found = self._torch.autograd.grad(
            outputs,
            list(self._parameters.values()),
            grad_outputs=self._torch.from_numpy(np.asarray(coefficients, np.float64)),
            retain_graph=True,
            allow_unused=True,
        )
        named = zip(self._parameters, found, strict=True)
        return self.flat({name: g.numpy() for name, g in named if g is not None})

    def _graph(self, sequence: Sequence1) -> Any:
        key = sequence.key
        if key not in self._graphs:
            self._graphs[key] = self._run(sequence)
        return self._graphs[key]

    def _run(self, sequence: Sequence1) -> tuple[Any, Any]:
        torch, shift = self._torch, sequence.shift
        ids = torch.from_numpy(sequence.token_ids)
        out: Any = self._forward(self._model, ids, torch.from_numpy(sequence.positions))
        logits = (out.logits if hasattr(out, "logits") else out).double().reshape(len(ids), -1)
        scaled = (logits / torch.from_numpy(sequence.temperatures)[:, None].roll(-shift, 0)).log_softmax(-1)
        filler = scaled.new_full((min(shift, len(ids)),), -math.log(scaled.shape[-1]))
        kept = max(len(ids) - shift, 0)
        own = scaled[:kept].gather(1, ids[shift:, None])[:, 0]
        entropy = -(scaled[:kept].exp() * scaled[:kept]).sum(-1)
        return torch.cat([filler, own]), torch.cat([-filler, entropy])


def _forward_of(model: Any) -> Forward:
    """Return the usual call for a model: with position_ids if it takes them, with a batch dimension of one."""
    takes = inspect.signature(model.forward).parameters

    def forward(model: Any, token_ids: Any, position_ids: Any) -> Any:
        extra = {"use_cache": False} if "use_cache" in takes else {}
        if "position_ids" in takes:
            return model(token_ids[None], position_ids=position_ids[None], **extra)
        return model(token_ids[None], **extra)

    return forward


def matched(given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], ordered: bool) -> dict[str, str]:
    """Return the model's name of each gradient that a step function returned, by name or by order."""
    if ordered:
        if len(given) != len(shapes):
            raise InvalidInput(f"step_fn: {len(given)} gradients for {len(shapes)} parameters; return them by name")
        return dict(zip(given, shapes, strict=True))
    found = {name: _plain(name) for name in given}
    models = {_plain(name): name for name in shapes}
    for name, plain in found.items():
        if plain not in models:
            known = ", ".join(list(shapes)[:4])
            raise InvalidInput(f"step_fn: gradient of {name!r}, but the model has {known}, ...; use the model's names")
    return {name: models[plain] for name, plain in found.items()}


def _plain(name: str) -> str:
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


def listed(values: Sequence[float] | Vector) -> str:
    return ", ".join(f"{value:.3g}" for value in values)

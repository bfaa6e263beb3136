"""The configuration of a run: one TOML file with every setting and its description.

It combines the settings of a plane with those of the trainer. `template` writes the file and `load` reads it. Both use
the records below, so the file cannot lack a setting or describe one that does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock import config
from penstock.config import Checked, Given
from penstock.errors import ConfigError
from penstock.packing import PackedImages, Packing
from penstock.plane import PackingSection, PlaneSettings, ReplaySection, StepTarget, Target, TimeoutsSection
from penstock.protocol import Timeouts
from penstock.replay import Replay
from penstock.transport import check_url

_HINT = "write one with `penstock demo --write-config FILE`"
_TITLE = """\
A run. Start it, or go on with it:  penstock train FILE
Every key may be left out. An unknown name is an error. "none" switches off what may be off.
"""

PACKED_IMAGES = PackedImages(explicit_boundaries=True, varlen_attention=True)
"""Declared by the reference trainer: it cuts attention and positions at `sequence_lengths`, images included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Checked):
    """The policy: a Hugging Face causal language model."""

    path: Annotated[str, Meta(description="folder with config.json and weights; empty: build from `config`")] = ""
    family: Annotated[str, Meta(description="model_type of a model built from scratch")] = "qwen3"
    config: Annotated[dict[str, Any], Meta(description="its configuration, as in config.json")] = field(
        default_factory=dict
    )
    image_processor: Annotated[
        dict[str, Any],
        Meta(description="vision: patch layout, as in preprocessor_config.json; read from `path` if there"),
    ] = field(default_factory=dict)
    never_sampled: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="ids the sampler never emits, such as image placeholders: left out of the logits"),
    ] = ()
    sharding: Annotated[
        Literal["ddp", "fsdp"], Meta(description="ddp: every rank holds all weights; fsdp: each holds a part (FSDP2)")
    ] = "ddp"


def image_processor(config: ModelConfig) -> dict[str, Any]:
    """Return the patch layout that images of a vision model need; raise ConfigError if there is none."""
    path = Path(config.path) / "preprocessor_config.json"
    found = config.image_processor or (json.loads(path.read_text()) if config.path and path.is_file() else {})
    if not found:
        raise ConfigError("model.image_processor: not given, and no preprocessor_config.json; images need a layout")
    return dict(found)


def is_vision(config: ModelConfig) -> bool:
    """Return whether a configuration is that of a vision model, without building it."""
    path = Path(config.path) / "config.json"
    found = json.loads(path.read_text()) if config.path and path.is_file() else config.config
    return "vision_config" in found


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig(Checked):
    """Where a vision model's images are, and what happens to samples whose image is lost."""

    folder: Annotated[str, Meta(description="folder of the asset store; empty: `assets` in the run's folder")] = ""
    run: Annotated[str, Meta(description="run under which producers store images: `AssetStore(folder, run=...)`")] = (
        "local"
    )
    max_masked: Annotated[
        float | None,
        Meta(
            ge=0.01, lt=1, description="share of samples that may lose their image and are masked; none: the step fails"
        ),
    ] = None


Beta = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Checked):
    """AdamW."""

    lr: Annotated[float, Meta(gt=0, description="learning rate")] = 1e-3
    betas: Annotated[tuple[Beta, Beta], Meta(description="AdamW's moments")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's weight decay")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients are scaled down to this norm")] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig(Checked):
    """What is minimized; every term is divided by the global count of its tokens."""

    kind: Annotated[Literal["dppo", "grpo", "ipo"], Meta(description="policy-gradient loss of rl samples")] = "grpo"
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="grpo: ratio is clipped at 1 - clip_low")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="grpo: ratio is clipped at 1 + clip_high")] = 0.28
    threshold: Annotated[
        float, Meta(gt=0, description="dppo, ipo: probability change beyond which a token is masked")
    ] = 0.2
    kl_weight: Annotated[float, Meta(ge=0, description="dppo: weight of the squared log-ratio")] = 1e-3
    entropy_bonus: Annotated[float, Meta(ge=0, description="weight of the entropy of the policy, a bonus")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig(Checked):
    """Synthetic micro-batches, to measure a trainer without rollouts."""

    batch_size: Annotated[int, Meta(ge=1, description="samples per micro-batch")] = 8
    micro_batches: Annotated[int, Meta(ge=1, description="micro-batches per step and rank")] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(Checked):
    """What is generated, and by whom. Leave the section out to train on what other producers put."""

    name: Annotated[
        Literal["reverse", "color"], Meta(description="reverse letters, or name the colour in an image")
    ] = "reverse"
    letters: Annotated[int, Meta(ge=1, le=8, description="reverse: length of the word")] = 3
    preamble: Annotated[int, Meta(ge=0, description="tokens before every prompt, the same in all of them")] = 0
    group_size: Annotated[int, Meta(ge=2, description="rollouts per prompt")] = 8
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="sample from the likeliest tokens that together reach this probability")
    ] = 1.0
    workers: Annotated[int, Meta(ge=1, description="rollout processes")] = 2
    prompts_per_batch: Annotated[int, Meta(ge=1, description="prompts a worker generates at once")] = 16
    dynamic_sampling: Annotated[
        bool,
        Meta(description="drop groups whose rewards are all the same, and generate more until the step is full"),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(PlaneSettings):
    """A run: its plane and its trainer. Every key may be left out."""

    packing: PackingSection = field(default_factory=lambda: Packing(ranks=2, seq_len=64, packed_images=PACKED_IMAGES))
    target: StepTarget = field(default_factory=lambda: Target(groups=32))
    replay: ReplaySection = field(default_factory=lambda: Replay(capacity=64, max_staleness=8))
    timeouts: TimeoutsSection = field(
        default_factory=lambda: Timeouts(heartbeat_s=1.0, peer_s=8.0, plane_s=60.0, resend_s=0.5)
    )
    run: Annotated[
        str,
        Meta(
            max_length=64,
            pattern="^[A-Za-z0-9_.-]+$",
            description="name of the run",
            extra={"form": "1 to 64 letters, digits and _.-"},
        ),
    ] = "demo"
    folder: Annotated[str, Meta(description="where everything of the run is kept; empty: runs/RUN")] = ""
    plane: Annotated[
        str, Meta(description="address of a plane that runs already, such as ray://demo; empty: the run starts its own")
    ] = ""
    max_steps: Annotated[int, Meta(ge=1, description="optimizer steps")] = 300
    target_reward: Annotated[
        float | None, Meta(description="stop when the mean of ten steps reaches this; none: train all steps")
    ] = None
    seed: Annotated[int, Meta(ge=0, description="of weights, prompts and sampling")] = 0
    checkpoint_every: Annotated[int, Meta(ge=1, description="steps between checkpoints")] = 10
    export_every: Annotated[int, Meta(ge=0, description="token export of every n-th step; 0: none")] = 10
    metrics: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Meta(description="also write metrics there; metrics.jsonl is always written"),
    ] = ()
    prometheus: Annotated[
        str, Meta(description="127.0.0.1:PORT of a page with the last step's metrics for Prometheus; empty: none")
    ] = ""
    model: Annotated[ModelConfig, Meta(description="the policy: a Hugging Face causal language model")] = field(
        default_factory=ModelConfig
    )
    images: Annotated[ImagesConfig, Meta(description="vision: where images are, and what to do without one")] = field(
        default_factory=ImagesConfig
    )
    optimizer: Annotated[OptimizerConfig, Meta(description="AdamW")] = field(default_factory=OptimizerConfig)
    loss: Annotated[
        LossConfig, Meta(description="what is minimized; every term is divided by the global count of its tokens")
    ] = field(default_factory=LossConfig)
    fake: Annotated[
        FakeConfig | None,
        Meta(description="synthetic micro-batches instead of rollouts, to time a trainer; leave it out to train"),
    ] = None
    task: Annotated[
        TaskConfig | None,
        Meta(description="what is generated, and by whom; leave it out to train on what other producers put"),
    ] = None

    @property
    def ranks(self) -> int:
        """Trainer processes."""
        return self.packing.ranks

    def __post_init__(self) -> None:
        PlaneSettings.__post_init__(self)
        if self.fake is not None and self.packing.micro_batch_max_tokens is not None:
            raise ConfigError(
                "packing.micro_batch_max_tokens together with fake: fake data has a fixed batch_size; remove one"
            )
        if self.replicas != 1:
            raise ConfigError(f"replicas: {self.replicas}; this trainer has one process per rank; leave it out")
        for url in self.listen:
            if url.startswith("tcp://"):
                check_url(url, secured=self.keys is not None)


def load(path: str | Path, assignments: Iterable[str] = ()) -> TrainConfig:
    """Read the configuration from a TOML file and apply assignments such as "packing.ranks=4"."""
    given = Given.read(path, hint=_HINT)
    for text in assignments:
        given.assign(text)
    return config.build(TrainConfig, given)


def template(run: TrainConfig) -> str:
    """Return a TOML file with every setting below its description."""
    return config.template(run, title=_TITLE, all_values=True)

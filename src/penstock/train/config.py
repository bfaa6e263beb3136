"""The configuration of a run: one TOML file in which every knob is written down, with what it means.

`template` writes the file, `load` reads it; both come from the records below, so the file cannot lack a knob or
describe one that does not exist. Unknown keys and wrong values are errors that name the key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from penstock.errors import ConfigError
from penstock.send.sockets import check_url


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelConfig(_Section, frozen=True):
    """The policy: a Hugging Face causal language model."""

    path: Annotated[str, Meta(description="folder with config.json and weights; empty: build from `config`")] = ""
    family: Annotated[str, Meta(description="model_type of a model built from scratch")] = "qwen3"
    config: Annotated[dict[str, Any], Meta(description="its configuration, as in config.json")] = {}
    image_processor: Annotated[
        dict[str, Any],
        Meta(description="vision: patch layout, as in preprocessor_config.json; read from `path` if there"),
    ] = {}
    never_sampled: Annotated[
        list[int], Meta(description="ids the sampler never emits, such as image placeholders: left out of the logits")
    ] = []
    sharding: Annotated[
        Literal["ddp", "fsdp"], Meta(description="ddp: every rank holds all weights; fsdp: each holds a part (FSDP2)")
    ] = "ddp"


class OptimizerConfig(_Section, frozen=True):
    """AdamW."""

    lr: Annotated[float, Meta(gt=0, description="learning rate")] = 1e-3
    betas: Annotated[tuple[float, float], Meta(description="AdamW's moments")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW's weight decay")] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, description="gradients are scaled down to this norm")] = 1.0


class LossConfig(_Section, frozen=True):
    """What is minimized; every term is divided by the global count of its tokens."""

    kind: Annotated[Literal["dppo", "grpo", "ipo"], Meta(description="policy-gradient loss of rl samples")] = "grpo"
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="grpo: ratio is clipped at 1 - clip_low")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="grpo: ratio is clipped at 1 + clip_high")] = 0.28
    threshold: Annotated[
        float, Meta(gt=0, description="dppo, ipo: probability change beyond which a token is masked")
    ] = 0.2
    kl_weight: Annotated[float, Meta(ge=0, description="dppo: weight of the squared log-ratio")] = 1e-3
    entropy_bonus: Annotated[float, Meta(ge=0, description="weight of the entropy of the policy")] = 0.01


class DataConfig(_Section, frozen=True):
    """What a step is, and how it is packed."""

    groups_per_step: Annotated[int, Meta(ge=1, description="prompt groups in one optimizer step")] = 32
    seq_len: Annotated[int, Meta(ge=1, description="samples are cut to this many tokens")] = 64
    micro_batch_max_tokens: Annotated[
        int | None, Meta(description="cap of a micro-batch in tokens; left out: seq_len")
    ] = None
    long_rows: Annotated[bool, Meta(description="allow micro_batch_max_tokens above seq_len")] = False
    pad_to_multiple_of: Annotated[int, Meta(ge=1, description="micro-batches are padded to a multiple of this")] = 1
    fake: Annotated[
        FakeConfig | None,
        Meta(description="[data.fake]: synthetic micro-batches instead of rollouts, to time a trainer"),
    ] = None


class FakeConfig(_Section, frozen=True):
    """Synthetic micro-batches, to measure a trainer without rollouts."""

    batch_size: Annotated[int, Meta(ge=1, description="samples per micro-batch")] = 8
    micro_batches: Annotated[int, Meta(ge=1, description="micro-batches per step and rank")] = 2


class ReplayConfig(_Section, frozen=True):
    """How groups wait between generation and training."""

    sampler: Annotated[
        Literal["fifo", "uniform", "prioritized"], Meta(description="fifo: each group once, in order; the others reuse")
    ] = "fifo"
    capacity_steps: Annotated[float, Meta(gt=0, description="groups held at most, in steps")] = 2.0
    max_times_sampled: Annotated[int, Meta(ge=1, description="uses of a group; above 1 only with reuse")] = 1
    max_staleness: Annotated[int, Meta(ge=0, description="policy versions behind, beyond which a group is dropped")] = 8
    exponent: Annotated[float, Meta(ge=0, description="prioritized: power of the priority")] = 0.6


class TaskConfig(_Section, frozen=True):
    """What is generated, and by whom. Leave the section out to train on what other producers put."""

    name: Annotated[
        Literal["reverse", "color"], Meta(description="reverse letters, or name the colour in an image")
    ] = "reverse"
    letters: Annotated[int, Meta(ge=1, le=8, description="reverse: length of the word")] = 3
    group_size: Annotated[int, Meta(ge=2, description="rollouts per prompt")] = 8
    workers: Annotated[int, Meta(ge=1, description="rollout processes")] = 2
    prompts_per_batch: Annotated[int, Meta(ge=1, description="prompts a worker generates at once")] = 16


class TrainConfig(_Section, frozen=True):
    """A run. Every key may be left out; what stands here are the defaults."""

    run: Annotated[
        str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$", description="name of the run")
    ] = "demo"
    folder: Annotated[str, Meta(description="where everything of the run is kept; empty: runs/<run>")] = ""
    ranks: Annotated[int, Meta(ge=1, description="trainer processes")] = 2
    max_steps: Annotated[int, Meta(ge=1, description="optimizer steps")] = 300
    target_reward: Annotated[
        float | None, Meta(description="stop when the mean of ten steps reaches this; left out: train all steps")
    ] = None
    seed: Annotated[int, Meta(ge=0, description="of weights, prompts and sampling")] = 0
    checkpoint_every: Annotated[int, Meta(ge=1, description="steps between checkpoints")] = 10
    export_every: Annotated[int, Meta(ge=0, description="token export of every n-th step; 0: none")] = 10
    listen: Annotated[
        str,
        Meta(description="also take groups at this address, tcp://HOST:PORT or ipc://PATH; empty: from [task] only"),
    ] = ""
    keys: Annotated[
        str, Meta(description="key folder made by `penstock keys`; needed where other hosts can reach `listen`")
    ] = ""
    metrics: Annotated[
        list[Literal["tensorboard", "wandb"]],
        Meta(description="also write metrics there; metrics.jsonl is always written"),
    ] = []
    prometheus: Annotated[
        str, Meta(description="127.0.0.1:PORT of a page with the last step's metrics for Prometheus; empty: none")
    ] = ""
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    replay: ReplayConfig = ReplayConfig()
    task: TaskConfig | None = None

    def __post_init__(self) -> None:
        if self.data.fake is not None and self.data.micro_batch_max_tokens is not None:
            raise ConfigError(
                "data.micro_batch_max_tokens together with data.fake: fake data has a fixed batch_size; remove one"
            )
        if self.replay.sampler == "fifo" and self.replay.max_times_sampled > 1:
            raise ConfigError("replay.max_times_sampled above 1 with sampler 'fifo': a queue gives each group once")
        if self.listen.startswith("tcp://"):
            check_url(self.listen, secured=bool(self.keys))
        cap = self.data.micro_batch_max_tokens
        if cap is not None and cap > self.data.seq_len and not self.data.long_rows:
            raise ConfigError(
                f"data.micro_batch_max_tokens: {cap} with data.seq_len {self.data.seq_len}; lower it, or set "
                "data.long_rows = true"
            )


def load(path: str | Path) -> TrainConfig:
    """The configuration in a TOML file."""
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse(found, str(path))


def parse(found: dict[str, Any], where: str) -> TrainConfig:
    try:
        return msgspec.convert(found, TrainConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {str(error).replace('`$.', '`').replace('Object', 'the section')}") from None


def template(config: TrainConfig) -> str:
    """A TOML file with every knob, its meaning above it."""
    return "\n".join(_section(config, "")).strip() + "\n"


def _section(record: msgspec.Struct, name: str) -> list[str]:
    lines = [f"# {line}" for line in (type(record).__doc__ or "").splitlines()[:1]]
    if name:
        lines = ["", f"[{name}]", *lines]
    below: list[str] = []
    hints = get_type_hints(type(record), include_extras=True)
    for field in msgspec.structs.fields(record):
        value, note = getattr(record, field.name), _note(hints[field.name])
        path = f"{name}.{field.name}" if name else field.name
        if isinstance(value, msgspec.Struct):
            below += _section(value, path)
        elif isinstance(value, dict):
            below += ["", f"[{path}]", f"# {note}", *(f"{k} = {_toml(v)}" for k, v in value.items())]
        elif value is None:
            lines += [f"# {note}", f"# {field.name} ="] if note else []
        else:
            lines += [f"# {note}", f"{field.name} = {_toml(value)}"]
    return lines + below


def _note(hint: Any) -> str:
    if get_origin(hint) is not Annotated:
        return ""
    inner, *metas = get_args(hint)
    choices = [repr(c) for c in get_args(inner)] if get_origin(inner) is Literal else []
    text = next((m.description for m in metas if isinstance(m, Meta) and m.description), "")
    return text + (f" ({', '.join(choices)})" if choices else "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return repr(value)

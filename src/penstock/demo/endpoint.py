"""A tiny CPU inference server for first steps and tests, with the OpenAI-compatible routes that RL needs.

    GET  /v1/models                 the model, its longest context, and the `policy_version` of its weights
    POST /v1/chat/completions       messages in; text, token ids and log-probabilities out, in vLLM's format
    POST /inference/v1/generate     token ids in; token ids and log-probabilities out, in vLLM's format
    GET  /health

Waiting requests whose prompts have the same length are sampled as one batch. With a weights folder, the newest weights
are loaded before each batch. It has no tools, no streaming and no images: use vLLM for those.

`save_model` writes a model to serve, with a tokenizer and a chat template:

    letters    the demo's text model, which knows a to h        <bos>cab=bac<eos>
    bytes      reads and writes any text, in the format of Qwen3 with tools; it knows nothing, and has a long context
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.demo.tasks import PAD, REVERSE, model_of
from penstock.errors import ConfigError, InvalidInput
from penstock.extras import require
from penstock.server import HttpServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from penstock.demo.roles import Rollout
    from penstock.train import Weights

_MOST_TOKENS = 64
"""Default length limit of a completion."""
_MOST_PROMPTS = 64
"""Per batch."""
_LONG = 32_768
"""Longest context of the `bytes` model: the first prompt of a stock harness with tools has some thousand bytes."""
Kind = Literal["letters", "bytes"]
_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={{ m['content'] }}<eos>"
    "{% else %}<bos>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
_QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Sampling parameters of a request."""

    max_tokens: int
    stop: int
    temperature: float
    top_p: float


@dataclass(slots=True)
class _Asked:
    prompt: list[int]
    wanted: Wanted
    answer: asyncio.Future[Rollout]


class Engine:
    """Continues prompts with a Hugging Face model and the newest published weights."""

    def __init__(self, folder: str | Path, *, weights: str | Path | None = None, seed: int = 0) -> None:
        import torch
        import transformers

        from penstock.train import Weights

        path = Path(folder).resolve()
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{folder}: no config.json; give a model's folder, or make one with "
                "`penstock rollouts endpoint MODEL --write-model`"
            )
        self.name = str(path)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.longest = int(self.model.config.max_position_embeddings)
        self.version = 0
        self._weights: Weights | None = None if weights is None else Weights(weights)
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()

    def update(self, state: dict[str, Any], version: int) -> None:
        """Load weights. Waits for the batch that is being sampled."""
        with self._lock:
            self.model.load_state_dict(state, strict=False)
            self.version = version

    def refresh(self) -> None:
        """Load the newest weights that were published."""
        newest = -1 if self._weights is None else self._weights.latest()
        if newest < 0 or newest == self.version or self._weights is None:
            return
        state = self._weights.load(newest)
        if state is not None:
            self.update(state, newest)

    def continue_(self, prompts: list[list[int]], wanted: Wanted) -> list[Rollout]:
        """Sample one completion per prompt. Prompts must have one length."""
        from penstock.demo.roles import sample

        self.refresh()
        with self._lock:
            return sample(
                self.model,
                prompts,
                max_new_tokens=min(wanted.max_tokens, self.longest - len(prompts[0])),
                eos=wanted.stop,
                generator=self._generator,
                temperature=wanted.temperature,
                top_p=wanted.top_p,
            )


@dataclass(slots=True)
class Batcher:
    """Collects requests while the model is busy, then samples those that fit into one batch."""

    engine: Engine
    _waiting: list[_Asked] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, prompt: list[int], wanted: Wanted) -> Rollout:
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(prompt, wanted, answer))
        self._wake.set()
        return await answer

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            first = self._waiting[0]
            together = [a for a in self._waiting if len(a.prompt) == len(first.prompt) and a.wanted == first.wanted]
            batch = together[:_MOST_PROMPTS]
            self._waiting = [asked for asked in self._waiting if asked not in batch]
            if not self._waiting:
                self._wake.clear()
            try:
                found = await asyncio.to_thread(self.engine.continue_, [asked.prompt for asked in batch], first.wanted)
            except Exception as error:  # noqa: BLE001 - reported to the clients
                for asked in batch:
                    if not asked.answer.done():
                        asked.answer.set_exception(error)
                continue
            for asked, rollout in zip(batch, found, strict=True):
                if not asked.answer.done():
                    asked.answer.set_result(rollout)


def make_app(engine: Engine) -> Any:
    """Build the Starlette application."""
    require("penstock rollouts endpoint", "starlette", "uvicorn")
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    batcher = Batcher(engine)

    async def models(_request: Request) -> Response:
        card = {"id": engine.name, "object": "model", "max_model_len": engine.longest}
        return JSONResponse({"object": "list", "data": [{**card, "policy_version": engine.version}]})

    async def generate(request: Request) -> Response:
        body = await request.json()
        params = body.get("sampling_params") or {}
        prompt = _prompt_of(body.get("token_ids"), engine)
        choice = _choice(await batcher.ask(prompt, _wanted(params, engine)))
        return JSONResponse({"request_id": uuid.uuid4().hex, "choices": [choice]})

    async def chat(request: Request) -> Response:
        body = await request.json()
        messages = body.get("messages") or []
        ids = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompt = _prompt_of(list(ids), engine)
        choice = _choice(await batcher.ask(prompt, _wanted(body, engine)))
        text = engine.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        return JSONResponse(_completion(engine, prompt, choice, text))

    async def health(_request: Request) -> Response:
        return JSONResponse({})

    async def refused(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error), "type": type(error).__name__}}, status_code=400)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        working = asyncio.create_task(batcher.run())
        yield
        working.cancel()

    routes = [Route("/v1/models", models), Route("/health", health)]
    routes += [Route("/inference/v1/generate", generate, methods=["POST"])]
    routes += [Route("/v1/chat/completions", chat, methods=["POST"])]
    # A client that disconnected gets no response; the handler only keeps its exception out of the log.
    errors = {InvalidInput: refused, ValueError: refused, ClientDisconnect: refused}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=errors)


def _prompt_of(ids: Any, engine: Engine) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise InvalidInput(f"token_ids: {ids!r:.60}; must be a list of token ids, at least one")
    if len(ids) >= engine.longest:
        raise InvalidInput(f"the prompt has {len(ids)} tokens; this model takes at most {engine.longest - 1}")
    vocabulary = engine.model.config.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise InvalidInput(f"token_ids: from {min(ids)} to {max(ids)}; this model has {vocabulary}")
    return ids


def _wanted(params: dict[str, Any], engine: Engine) -> Wanted:
    given = {name: params[name] for name in ("temperature", "top_p") if params.get(name) is not None}
    stops = params.get("stop_token_ids") or [engine.tokenizer.eos_token_id]
    wanted = Wanted(
        max_tokens=int(params.get("max_tokens") or params.get("max_completion_tokens") or _MOST_TOKENS),
        stop=int(stops[0]),
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
    )
    if not (wanted.temperature > 0 and 0 < wanted.top_p <= 1 and wanted.max_tokens > 0):
        raise InvalidInput(f"{wanted}: temperature and max_tokens must be above 0, top_p above 0 and at most 1")
    return wanted


def _choice(rollout: Rollout) -> dict[str, Any]:
    logprobs = zip(rollout.token_ids, rollout.logprobs, strict=True)
    found = {
        "index": 0,
        "token_ids": rollout.token_ids,
        "finish_reason": "stop" if rollout.finished else "length",
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in logprobs]},
    }
    return found if rollout.kept is None else {**found, "sampling_mask": rollout.kept}


def _completion(engine: Engine, prompt: list[int], choice: dict[str, Any], text: str) -> dict[str, Any]:
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(choice["token_ids"])}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": engine.name,
        "prompt_token_ids": prompt,
        "choices": [{**choice, "message": {"role": "assistant", "content": text}}],
        "usage": {**counts, "total_tokens": sum(counts.values())},
    }


class Endpoint:
    """The server in a thread of this process, on a free port unless one is given.

    with Endpoint(Engine("tiny")) as endpoint:
        print(endpoint.url)  # http://127.0.0.1:43123/v1
    """

    def __init__(self, engine: Engine, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine = engine
        # Idle connections stay open: closing one that a client is about to reuse would lose the request.
        options: dict[str, Any] = {"lifespan": "auto", "timeout_keep_alive": 3600}
        self._server = HttpServer(make_app(engine), host, port, setting="--port", extra="http", **options)
        self.url = f"{self._server.url}/v1"

    def serve(self, ready: Callable[[str], None]) -> None:
        """Serve in this thread until SIGTERM or Ctrl-C, which is raised again."""
        ready(self.url)
        self._server.run()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()


# ------------------------------------------------------------------ a model to serve


def save_model(folder: str | Path, *, kind: Kind = "letters", seed: int = 0) -> Path:
    """Write a tiny model with fresh weights, and its tokenizer. Leaves a folder with a model unchanged."""
    from penstock.train import ModelConfig, build_model

    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path}: has files, but no config.json; give a new folder, or that of a model")
    path.mkdir(parents=True, exist_ok=True)
    made = tokenizer() if kind == "letters" else byte_tokenizer()
    made.save_pretrained(path)
    config = model_of("reverse")
    if kind == "bytes":
        sizes = {"vocab_size": len(made), "max_position_embeddings": _LONG, "eos_token_id": made.eos_token_id}
        config = ModelConfig(family=config.family, config={**config.config, **sizes})
    model = build_model(config, seed=seed)
    # After the tokenizer: config.json marks a complete folder, and this writes it.
    model.save_pretrained(path)
    return path


def tokenizer() -> Any:
    """Build a tokenizer with one token per letter a to h. Other characters become <pad>."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(REVERSE)}
    letters = Tokenizer(WordLevel(ids, unk_token=REVERSE[PAD]))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    made = PreTrainedTokenizerFast(tokenizer_object=letters, **named)
    made.chat_template = _TEMPLATE
    return made


def byte_tokenizer() -> Any:
    """Build a tokenizer with one token per byte, and the special tokens of Qwen3."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    # ByteLevel writes each byte as one printable character. Without merges, each of them is a token.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=found, **named)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(list(_QWEN_TOKENS))
    made.chat_template = _QWEN_TEMPLATE
    return made

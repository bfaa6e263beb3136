"""Runs TRL's asynchronous trainer and its rollout worker on a machine without a GPU and without vLLM.

    with VllmStandIn() as server, trl_on_cpu():
        worker = AsyncRolloutWorker(..., vllm_server_url=server.url)
        trainer = AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=NoTransfer())

For tests and first steps. TRL's attention over trees is a GPU kernel, replaced here by a loop over segments in plain
torch. TRL asks CUDA for its peak speed, which is unknown here, and asks whether vLLM is installed, although its worker
only speaks HTTP to it. Nothing else is changed.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class NoTransfer:
    """A weight transfer for TRL that sends nothing: the stand-in for vLLM has no weights."""

    def __init__(self) -> None:
        self.sent = 0
        """How often weights would have been sent."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.sent += 1
        for _ in iterator:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class VllmStandIn:
    """An HTTP server that answers vLLM's `/v1/completions` with random bytes, and lists what it was asked for.

    Ids are those of `byte_model`. A prompt that offers the tool `add` and has no answer of a tool yet is answered with
    a call of it half of the time.
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.asked: list[tuple[float, tuple[int, ...]]] = []
        """When (`time.monotonic()`) each completion was asked for, and the prompt's ids."""
        self.answered: list[tuple[float, tuple[int, ...]]] = []
        handler = type("Handler", (_Completions,), {"stand_in": self, "delay_s": delay_s})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # a client that was killed


class _Completions(BaseHTTPRequestHandler):
    stand_in: VllmStandIn
    delay_s: float
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stand_in.asked.append((time.monotonic(), tuple(asked["prompt"])))
        time.sleep(self.delay_s)
        rng = random.Random(asked["seed"])  # noqa: S311 - no secret
        ids = _answer(asked["prompt"], rng)[: asked["max_tokens"]]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-5.0 - rng.random() for _ in ids]}}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)
        self.stand_in.answered.append((time.monotonic(), tuple(asked["prompt"])))

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the base class's name


_CALL = b'<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _answer(prompt: list[int], rng: random.Random) -> list[int]:
    text = bytes(i for i in prompt if i < 256)
    if b'"name": "add"' in text and b"<tool_response>" not in text and rng.random() < 0.5:
        said = _CALL % (rng.randrange(10), rng.randrange(10))
    else:
        said = bytes(rng.choice(b"abcdefghij ") for _ in range(rng.randint(1, 12)))
    return [*said, 256 + _SPECIAL.index("<|im_end|>")]


def byte_model(folder: str | Path) -> Path:
    """Save a tiny Qwen3 with random weights, and a tokenizer whose ids are bytes with Qwen3's chat template."""
    import torch
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = Tokenizer(BPE({letter: byte for byte, letter in bytes_to_unicode().items()}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0])
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    eos = tokenizer.eos_token_id
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=eos, **sizes, **heads))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


@contextmanager
def trl_on_cpu() -> Iterator[None]:
    """Make trainers and rollout workers created in the block work without a GPU and without vLLM."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    speed, installed = async_grpo_trainer.get_peak_flops_per_device, async_rollout_worker.is_vllm_available
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    async_rollout_worker.is_vllm_available = lambda: True
    try:
        yield
    finally:
        async_grpo_trainer.get_peak_flops_per_device = speed
        async_rollout_worker.is_vllm_available = installed
    AttentionInterface.register(TREE_ATTENTION, path_attention)


def path_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    _mask: Any,
    *,
    tree_kv_index: Any,
    tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attention over a tree: [1, heads, tokens, size] in, [1, tokens, heads, size] out. Each segment sees its path from
    the root."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    grouped, parts = getattr(module, "num_key_value_groups", 1) > 1, []
    starts, ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        path = tree_kv_index[ends[i] : ends[i + 1]]
        own, seen = starts[i + 1] - starts[i], len(path)
        # Own tokens are the last ones of the path. With 2 own of 5 seen the first sees 4 and the second 5: tril(3).
        mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        q, k, v = query[:, :, starts[i] : starts[i + 1]], key[:, :, path], value[:, :, path]
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None

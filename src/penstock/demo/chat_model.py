"""The demo's text model as a Hugging Face folder, with a tokenizer and a chat template: something to chat with.

    user        <bos>cab
    assistant   =bac<eos>

The words are letters a to h; whatever else is written becomes <pad>.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.demo import reverse
from penstock.demo.tasks import model_of
from penstock.errors import ConfigError
from penstock.train import build_model

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={{ m['content'] }}<eos>"
    "{% else %}<bos>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def save_model(folder: str | Path, *, seed: int = 0) -> Path:
    """Write the model, with fresh weights, and its tokenizer; a folder that has a model is left as it is."""
    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path}: has files, but no config.json; give a new folder, or that of a model")
    path.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(path)
    model = build_model(model_of("reverse"), seed=seed)
    model.save_pretrained(path)  # config.json among the last
    return path


def tokenizer() -> Any:
    """One token per letter."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(reverse.TOKENS)}
    letters = Tokenizer(WordLevel(ids, unk_token=reverse.TOKENS[reverse.PAD]))
    letters.pre_tokenizer = Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    made = PreTrainedTokenizerFast(tokenizer_object=letters, **named)
    made.chat_template = TEMPLATE
    return made

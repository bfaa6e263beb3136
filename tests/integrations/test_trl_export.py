"""TRL's synchronous GRPOTrainer exports what it did with every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from penstock.integrations.trainers.trl_export import ExportTokens
from penstock.testing.trl_cpu import byte_model
from penstock.view import Export

pytestmark = pytest.mark.process


def score(ids: list[int]) -> float | None:
    """A number that tells answers apart. Some are not scored."""
    return float(sum(ids) % 97) if ids[0] % 4 else None


def scores(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [score(ids) for ids in completion_ids]


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.filterwarnings("default")  # TRL's own
def test_every_token_is_exported_with_its_reward_advantage_and_logprobs(tmp_path: Path, loss_type: str) -> None:
    torch.set_num_threads(1)
    seen: list[dict[str, Any]] = []

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            seen.append({name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)})
            return super().compute_loss(model, inputs, *args, **more)

    args = GRPOConfig(
        str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=8,
        loss_type=loss_type,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Watched(
        str(byte_model(tmp_path / "model")),
        reward_funcs=scores,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["ab", "a long one", "c", "dd"]}),
    )
    trainer.add_callback(ExportTokens(trainer, tmp_path / "tokens"))
    trainer.train()
    for step in (1, 2):
        records = list(Export(tmp_path / "tokens").step(step).records())
        batches = seen[2 * step - 2 : 2 * step]
        rows = [{name: v[i] for name, v in batch.items() if v.ndim} for batch in batches for i in range(4)]
        assert len(records) == len(rows) == 8
        assert {record.fields["sample_id"].count("/") for record in records} == {1}
        expected = sorted(_tokens(row) for row in rows)
        assert sorted(record.columns["token_ids"].tolist() for record in records) == expected
        for record in records:
            trained = record.columns["loss_mask"]
            (row, *_) = [row for row in rows if _tokens(row) == record.columns["token_ids"].tolist()]
            assert trained.sum() == row["completion_mask"].sum()
            wanted = score(row["completion_ids"][row["completion_mask"].bool()].tolist())
            found = record.columns["rewards"][-1] if "rewards" in record.columns else np.nan
            np.testing.assert_equal(found, np.nan if wanted is None else wanted)
            np.testing.assert_allclose(record.columns["advantages"][trained], float(row["advantages"]), rtol=1e-6)
            assert ("loss" in record.columns) == (loss_type == "dapo")  # TRL keeps others to itself
            assert np.isfinite(record.columns["trainer_logprobs"][trained]).all()
            assert np.isfinite(record.columns["entropy"][trained]).all()


def _tokens(row: dict[str, Any]) -> list[int]:
    prompt, own = row["prompt_ids"][row["prompt_mask"].bool()], row["completion_ids"][row["completion_mask"].bool()]
    found: list[int] = [*prompt.tolist(), *own.tolist()]
    return found

"""A pytest plugin that runs tinker-cookbook's own tests of datums on what Penstock makes of them: samples, and back.

    git clone https://github.com/thinking-machines-lab/tinker-cookbook && cd tinker-cookbook
    pytest -p tests.upstream.their_datums tinker_cookbook/rl/multiturn_weight_assignment_test.py \
        tinker_cookbook/supervised/common_test.py

with Penstock's clone on PYTHONPATH. Their tests are not changed: the two functions that make datums return those of
`to_datums(from_datums(...))`, with the cookbook's `mask`, which it removes before a request, beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.integrations.formats.tinker_datums import CROSS_ENTROPY, from_datums, to_datums

_MAKERS = ("trajectory_to_data", "datum_from_model_input_weights")


def _again(datum: Any) -> Any:
    from tinker import Datum, TensorData

    [sample] = from_datums([datum])
    is_sft = "weights" in datum.loss_fn_inputs
    [made] = to_datums([sample], loss_fn=CROSS_ENTROPY if is_sft else "importance_sampling").datums
    if not is_sft:
        mask = TensorData.from_numpy(sample.loss_mask[1:].astype(np.float32))
        made = Datum(model_input=made.model_input, loss_fn_inputs={**made.loss_fn_inputs, "mask": mask})
    assert set(made.loss_fn_inputs) == set(datum.loss_fn_inputs)
    return made


def _through(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **keywords: Any) -> Any:
        found = make(*args, **keywords)
        return [_again(datum) for datum in found] if isinstance(found, list) else _again(found)

    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for name in set(_MAKERS) & set(vars(module)):
            setattr(module, name, _through(getattr(module, name)))

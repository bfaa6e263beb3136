"""The example programs: they learn, survive a kill, and are the ones that the docs show."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.run_doc_blocks import blocks

pytestmark = pytest.mark.process

grpo: Any = importlib.import_module("examples.grpo")
ROOT = Path(__file__).parent.parent
STEPS = 13
"""The last checkpoint before a kill at step 12 is that of step 10, so steps are taken again."""


def test_the_example_killed_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        sys.executable,
        "-u",
        str(ROOT / "examples" / "grpo.py"),
        str(tmp_path / "killed"),
        "--steps",
        f"{STEPS}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        seen = next(line for line in process.stdout if line.startswith("step 12 "))
        process.send_signal(signal.SIGKILL)
    torch.set_num_threads(1)
    grpo.main(tmp_path / "killed", grpo.load(None), STEPS)
    resumed = capsys.readouterr().out
    assert re.findall(r"step (\d+)", resumed) == ["11", "12", "13"]
    assert seen in resumed
    grpo.main(tmp_path / "calm", grpo.load(None), STEPS)
    (killed, _), (calm, number) = (
        torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("killed", "calm")
    )
    assert number == STEPS
    assert all(torch.equal(killed[0][name], value) for name, value in calm[0].items())


def test_the_page_shows_the_plain_loop_as_it_is() -> None:
    code = (ROOT / "examples" / "plain_loop.py").read_text().split('"""\n\n', 1)[1]
    shown = next(blocks((ROOT / "docs" / "how-to" / "grpo.md").read_text()))
    assert shown.code == code
    assert len([line for line in code.splitlines() if line]) <= 25


def test_dynamic_sampling_fills_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "dynamic_sampling.py"
    torch.manual_seed(0)
    runpy.run_path(str(path))
    found = re.fullmatch(r"(\d+) groups: 80 trained, (\d+) filtered\n", capsys.readouterr().out)
    assert found is not None and int(found[1]) == 80 + int(found[2])
    assert int(found[2]) > 0
    code = path.read_text().split("ZeroVariance\n\n", 1)[1]
    assert len([line for line in code.splitlines() if line]) <= 25


def test_examples_stay_short() -> None:
    code = (ROOT / "examples" / "grpo.py").read_text().split('"""\n\n', 1)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 65


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_shows_tables(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = json.loads(notebook.read_text())
    assert page["nbformat"] == 4
    names: dict[str, Any] = {"__name__": "__main__"}
    tables = 0
    for number, cell in enumerate(page["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], f"cell {number}: clear the outputs before you commit"
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{notebook.name} cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), f"{notebook.name} cell {number}", "eval"), names)
            tables += "<table>" in getattr(shown, "_repr_html_", str)()
    assert tables

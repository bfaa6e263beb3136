"""Extras: what the package declares is what the code says, and whatever is missing names the extra that brings it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.extras import DISTRIBUTION, EXTRAS
from tests.support.plane_processes import SMALL

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = ("docs", "dev", "all")
"""Extras that only collect others, or are for work on Penstock itself."""
DISTRIBUTIONS = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "PIL": "pillow",
    "prometheus_client": "prometheus-client",
}


def brought(extra: str) -> set[str]:
    """The distributions that an extra brings, those of extras inside it included."""
    found: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name, inside = re.match(r"([A-Za-z0-9_-]+)(?:\[([^]]*)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == DISTRIBUTION:
            found = found.union(*(brought(other) for other in inside.split(",")))
        else:
            found.add(name)
    return found


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == DISTRIBUTION == "penstock-rl"


def test_extras_of_the_package_are_those_the_code_knows() -> None:
    assert set(PROJECT["optional-dependencies"]) - set(OURS) == set(EXTRAS)
    for name, extra in EXTRAS.items():
        assert {DISTRIBUTIONS.get(module, module) for module in extra.modules} <= brought(name), name


def test_every_hint_to_install_something_names_an_extra_that_there_is() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    for page in pages:
        for name, extras in re.findall(r"(?<!/)(penstock[\w-]*)\[([a-z,]+)\]", page.read_text()):
            assert name == DISTRIBUTION and set(extras.split(",")) <= {*EXTRAS, *OURS}, f"{page}: {name}[{extras}]"
        assert not re.search(r"pip install ['\"]?penstock(?!-rl)", page.read_text()), page


def without(modules: tuple[str, ...], program: str) -> str:
    """What a program prints, or the last line of its error, in a process where modules cannot be imported."""
    hide = f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"
    done = subprocess.run([sys.executable, "-c", hide + program], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


TO_TORCH = (
    "import penstock as ps; ps.to_torch(ps.pack([ps.Sample(id='a', token_ids=[1])], ranks=1, seq_len=8).ranks[0][0])"
)
COMMAND = "from penstock.cli import main; sys.exit(main({!r}))"


SERVE = ["serve", "memory:", *SMALL, "--listen=tcp://127.0.0.1:*", "--metrics=127.0.0.1:0"]


ROLLOUTS = ["rollouts", "verifiers", "x", "--plane=ipc:///tmp/nobody"]


@pytest.mark.parametrize(
    ("module", "program", "said"),
    [
        ("torch", TO_TORCH, "ps.to_torch: needs torch; pip install 'penstock-rl[torch]'"),
        ("torch", "import penstock.train.loss", "penstock.train.loss: needs torch; pip install 'penstock-rl[torch]'"),
        ("torch", "from penstock.train.rank_steps import agree", "pip install 'penstock-rl[torch]'"),
        ("hypothesis", "import penstock.testing.strategies", "needs hypothesis; pip install 'penstock-rl[testing]'"),
        ("PIL", COMMAND.format(["bench", "assets"]), "penstock bench: needs PIL; pip install 'penstock-rl[images]'"),
        (
            "prometheus_client",
            COMMAND.format(SERVE),
            "a page for Prometheus: needs prometheus_client; pip install 'penstock-rl[metrics]'",
        ),
        (
            "starlette",
            COMMAND.format([*SERVE[:-1], "--http=127.0.0.1:0"]),
            "the HTTP API: needs starlette; pip install 'penstock-rl[http]'",
        ),
        (
            "verifiers",
            COMMAND.format(ROLLOUTS),
            "penstock rollouts verifiers: needs verifiers; pip install 'penstock-rl[verifiers]'",
        ),
        ("safetensors", COMMAND.format(["demo"]), "needs safetensors; pip install 'penstock-rl[demo]'"),
    ],
)
def test_what_is_missing_names_the_extra_that_brings_it(module: str, program: str, said: str) -> None:
    found = without((module,), program)
    assert found.endswith(said) and found.count("penstock rollouts") <= 1


def test_a_configuration_is_written_without_any_extra(tmp_path: Path) -> None:
    hidden = tuple({module for extra in EXTRAS.values() for module in extra.modules})
    path = tmp_path / "my.toml"
    assert "wrote" in without(hidden, COMMAND.format(["demo", "--write-config", str(path)]))
    assert path.exists()

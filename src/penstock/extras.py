"""The optional extras: which packages each installs, and the error when one is missing.

The core needs none of them. The distribution is called penstock-rl, because another project has the name penstock on
the package index. The import name is `penstock`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from penstock.errors import MissingExtra

DISTRIBUTION = "penstock-rl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    modules: tuple[str, ...]
    """The modules it installs, by import name."""
    purpose: str

    @property
    def installed(self) -> bool:
        return all(map(_is_there, self.modules))


EXTRAS = {
    "torch": Extra(modules=("torch",), purpose="ps.to_torch, losses, the reference trainer"),
    "objects": Extra(modules=("obstore",), purpose="storage in S3, Google Cloud Storage and Azure"),
    "images": Extra(modules=("PIL", "obstore"), purpose="images, also in object stores"),
    "view": Extra(modules=("orjson", "starlette", "uvicorn"), purpose="token export and viewer"),
    "http": Extra(modules=("starlette", "uvicorn"), purpose="penstock serve --http"),
    "parquet": Extra(modules=("pyarrow",), purpose="token export to Parquet"),
    "tinker": Extra(modules=("tinker",), purpose="samples as datums of the Tinker API"),
    "top": Extra(modules=("rich",), purpose="pages of top and demo that redraw in place"),
    "metrics": Extra(modules=("prometheus_client", "uvicorn"), purpose="pages for Prometheus"),
    "tensorboard": Extra(modules=("tensorboard",), purpose="training metrics to TensorBoard"),
    "wandb": Extra(modules=("wandb",), purpose="training metrics to Weights & Biases"),
    "trackio": Extra(modules=("trackio",), purpose="training metrics to Trackio"),
    "otel": Extra(
        modules=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        purpose="a plane's groups as spans of OpenTelemetry",
    ),
    "postgres": Extra(modules=("psycopg",), purpose="logs in PostgreSQL"),
    "ray": Extra(modules=("ray",), purpose="planes as actors of a Ray cluster"),
    "verifiers": Extra(modules=("verifiers",), purpose="rollouts with verifiers' environments"),
    "demo": Extra(modules=("torch", "PIL", "orjson", "safetensors", "transformers"), purpose="penstock demo and train"),
    "transformers": Extra(modules=("torch", "accelerate", "safetensors", "transformers"), purpose="PlaneTrainer"),
    "trl": Extra(
        modules=("torch", "accelerate", "trl", "requests", "aiohttp"),
        purpose="Durable rollouts for TRL's AsyncGRPOTrainer",
    ),
    "testing": Extra(modules=("hypothesis",), purpose="penstock.testing: strategies for your own tests"),
    "bench": Extra(modules=("torch", "cpprb", "torchrl", "pyarrow", "matplotlib"), purpose="penstock bench"),
}
"""By name. A package belongs to the first extra that installs it, so an extra that includes others comes after them."""


def install(extra: str) -> str:
    """Return the command that installs an extra.

    >>> install("view")
    "pip install 'penstock-rl[view]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def extra_of(module: str) -> str | None:
    """Return the extra that installs a module or its package, or None.

    >>> extra_of("PIL.Image"), extra_of("json")
    ('images', None)
    """
    top = module.partition(".")[0]
    return next((name for name, extra in EXTRAS.items() if top in extra.modules), None)


def missing(what: str, error: ImportError, *, extra: str | None = None) -> ImportError:
    """Return the error to raise for a failed import: MissingExtra if an extra would help, else the error itself.

    `extra` names the extra to recommend, if several install the module.

    >>> str(missing("ps.to_torch", ModuleNotFoundError("No module named 'torch'", name="torch")))
    "ps.to_torch: needs torch; pip install 'penstock-rl[torch]'"
    """
    extra = extra or extra_of(error.name or "")
    if isinstance(error, MissingExtra) or extra is None:
        return error
    return MissingExtra(f"{what}: needs {error.name or error}; {install(extra)}")


def require(what: str, *modules: str, extra: str | None = None) -> None:
    """Raise MissingExtra unless these modules can be imported. Costs nothing once they are.

    `extra` names the extra to recommend, if several install the module.
    """
    for module in modules:
        # `sys.modules` first: `find_spec` searches the path each time.
        if sys.modules.get(module) is None and not _is_there(module):
            raise missing(what, ModuleNotFoundError(name=module), extra=extra)

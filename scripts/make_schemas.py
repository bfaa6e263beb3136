"""Make the schemas that tests check deploy/ with, of the projects' own. Without descriptions, and each part once.

    .venv/bin/python scripts/make_schemas.py compose-spec/schema/compose-spec.json kuberay/.../ray.io_rayjobs.yaml

The first is of github.com/compose-spec/compose-spec, the second of github.com/ray-project/kuberay
(ray-operator/config/crd/bases); both have the Apache license.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "schemas"


def bare(found: Any) -> Any:
    """Without what is for people."""
    if isinstance(found, dict):
        return {
            name: bare(value)
            for name, value in found.items()
            if not (name == "description" and isinstance(value, str)) and not name.startswith("x-kubernetes-list")
        }
    return [bare(value) for value in found] if isinstance(found, list) else found


def shared(found: Any, part: dict[str, Any], name: str) -> Any:
    """With a reference wherever `part` is."""
    if found == part:
        return {"$ref": f"#/$defs/{name}"}
    if isinstance(found, dict):
        return {key: shared(value, part, name) for key, value in found.items()}
    return [shared(value, part, name) for value in found] if isinstance(found, list) else found


def ray_job(text: str) -> dict[str, Any]:
    """The schema of a RayJob, version v1, without its status."""
    versions = yaml.safe_load(text)["spec"]["versions"]
    found = bare(next(one for one in versions if one["name"] == "v1")["schema"]["openAPIV3Schema"])
    del found["properties"]["status"]
    cluster = found["properties"]["spec"]["properties"]["rayClusterSpec"]
    pod = cluster["properties"]["headGroupSpec"]["properties"]["template"]
    made: dict[str, Any] = shared(found, pod, "pod")
    return made | {"$defs": {"pod": pod}}


def main(compose: Path, rayjobs: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schema in (("compose", bare(json.loads(compose.read_text()))), ("rayjob", ray_job(rayjobs.read_text()))):
        (FOLDER / f"{name}.json").write_text(json.dumps(schema, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

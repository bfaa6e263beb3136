"""deploy/kubernetes/rayjob.yaml: it holds to the schema of KubeRay's RayJob, and its program to our settings."""

from __future__ import annotations

import ast
import copy
import json
from typing import Any

import jsonschema
import pytest
import yaml

from penstock.config import build, nested
from penstock.plane.settings import ClusterSettings
from penstock.ray.ray_plane import is_movable
from tests.test_compose import SCHEMAS
from tests.test_deploy import DEPLOY

TEXT = (DEPLOY / "kubernetes" / "rayjob.yaml").read_text()
DOCUMENTS: dict[str, dict[str, Any]] = {one["kind"]: one for one in yaml.safe_load_all(TEXT)}
PROGRAM = DOCUMENTS["ConfigMap"]["data"]["program.py"]


def strict(schema: Any) -> Any:
    """Kubernetes reports fields that a schema does not have; JSON schema has to be told to."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(value) for name, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", made.get("x-kubernetes-preserve-unknown-fields", False))
    return made


def validator() -> jsonschema.Draft202012Validator:
    schema = strict(json.loads((SCHEMAS / "rayjob.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}  # as of every object
    return jsonschema.Draft202012Validator(schema)


def test_the_job_holds_to_the_schema() -> None:
    job = DOCUMENTS["RayJob"]
    validator().validate(job)
    for path, wrong in (
        (("spec",), {"entryPoint": "x"}),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec"), {"container": []}),
        (("spec", "rayClusterSpec"), {"rayVersion": 2}),
    ):
        changed = copy.deepcopy(job)
        at = changed
        for name in path:
            at = at[name]
        at.update(wrong)
        with pytest.raises(jsonschema.ValidationError):
            validator().validate(changed)


def test_what_the_job_names_is_there() -> None:
    spec = DOCUMENTS["RayJob"]["spec"]
    cluster = spec["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in pods):
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {one["name"]: one["configMap"]["name"] for one in pod["volumes"]}
        assert volumes == {"program": DOCUMENTS["ConfigMap"]["metadata"]["name"]}
        assert spec["entrypoint"] == f"python {mounts['program']}/program.py"
        assert container["securityContext"]["runAsNonRoot"]
        assert container["envFrom"] == [{"secretRef": {"name": "penstock-stores"}}]  # as of plane.yaml
    assert len({group["template"]["spec"]["containers"][0]["image"] for group in pods}) == 1


def test_the_plane_of_the_program_may_move_to_any_pod() -> None:
    """The settings of its `ps.open` are taken, and keep nothing in a pod."""
    calls = [node for node in ast.walk(ast.parse(PROGRAM)) if isinstance(node, ast.Call)]
    opened = next(one for one in calls if ast.unparse(one.func) == "ps.open" and one.keywords)
    given = {str(word.arg): ast.literal_eval(word.value) for word in opened.keywords}
    settings = build(ClusterSettings, nested(ClusterSettings, given, "rayjob.yaml"))
    assert is_movable(settings) and not settings.folder
    ranks = next(one for one in calls if ast.unparse(one.func) == "Rank.remote")
    assert ast.literal_eval(ranks.args[1]) == settings.packing.ranks

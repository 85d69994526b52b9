"""Objects as the kubelet, the schemas and a search for lost keys read them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate

from tightfit.clusters.kubernetes.pod import Document

NEWEST = kubernetes_validate.latest_version()
SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


def expand(text: str, known: dict[str, str]) -> str:
    """k8s.io/kubernetes/third_party/forked/golang/expansion: `$$` is a dollar, unknown stays."""
    out, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            out, at = out + text[at], at + 1
        elif text[at + 1] == "$":
            out, at = out + "$", at + 2
        elif text[at + 1] == "(" and ")" in text[at:]:
            end = text.index(")", at)
            name = text[at + 2 : end]
            out, at = out + known.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at : at + 2], at + 2
    return out


def read_patch(train_job: Document) -> Document:
    (patch,) = train_job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    found: Document = node["template"]["spec"]["template"]["spec"]
    return found


def list_containers(leader: Document) -> list[Document]:
    if leader["kind"] == "TrainJob":
        return [leader["spec"]["trainer"]]
    pod = leader["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def list_words(leader: Document) -> list[str]:
    container = list_containers(leader)[-1]
    return [*container["command"], *container["args"]]


def list_resources(thing: Any) -> list[Document]:
    """Every `resources` or `resourcesPerNode` below."""
    if isinstance(thing, list):
        return [found for item in thing for found in list_resources(item)]
    if not isinstance(thing, dict):
        return []
    own = [thing[key] for key in ("resources", "resourcesPerNode") if key in thing]
    return own + [found for value in thing.values() for found in list_resources(value)]


def list_lost(source: Any, found: Any, path: str = "") -> Iterator[str]:
    if isinstance(source, dict):
        for key, value in source.items():
            if not isinstance(found, dict) or key not in found:
                yield f"{path}.{key}"
            else:
                yield from list_lost(value, found[key], f"{path}.{key}")
    elif isinstance(source, list):
        for number, value in enumerate(source):
            inside = found[number] if isinstance(found, list) and number < len(found) else None
            yield from list_lost(value, inside, f"{path}[{number}]")
    elif source != found:
        yield path


def list_descriptions(thing: Document) -> Iterator[tuple[str, str]]:
    """What the newest schema says of each field that is used."""
    folder = SCHEMAS / f"v{NEWEST}-local"
    version = thing["apiVersion"].replace("/", "-")
    schema = _read_schema(folder / f"{thing['kind'].lower()}-{version}.json")
    yield from _describe(thing, schema, folder, "")


@functools.cache
def _read_schema(path: Path) -> Any:
    return json.loads(path.read_text())


def _describe(value: Any, schema: Any, folder: Path, path: str) -> Iterator[tuple[str, str]]:
    while "$ref" in schema:
        name, _, place = schema["$ref"].partition("#")
        document = _read_schema(folder / (Path(name).name or "_definitions.json"))
        for part in place.strip("/").split("/"):
            document = document[part]
        schema = document
    if isinstance(value, list):
        for item in value:
            yield from _describe(item, schema.get("items", {}), folder, path)
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        known = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
        if isinstance(known, dict):
            yield f"{path}.{key}", known.get("description", "")
            yield from _describe(inner, known, folder, f"{path}.{key}")

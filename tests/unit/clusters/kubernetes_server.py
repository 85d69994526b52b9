"""A small API server over real HTTP: keeps objects as they are applied, and every request."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
RUNTIME = f"{TRAINER}/clustertrainingruntimes/torch-distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    content_type: str
    body: Any


@dataclass(slots=True)
class ApiServer:
    """`objects` by path. `refusals` by (method, last word of the collection)."""

    objects: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    refusals: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    on_get: Callable[[str], None] = lambda _path: None
    _server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                owner._handle(self)

            do_GET = do_PATCH = do_DELETE = do_POST = handle_any  # noqa: N815

            def log_message(self, *_words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        serve = self._server.serve_forever
        threading.Thread(target=serve, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def write_kubeconfig(self, path: Path, *, namespace: str | None = "team") -> None:
        context = {"cluster": "lab", "user": "me"} | ({"namespace": namespace} if namespace else {})
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "lab",
                    "clusters": [{"name": "lab", "cluster": {"server": self.url}}],
                    "users": [{"name": "me", "user": {"token": "secret"}}],
                    "contexts": [{"name": "lab", "context": context}],
                }
            )
        )

    def _handle(self, call: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(call.path)
        length = int(call.headers.get("Content-Length") or 0)
        body = json.loads(call.rfile.read(length)) if length else None
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        kind = call.headers.get("Content-Type", "")
        found = Request(
            method=call.command, path=parts.path, query=query, content_type=kind, body=body
        )
        self.requests.append(found)
        status, answer = self._answer(found)
        data = json.dumps(answer).encode()
        call.send_response(status)
        call.send_header("Content-Type", "application/json")
        call.send_header("Content-Length", str(len(data)))
        call.end_headers()
        call.wfile.write(data)

    def _answer(self, request: Request) -> tuple[int, Any]:
        words = request.path.strip("/").split("/")
        for (method, word), (status, said) in self.refusals.items():
            if method == request.method and word in words:
                return status, {"kind": "Status", "status": "Failure", "message": said}
        if request.method == "GET":
            return self._get(request.path)
        if request.method == "DELETE":
            held = self.objects.pop(request.path, None)
            return (404, {"message": "not found"}) if held is None else (200, held)
        if request.method == "PATCH":
            return self._apply(request)
        return 405, {"message": "not here"}

    def _get(self, path: str) -> tuple[int, Any]:
        self.on_get(path)
        if path in self.objects:
            return 200, self.objects[path]
        if path in self.lists or not self._is_one(path):
            return 200, {"items": self.lists.get(path, [])}
        return 404, {"message": f"{path} not found"}

    def _is_one(self, path: str) -> bool:
        collections = ("pods", "events", "nodes")
        return path.rpartition("/")[2] not in collections

    def _apply(self, request: Request) -> tuple[int, Any]:
        if "trainjobs" in request.path and TRAINER not in self.objects:
            return 404, {"message": "the server could not find the requested resource"}
        held = self.objects.get(request.path, {})
        uid = held.get("metadata", {}).get("uid") or str(uuid.uuid4())
        made = {**request.body, "status": held.get("status", {})}
        made["metadata"] = {**request.body["metadata"], "uid": uid}
        self.objects[request.path] = made
        return (200 if held else 201), made


def make_node(
    name: str, product: str | None, *, gpus: int = 4, cores: int = 32, memory: str = "256Gi"
) -> dict[str, Any]:
    """As `kubectl get nodes -o json` shows one."""
    labels = {"kubernetes.io/hostname": name}
    amounts = {"cpu": str(cores), "memory": memory, "ephemeral-storage": "500Gi"}
    if product is not None:
        labels["nvidia.com/gpu.product"] = product
        amounts["nvidia.com/gpu"] = str(gpus)
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {
            "allocatable": amounts,
            "capacity": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def make_pod(
    name: str, index: int, phase: str, *, node: str | None = "n1", **status: Any
) -> dict[str, Any]:
    spec = {} if node is None else {"nodeName": node}
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {"phase": phase, **status},
    }

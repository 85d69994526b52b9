"""Kubernetes without kubectl: the official client against an API that serves recorded lists."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tightfit.core.errors import SetupError
from tightfit.hardware.inventory import NodeState, count_totals
from tightfit.hardware.kubernetes import build_inventory, probe_kubernetes_inventory

GOLDEN = Path(__file__).parents[2] / "golden" / "hardware"
PAGE_OF_SERVER = 3


@dataclass
class Api:
    """What the server answers, and what it was asked."""

    items: dict[str, list[object]]
    forbidden: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, object]]:
        address = urlsplit(path)
        what = address.path.rpartition("/")[2]
        self.asked.append(path)
        if address.path not in ("/api/v1/nodes", "/api/v1/pods"):
            return 404, {"kind": "Status", "code": 404}
        if what in self.forbidden:
            return 403, {"kind": "Status", "code": 403, "reason": "Forbidden"}
        start = int(parse_qs(address.query).get("continue", ["0"])[0])
        end = start + PAGE_OF_SERVER
        metadata = {"continue": str(end)} if end < len(self.items[what]) else {}
        kind = {"nodes": "NodeList", "pods": "PodList"}[what]
        listed = self.items[what][start:end]
        return 200, {"kind": kind, "apiVersion": "v1", "metadata": metadata, "items": listed}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Api]:
    """A cluster that KUBECONFIG names, on a machine without kubectl."""
    reported = Api(
        items={
            what: json.loads((GOLDEN / f"kubernetes_{what}.json").read_text())["items"]
            for what in ("nodes", "pods")
        }
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, document = reported.answer(self.path)
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": address}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield reported
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_client_tells_what_kubectl_tells(api: Api) -> None:
    by_client = probe_kubernetes_inventory()
    assert by_client == build_inventory(api.items["nodes"], api.items["pods"])  # type: ignore[arg-type]
    assert len(by_client.nodes) == len(api.items["nodes"]) > PAGE_OF_SERVER
    pods = [path for path in api.asked if "/pods" in path]
    assert pods
    assert all("fieldSelector=status.phase" in path for path in pods)


def test_the_recorded_objects_are_those_of_the_api() -> None:
    from kubernetes import client

    connection = client.ApiClient()
    reported = {}
    for what, kind in (("nodes", "V1NodeList"), ("pods", "V1PodList")):
        text = (GOLDEN / f"kubernetes_{what}.json").read_text()
        read = connection.deserialize(text, kind, "application/json")
        reported[what] = connection.sanitize_for_serialization(read)["items"]
        assert len(reported[what]) == len(json.loads(text)["items"])
    recorded = {
        what: json.loads((GOLDEN / f"kubernetes_{what}.json").read_text())["items"]
        for what in reported
    }
    again = build_inventory(reported["nodes"], reported["pods"])
    assert again == build_inventory(recorded["nodes"], recorded["pods"])


def test_pods_that_may_not_be_listed(api: Api) -> None:
    api.forbidden.add("pods")
    inventory = probe_kubernetes_inventory()
    assert count_totals(inventory).num_free_gpus is None
    usable = [node for node in inventory.nodes if node.state.takes_jobs]
    assert {node.state for node in usable} == {NodeState.READY}


def test_nodes_that_may_not_be_listed_are_an_error(api: Api) -> None:
    api.forbidden.add("nodes")
    with pytest.raises(SetupError, match="403"):
        probe_kubernetes_inventory()


def test_a_server_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = {
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="does not answer"):
        probe_kubernetes_inventory()

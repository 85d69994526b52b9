"""Who may call the HTTP API: the token, the host's name, pages of other origins."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from api_client import Served, serving
from scripted_engine import ScriptedEngine
from tightfit.core.errors import UserError
from tightfit.serving.http.server import LOOPBACK_NAMES
from tightfit.serving.sockets import bind_socket, host_name, is_loopback

KEY = "a-key-of-the-test"
PATHS = ("/v1/models", "/v1/models/scripted", "/metrics", "/openapi.json", "/nowhere")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serving(
        ScriptedEngine(), host="0.0.0.0", api_key=KEY, cors_origins=("https://page.example",)
    ) as running:
        yield running


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer a-key-of-the-tes", f"Basic {KEY}", KEY, "Bearer ü"]
)
def test_without_the_token_everything_but_health_is_closed(guarded: Served, given: str) -> None:
    headers = {b"Authorization": given.encode()}
    for path in PATHS:
        response = guarded.http.get(path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.http.post("/v1/completions", json={}, headers=headers).status_code == 401
    assert guarded.http.get("/health", headers=headers).status_code == 200


def test_a_second_authorization_header_does_not_help(guarded: Served) -> None:
    headers = [("Authorization", "Bearer no"), ("Authorization", f"Bearer {KEY}")]
    with socket.create_connection(("127.0.0.1", guarded.server.bound.port)) as raw:
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        raw.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{''.join(lines)}\r\n".encode())
        assert b" 401 " in raw.recv(100)


def test_with_the_token_it_answers(guarded: Served) -> None:
    assert guarded.http.get("/v1/models").status_code == 200
    assert guarded.http.get("/v1/models", headers={"Authorization": f"bearer {KEY}"}).is_success
    assert guarded.chat("abc", max_tokens=1).is_success


def test_the_description_asks_for_the_token(guarded: Served) -> None:
    reported = guarded.http.get("/openapi.json").json()

    assert reported["security"] == [{"bearer": []}]
    assert "401" in reported["paths"]["/v1/models"]["get"]["responses"]
    assert reported["paths"]["/health"]["get"]["security"] == []


def test_pages_of_a_named_origin_may_call_and_others_not(guarded: Served) -> None:
    asking = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    named = guarded.http.options(
        "/v1/completions", headers={"Origin": "https://page.example", **asking, "Authorization": ""}
    )
    assert named.headers["access-control-allow-origin"] == "https://page.example"
    other = guarded.http.options(
        "/v1/completions", headers={"Origin": "https://evil.example", **asking, "Authorization": ""}
    )
    assert "access-control-allow-origin" not in other.headers


def test_no_origin_is_let_by_unless_named() -> None:
    with serving(ScriptedEngine()) as served:
        response = served.http.get("/v1/models", headers={"Origin": "https://page.example"})
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_name_that_was_pointed_at_this_machine_is_refused() -> None:
    with serving(ScriptedEngine(), host_names=(*LOOPBACK_NAMES, "my-box")) as served:
        for host in ("localhost", "LOCALHOST:81", "127.0.0.1:9", "[::1]:5", "my-box", "localhost."):
            response = served.http.get("/v1/models", headers={"Host": host})
            assert response.status_code == 200, host
        for host in (
            "evil.example",
            "localhost.evil.example:80",
            "127.0.0.1.evil.example",
            "[::2]",
        ):
            response = served.http.get("/v1/models", headers={"Host": host})
            assert response.status_code == 403, host
            assert response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("header", "name"),
    [("a:80", "a"), ("A", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("", ""), ("a.:1", "a")],
)
def test_host_name(header: str, name: str) -> None:
    assert host_name(header) == name


def test_is_loopback() -> None:
    assert [is_loopback(a) for a in ("127.9.9.9", "::1", "::1%lo", "localhost")] == [True] * 4
    assert [is_loopback(a) for a in ("0.0.0.0", "::", "10.0.0.1", "a.localhost.b")] == [False] * 4


def test_a_taken_port_is_told_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} .* is taken") as reported:
            bind_socket("127.0.0.1", port)
        assert "--port 0" in reported.value.remedy


@pytest.mark.parametrize("host", ["203.0.113.7", "a" * 300, "a..b"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(UserError) as reported:
        bind_socket(host, 0)
    assert "--host" in reported.value.remedy


def test_port_zero_takes_a_free_one_on_either_family() -> None:
    bound = bind_socket("127.0.0.1", 0)
    try:
        assert bound.port > 0
        assert bound.is_loopback
        assert bound.url == f"http://127.0.0.1:{bound.port}"
    finally:
        bound.socket.close()
    if socket.has_ipv6:
        six = bind_socket("::1", 0)
        assert six.url == f"http://[::1]:{six.port}"
        six.socket.close()

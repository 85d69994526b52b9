"""Hostile requests to the web page: no failure of gradio's gets through, and the page goes on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import httpx

from hostile_requests import CHAT, COMPLETION, HostileRequest, draw_requests, send_hostile

TESTS = Path(__file__).parents[1]
PAGE = TESTS / "integration" / "browser" / "scripted_page.py"
NUM_CASES = 120
SLOW = ("slow head", "half body", "silent", "100 MiB")
"""Kinds that the API's own test sends to the same connections."""
ROUTES = (
    *(
        "/gradio_api/queue/join",
        "/gradio_api/call/x",
        "/gradio_api/run/predict",
        "/gradio_api/reset",
    ),
    *("/gradio_api/api/0", "/gradio_api/upload", "/gradio_api/cancel", "/login", "/theme.css"),
    *("/gradio_api/component_server", "/gradio_api/file=/etc/passwd", "/assets/..%2f..%2fetc"),
    *("/gradio_api/proxy=http://outside.example/x", "/gradio_api/stream/x/y/z"),
)

OF_IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
OF_FRAME = OF_IMAGE | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
OF_LINK = OF_FRAME | {"Sec-Fetch-Dest": "document"}
"""What browsers send with a request of another site's page, which has no Origin here."""


def _aim(request: HostileRequest, drawn: random.Random) -> HostileRequest:
    """The same at a route of the page."""
    route = drawn.choice(ROUTES).encode()
    pieces = [
        piece.replace(CHAT.encode(), route).replace(COMPLETION.encode(), route)
        for piece in request.pieces
    ]
    return HostileRequest(kind=request.kind, pieces=pieces, leaving=request.leaving)


def test_hostile_requests_to_the_page_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "stderr.txt"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(PAGE), str(tmp_path / "votes.jsonl"), "0.001"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS / "support")},
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip().rstrip("/")
        port = int(address.rpartition(":")[2])
        drawn = random.Random(3)
        for request in draw_requests(3, NUM_CASES):
            if request.kind in SLOW:
                continue
            aimed = _aim(request, drawn)
            answers = send_hostile(aimed, port)
            for answer in answers or ():
                assert answer.status < 500 or answer.status == 503, aimed.pieces[0][:300]
                assert "root:" not in answer.body.decode("latin-1")
        for name, body in (("stop", float("nan")), ("user", "\ud800"), ("x", None)):
            for route in ("queue/join", "call/x", "reset", "api/0"):
                response = httpx.post(
                    f"{address}/gradio_api/{route}",
                    content=json.dumps({name: body}).encode(),
                    headers={"Content-Type": "application/json"},
                    trust_env=False,
                    timeout=60,
                )
                assert 400 <= response.status_code < 500, (route, name)
        for headers, status in (({}, 200), ({"Origin": "https://evil.example"}, 403),
                                ({"Origin": "null"}, 403), ({"Host": "evil.example"}, 421),
                                ({"Origin": address}, 200),
                                (OF_IMAGE, 403), (OF_IMAGE | {"Sec-Fetch-Site": "same-site"}, 403),
                                (OF_FRAME, 403), (OF_LINK, 200),
                                (OF_IMAGE | {"Sec-Fetch-Site": "same-origin"}, 200)):  # fmt: skip
            url = f"{address}/config"
            answer_of = httpx.get(url, headers=headers, trust_env=False, timeout=60)
            assert answer_of.status_code == status, headers
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in log.read_text()
    assert all(len(line) < 200 for line in log.read_text().splitlines())

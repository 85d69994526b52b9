"""schemathesis against what the API says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx

from api_processes import ServerProcess

pytest_plugins = ("api_served",)

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
"""Not `positive_data_acceptance`: a description cannot say how many tokens a vocabulary has."""


def count_answers(server: ServerProcess) -> Counter[tuple[str, str]]:
    """By path and status, of all tests that have asked this server so far."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=60).text
    found = re.findall(r'requests_total\{path="([^"]*)",code="(\d+)"\} (\d+)', text)
    return Counter({(path, code): int(count) for path, code, count in found})


def test_schemathesis_finds_no_server_error_and_nothing_undescribed(
    server: ServerProcess, tmp_path: Path
) -> None:
    hooks = Path(__file__).with_name("schemathesis_hooks.py")
    config = tmp_path / "schemathesis.toml"
    # Lists that are too long by one item can make a body that is too large before it is read.
    config.write_text('[checks.negative_data_rejection]\nexpected-statuses = ["4xx"]\n')
    before = count_answers(server)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
            *("run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"),
            *("--max-examples", "20", "--generation-deterministic", "--no-color"),
            *("--request-timeout", "60"),
        ],
        check=False,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(hooks)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=420,
    )
    after = count_answers(server)
    assert done.returncode == 0, done.stdout[-6000:]
    (num_cases,) = re.findall(r"(\d+) generated, \d+ passed", done.stdout)
    assert int(num_cases) > 200
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert after[path, "200"] - before[path, "200"] >= 10
    assert "500" not in {code for _, code in after}


def test_the_description_tells_every_error_and_its_body(server: ServerProcess) -> None:
    reported = httpx.get(f"{server.url}/openapi.json", trust_env=False, timeout=60).json()

    assert set(reported["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/models/{model_id}",
        "/health",
        "/metrics",
        "/openapi.json",
    }
    posted = [path for path, methods in reported["paths"].items() if "post" in methods]
    for path in posted:
        responses = reported["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "403", "404", "413", "500", "503", "504"}
        for code in set(responses) - {"200"}:
            schema = responses[code]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}

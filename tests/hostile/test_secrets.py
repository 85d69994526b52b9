"""What is a secret, and that errors, recorded command lines and site files hold none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_run import run_process
from tightfit.clusters.site import read_site
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.secrets import (
    hide_secret_options,
    hide_secrets,
    is_secret,
    without_secrets,
)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "", True),
        ("WANDB_API_KEY", "", True),
        ("AWS_SECRET_ACCESS_KEY", "", True),
        ("PGPASSWORD", "", True),
        ("--api-key", "", True),
        ("HTTPS_PROXY", "http://me:word@proxy:3128", True),
        ("HTTPS_PROXY", "http://proxy:3128", False),
        ("HF_TOKEN_PATH", "/home/me/token", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("--max-new-tokens", "8", False),
    ],
)
def test_what_is_a_secret(name: str, value: str, expected: bool) -> None:
    assert is_secret(name, value) is expected


def test_a_process_that_reads_strangers_files_is_told_no_secret() -> None:
    given = {"HF_TOKEN": "a", "HTTPS_PROXY": "http://me:word@proxy", "PATH": "/bin", "HOME": "/"}
    assert without_secrets(given) == {"PATH": "/bin", "HOME": "/"}


def test_an_error_quotes_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    error = UserError(
        "GET https://me:word@hub/x failed with hf_abcdefgh.", remedy="try http://hf_abcdefgh@hub"
    )

    assert (error.problem, str(error)) == ("GET https://***@hub/x failed with ***.",) * 2
    assert error.remedy == "try http://***@hub"
    assert hide_secrets("git@github.com and a@b") == "git@github.com and a@b"


def test_a_recorded_command_line_has_no_secret() -> None:
    words = ["serve", "m", "--api-key", "abc", "--password=abc", "--tokens", "8"]
    assert hide_secret_options(words) == [
        *("serve", "m", "--api-key", "***", "--password=***", "--tokens", "8")
    ]


def test_a_command_line_that_is_wrong_is_quoted_without_its_secret() -> None:
    answer = run_process("plan", "https://me:word-of-mine@hub/model", "--on", "1xRTX-4090")

    assert answer.code == 3, answer.err
    assert "word-of-mine" not in answer.err + answer.out


def test_a_site_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("environment: {WANDB_API_KEY: abcdefgh}\n")

    with pytest.raises(InvalidInputError, match=r"WANDB_API_KEY.* is a secret") as caught:
        read_site(path)
    assert "abcdefgh" not in caught.value.problem

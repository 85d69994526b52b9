"""Addresses of other hosts, and what is said where they cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.core.errors import SetupError, UsageError
from tightfit.engines.llama_devices import add_hosts, read_hosts
from tightfit.runtime.llama_cpp import Protocol, read_protocol


def test_hosts_get_the_usual_port() -> None:
    assert read_hosts("a:1, node-2.lan ,10.0.0.7:65535") == (
        "a:1",
        "node-2.lan:50052",
        "10.0.0.7:65535",
    )
    assert read_hosts(None) == ()


@pytest.mark.parametrize(
    "text",
    ["a:0", "a:65536", "a:b", "a b", "-a", "http://a:1", "a:1,a:1", ",", "[::1]:5", "a:1;rm"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(text)


def test_a_backend_that_was_not_built_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path))
    with pytest.raises(SetupError, match="RPC") as caught:
        add_hosts(("a:1",))
    assert "tightfit.runtime.build_rpc" in caught.value.remedy


def test_protocols_agree_as_llama_cpp_says(tmp_path: Path) -> None:
    header = tmp_path / "ggml-rpc.h"
    header.write_text(
        "#define RPC_PROTO_MAJOR_VERSION    8\n#define RPC_PROTO_MINOR_VERSION    1\n"
    )
    ours = read_protocol(header)
    assert str(ours) == "8.1"
    assert ours.understands(Protocol(major=8, minor=0))
    assert not ours.understands(Protocol(major=8, minor=2))
    assert not ours.understands(Protocol(major=7, minor=1))

"""Addresses of other hosts, and how they are made known to llama.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.engines.llama.rpc_hosts import add_hosts, read_hosts, register_hosts

Adder = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)


class Library:
    """The three calls of ggml-backend.h, with the RPC backend's entry made in Python."""

    def __init__(self, answers: dict[bytes, int], *, has_rpc: bool = True) -> None:
        self.registered: list[int] = []
        self.asked: list[bytes] = []
        self._answers = answers

        def add(host: bytes) -> int | None:
            self.asked.append(host)
            return self._answers.get(host)

        self._add = Adder(add)
        address = ctypes.cast(self._add, ctypes.c_void_p).value

        def by_name(name: bytes) -> int | None:
            return 7 if has_rpc and name == b"RPC" else None

        def find(backend: int, name: bytes) -> int | None:
            assert backend == 7
            return address if name == b"ggml_backend_rpc_add_server" else None

        def register(backend: int) -> None:
            self.registered.append(backend)

        self.ggml_backend_reg_by_name: Any = by_name
        self.ggml_backend_reg_get_proc_address: Any = find
        self.ggml_backend_register: Any = register


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


def test_each_host_is_registered_in_order() -> None:
    library = Library({b"a:1": 11, b"b:2": 22})
    register_hosts(library, ("a:1", "b:2"))
    assert library.asked == [b"a:1", b"b:2"]
    assert library.registered == [11, 22]


def test_a_host_that_does_not_answer_is_named() -> None:
    library = Library({b"a:1": 11})
    with pytest.raises(EnvironmentFaultError, match="b:2"):
        register_hosts(library, ("a:1", "b:2"))


def test_a_build_without_the_backend_is_refused() -> None:
    with pytest.raises(EnvironmentFaultError):
        register_hosts(Library({}, has_rpc=False), ("a:1",))
    with pytest.raises(EnvironmentFaultError, match="RPC") as caught:
        add_hosts(("a:1",))
    assert "rpc-server" in caught.value.remedy

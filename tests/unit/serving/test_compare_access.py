"""Who may open the page, and what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.core.errors import DoesNotFitError, UsageError
from tightfit.runtime.model_files import Artefact, ArtefactKind
from tightfit.serving.page.app import check_exposure
from tightfit.serving.page.models import require_room
from tightfit.serving.sockets import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1"])
def test_loopback_needs_no_password(host: str) -> None:
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.evil"])
def test_every_other_address_needs_one(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UsageError, match="no password") as caught:
        check_exposure(host, "")
    assert "--password" in caught.value.remedy
    check_exposure(host, "word")


def _gguf(folder: Path, name: str, size: int) -> Artefact:
    path = folder / name
    with path.open("wb") as stream:
        stream.truncate(size)
    return Artefact(name=name, kind=ArtefactKind.GGUF, path=path, tokenizer=folder)


def test_too_little_memory_is_said_with_what_would_help(tmp_path: Path) -> None:
    pair = [_gguf(tmp_path, "a.gguf", 10**9), _gguf(tmp_path, "b.gguf", 10**9)]

    require_room(pair, None, is_one_at_a_time=False, free_bytes=3 * 10**9)
    with pytest.raises(DoesNotFitError, match=r"The two models need about 2\.0 GiB") as both:
        require_room(pair, None, is_one_at_a_time=False, free_bytes=15 * 10**8)
    assert "--one-at-a-time" in both.value.remedy
    require_room(pair, None, is_one_at_a_time=True, free_bytes=15 * 10**8)
    with pytest.raises(DoesNotFitError, match="larger") as single:
        require_room(pair, None, is_one_at_a_time=True, free_bytes=10**8)
    assert "quantize" in single.value.remedy

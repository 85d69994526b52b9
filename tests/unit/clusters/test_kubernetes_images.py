"""The Dockerfiles, read instruction by instruction: no engine is needed to see these errors."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from tightfit.clusters.kubernetes.pod import IMAGE_USER

ROOT = Path(__file__).parents[3]
KINDS = ["Dockerfile.cpu", "Dockerfile.cuda"]


def read(name: str) -> list[tuple[str, str]]:
    """(instruction, rest), comments gone and continued lines joined."""
    lines = (ROOT / "docker" / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in found]


def test_both_are_read() -> None:
    found = {path.name for path in (ROOT / "docker").iterdir()}
    assert found == {*KINDS, *(f"{name}.dockerignore" for name in KINDS)}


@pytest.mark.parametrize("name", KINDS)
def test_every_base_has_a_whole_version(name: str) -> None:
    bases = [rest.split()[0] for word, rest in read(name) if word == "FROM"]
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", base)


@pytest.mark.parametrize("name", KINDS)
def test_every_install_goes_by_the_constraints(name: str) -> None:
    installs = [rest for word, rest in read(name) if word == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in rest for rest in installs)
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==[0-9.]+$", pinned, re.MULTILINE)


@pytest.mark.parametrize("name", KINDS)
def test_extras_are_ours(name: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (found,) = re.findall(r"'\.\[([a-z,]+)\]'", (ROOT / "docker" / name).read_text())
    for extra in found.split(","):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra


@pytest.mark.parametrize("name", KINDS)
def test_what_is_copied_exists_and_is_not_ignored(name: str) -> None:
    kept = [
        line[1:]
        for line in (ROOT / "docker" / f"{name}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copies = [shlex.split(rest) for word, rest in read(name) if word == "COPY"]
    sources = [word for words in copies if not words[0].startswith("--from") for word in words[:-1]]
    assert sorted(sources) == sorted(kept)
    for source in sources:
        assert (ROOT / source).exists()
        assert not fnmatch.fnmatch(source, "*secret*")


@pytest.mark.parametrize("name", KINDS)
def test_it_ends_as_a_user_that_is_not_root(name: str) -> None:
    instructions = read(name)
    (user,) = (rest for word, rest in instructions if word == "USER")
    assert user == f"{IMAGE_USER}:{IMAGE_USER}"
    after = instructions[[word for word, _ in instructions].index("USER") :]
    assert [word for word, _ in after] == ["USER", "ENTRYPOINT"]


@pytest.mark.parametrize("name", KINDS)
def test_it_asks_no_hub_and_carries_no_build_tools(name: str) -> None:
    instructions = read(name)
    last = max(place for place, (word, _) in enumerate(instructions) if word == "FROM")
    final = [f"{word} {rest}" for word, rest in instructions[last:]]
    assert any("HF_HUB_OFFLINE=1" in line for line in final)
    assert not [line for line in final if "pip install" in line]
    text = "\n".join(f"{word} {rest}" for word, rest in instructions)
    assert not re.search(r"hf download|huggingface-cli|from_pretrained|curl|wget", text)
    for line in final:
        assert "apt-get install" not in line or "rm -rf /var/lib/apt/lists" in line

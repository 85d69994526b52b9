"""What people call a model: paths, catalogue names, aliases, cached hub ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UserError
from tightfit.models.resolve import resolve_model

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
TINY_PARAMS = 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def write_model(folder: Path, config: object = TINY) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def _empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("META-LLAMA/llama-2-7B-HF", "meta-llama/Llama-2-7b-hf"),
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("llama2-7b", "meta-llama/Llama-2-7b-hf"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("Mistral-7B", "mistralai/Mistral-7B-v0.1"),
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("t5-3b", "google-t5/t5-3b"),
        ("bloom-1b1", "bigscience/bloom-1b1"),
        ("falcon-7b", "tiiuae/falcon-7b"),
        ("gemma-3-4b", "google/gemma-3-4b-it"),
        ("Qwen2.5-72B", "Qwen/Qwen2.5-72B"),
        ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"),
    ],
)
def test_names_people_type(typed: str, meant: str) -> None:
    assert resolve_model(typed).name == meant


@pytest.mark.parametrize("typed", ["Qwen2.5-7B-Instruct", "meta-llama/Llama-2-7b-chat-hf"])
def test_a_tuned_model_takes_its_base_and_says_so(typed: str) -> None:
    spec = resolve_model(typed)

    assert any(typed in warning and spec.name in warning for warning in spec.warnings)


def test_a_version_is_never_swapped_for_another() -> None:
    with pytest.raises(NotFoundError):
        resolve_model("Mistral-7B-Instruct-v0.9")


def test_another_organisation_is_not_taken_for_the_one_we_know() -> None:
    with pytest.raises(NotFoundError, match="meta-llama/Llama-2-7b-hf"):
        resolve_model("SomebodyElse/Llama-2-7b-hf")


def test_ambiguous_name_lists_the_candidates() -> None:
    with pytest.raises(NotFoundError, match=r"tiiuae/falcon-7b.*tiiuae/falcon-40b"):
        resolve_model("falcon")


def test_unknown_name_suggests_and_names_the_next_command() -> None:
    with pytest.raises(NotFoundError, match="Did you mean") as caught:
        resolve_model("Lama-2-7b-hf")

    assert "Llama-2-7b-hf" in caught.value.problem
    assert "tightfit models" in caught.value.remedy


@pytest.mark.parametrize(
    "name", ["", "  ", "\0", "x" * 10_000, "~nobody-here/x", "../../etc/none", "\ud800", "a/b/c"]
)
def test_strange_names_are_not_found_rather_than_a_crash(name: str) -> None:
    with pytest.raises(NotFoundError):
        resolve_model(name)


def test_folder_gives_spec_and_size_of_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x" * 1000)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"x" * 234)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 99)

    spec = resolve_model(str(folder))

    assert (spec.name, spec.num_params, spec.file_bytes) == ("mine", TINY_PARAMS, 1234)
    assert spec.source.endswith("config.json")


def test_training_state_is_not_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")
    (folder / "training_args.bin").write_bytes(b"x" * 99)

    assert resolve_model(str(folder)).file_bytes is None


def test_config_file_itself(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "mine")

    assert resolve_model(str(folder / "config.json")).num_params == TINY_PARAMS


def test_a_folder_with_a_model_comes_before_the_catalogue(tmp_path: Path) -> None:
    write_model(tmp_path / "gpt2")

    assert resolve_model("gpt2").num_params == TINY_PARAMS


def test_a_folder_without_a_model_does_not_hide_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()

    assert resolve_model("gpt2").name == "openai-community/gpt2"


def test_folder_without_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("file", "expected"), [("params.json", "Meta's original"), ("adapter_config.json", "adapter")]
)
def test_folders_that_are_almost_models(tmp_path: Path, file: str, expected: str) -> None:
    folder = tmp_path / "almost"
    folder.mkdir()
    (folder / file).write_text("{}")
    with pytest.raises(InvalidInputError, match=expected):
        resolve_model(str(folder))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidInputError, match="is not a model"):
        resolve_model(str(tmp_path / "notes.txt"))


def write_snapshot(cache: Path, hub_id: str, revision: str) -> Path:
    home = cache / f"models--{hub_id.replace('/', '--')}"
    return write_model(home / "snapshots" / revision)


def test_hub_id_in_the_cache_follows_main(tmp_path: Path) -> None:
    write_snapshot(tmp_path, "acme/tiny", "old")
    current = write_snapshot(tmp_path, "acme/tiny", "new")
    refs = current.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("old\n")

    spec = resolve_model("acme/tiny", hub_cache=tmp_path)

    assert spec.name == "acme/tiny"
    assert "/old/" in spec.source


def test_hub_id_without_a_ref_takes_what_is_there(tmp_path: Path) -> None:
    write_snapshot(tmp_path, "acme/tiny", "abc")

    assert resolve_model("acme/tiny", hub_cache=tmp_path).num_params == TINY_PARAMS


def test_hub_cache_is_found_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    write_snapshot(tmp_path / "hub", "acme/tiny", "abc")

    assert resolve_model("acme/tiny").name == "acme/tiny"


def test_a_cached_tune_is_read_itself_not_by_its_base(tmp_path: Path) -> None:
    write_snapshot(tmp_path, "meta-llama/Llama-2-7b-chat-hf", "abc")

    spec = resolve_model("meta-llama/Llama-2-7b-chat-hf", hub_cache=tmp_path)

    assert spec.num_params == TINY_PARAMS


def test_resolving_opens_one_config_and_loads_nothing_heavy() -> None:
    probe = (
        "import sys; from tightfit.models.resolve import resolve_model, list_models;"
        "list_models(); resolve_model('Llama-2-7b'); print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", probe], text=True).split()

    assert {"torch", "transformers", "numpy", "gguf", "huggingface_hub"}.isdisjoint(loaded)


def test_a_changed_copy_counts_anew() -> None:
    spec = resolve_model("gpt2")
    counted = spec.num_params
    longer = spec.model_copy(update={"outer_params": spec.outer_params + 7})

    assert longer.num_params == counted + 7
    assert spec == resolve_model("gpt2")
    assert spec.model_dump() == resolve_model("gpt2").model_dump()


@pytest.mark.parametrize(
    "name", ["no\nsuch", "a\x1b[31mb", "Llama-2\n-7b-chat", "falcon\x1b", "\x1b7B-params", "7\nb"]
)
def test_control_characters_never_reach_a_message_or_a_name(name: str) -> None:
    try:
        spec = resolve_model(name)
        shown = [spec.name, spec.source, *spec.warnings]
    except UserError as error:
        shown = [error.problem, error.remedy]
    assert all(text.isprintable() for text in shown), shown


def test_a_device_or_pipe_is_named_as_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for name, kind in (("/dev/zero", "a device"), (str(tmp_path / "pipe.json"), "a pipe")):
        with pytest.raises(InvalidInputError, match=f"is {kind}, not a model"):
            resolve_model(name)


def test_a_config_that_is_no_file_says_why(tmp_path: Path) -> None:
    for name in ("loop", "folder", "pipe", "dangling"):
        (tmp_path / name).mkdir()
    (tmp_path / "loop/config.json").symlink_to(tmp_path / "loop/config.json")
    (tmp_path / "folder/config.json").mkdir()
    os.mkfifo(tmp_path / "pipe/config.json")
    (tmp_path / "dangling/config.json").symlink_to(tmp_path / "gone")
    for name, words in (
        ("loop", "symbolic links"),
        ("folder", "config.json is a folder"),
        ("pipe", "config.json is a pipe"),
        ("dangling", "No such file"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            resolve_model(str(tmp_path / name))


@pytest.mark.parametrize("method", ["lstat", "open", "stat"])
def test_no_permission_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    folder = write_model(tmp_path / "mine")
    owner: Any = os if method == "open" else Path
    real = getattr(owner, method)

    def refuse(path: Path, *args: object, **rest: object) -> object:
        if Path(path).is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **rest)

    monkeypatch.setattr(owner, method, refuse)
    with pytest.raises(SetupError, match="permission denied"):
        resolve_model(str(folder))

"""Finding a model's files: what is whole is given, what is not is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import make_model, model_folder, write_model
from transformers import AutoModelForCausalLM

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.runtime.model_files import locate_model
from tightfit.runtime.tensor_files import check_weights


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of one's own, to spoil."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    home = write_model(tmp_path / "sharded", shard_size="20KB")
    assert len(list(home.glob("model-*.safetensors"))) > 2
    return home


def problem_of(name: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        locate_model(str(name))
    return f"{caught.value.problem} | {caught.value.remedy}"


def test_a_whole_folder_is_itself(folder: Path, sharded: Path) -> None:
    assert locate_model(str(folder)) == folder
    assert locate_model(str(folder / "config.json")) == folder
    assert locate_model(str(sharded)) == sharded


def test_a_truncated_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    assert "model.safetensors is cut short" in problem_of(folder)


@pytest.mark.parametrize("keep", [0, 4, 30])
def test_a_file_cut_in_its_header(keep: int, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])

    assert "model.safetensors is" in problem_of(folder)


def test_every_invalid_shard_is_named_at_once(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    problem = problem_of(sharded)

    assert f"{first.name} is missing" in problem
    assert f"{second.name} is cut short" in problem


def test_a_tensor_the_index_promises(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["lm_head.weight"]
    content["weight_map"]["model.extra.weight"] = shard
    index.write_text(json.dumps(content))

    assert f"{shard} lacks the tensor model.extra.weight" in problem_of(sharded)


def test_a_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid 1\n")

    assert "git lfs pull" in problem_of(folder)


def test_a_pickle_cut_short(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    pickled = folder / "pytorch_model.bin"
    torch.save(make_model("llama").state_dict(), pickled)
    check_weights(folder)
    pickled.write_bytes(pickled.read_bytes()[:-100])

    assert "pytorch_model.bin is cut short" in problem_of(folder)


def test_no_weights_and_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in problem_of(folder)
    (folder / "model.safetensors").unlink()
    assert "no weights" in problem_of(folder)
    assert locate_model(str(folder), needs_weights=False) == folder


def test_hub_cache_by_id_and_alias(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    home = hub / "models--HuggingFaceTB--SmolLM2-135M"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    snapshot = home / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))

    assert locate_model("HuggingFaceTB/SmolLM2-135M") == snapshot
    assert locate_model("smollm2-135m") == snapshot


def test_known_by_catalogue_alone() -> None:
    problem = problem_of("HuggingFaceTB/SmolLM2-135M")

    assert "not on this machine" in problem
    assert "hf download HuggingFaceTB/SmolLM2-135M" in problem
    assert "licence" not in problem


@pytest.mark.parametrize(
    ("token", "said", "command"),
    [
        ("none", "no variable HF_TOKEN and no file {home}/token", "hf auth login && hf download "),
        ("file", "in the file {home}/token", "hf download "),
        ("variable", "in the variable HF_TOKEN", "hf download "),
    ],
)
def test_a_gated_model_says_which_token_is_looked_for(
    token: str, said: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if token == "file":
        (tmp_path / "token").write_text("hf_secret")
    if token == "variable":
        monkeypatch.setenv("HF_TOKEN", "hf_secret")

    with pytest.raises(NotFoundError) as refused:
        locate_model("google/gemma-2-2b")

    assert "licence at https://huggingface.co/google/gemma-2-2b" in refused.value.problem
    assert said.format(home=tmp_path) in refused.value.problem
    assert "hf_secret" not in refused.value.problem
    assert refused.value.remedy.startswith(f"{command}google/gemma-2-2b")


@pytest.mark.parametrize("name", ["no-such-model", " ", "7B-params", "a\0b", "x" * 5000])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(NotFoundError):
        locate_model(name)


def test_a_run_of_full_tuning_is_its_model(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    assert "has not left a model yet" in problem_of(run)
    shutil.copytree(folder, run / "model")

    assert locate_model(str(run)) == run / "model"


def test_adapters_are_not_models(tmp_path: Path) -> None:
    run = tmp_path / "run"
    adapter = run / "adapter"
    adapter.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')

    assert "name its base model: some/base" in problem_of(adapter)
    assert "name its base model: some/base" in problem_of(run)


def test_other_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InvalidInputError, match="not a model"):
        locate_model(str(tmp_path / "notes.txt"))
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        locate_model(str(tmp_path))


def test_an_old_tokenizer_is_converted_once(tmp_path: Path) -> None:
    """GPT-2's vocabulary and merges become a tokenizer.json; the weights stay where they are."""
    folder = tmp_path / "gpt2"
    shutil.copytree(model_folder("gpt2"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    vocabulary = {letter: index for index, letter in enumerate("abcdefghij")}
    vocabulary |= {"ab": 10, "<|endoftext|>": 11}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    home = locate_model(str(folder))

    assert home != folder
    assert (home / "tokenizer.json").is_file()
    assert (home / "model.safetensors").resolve() == folder / "model.safetensors"
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(home / "tokenizer.json")).encode("abc").ids == [10, 2]
    stamp = (home / "tokenizer.json").stat().st_mtime_ns
    assert locate_model(str(folder)) == home
    assert (home / "tokenizer.json").stat().st_mtime_ns == stamp
    assert not list(home.parent.glob("*.partial"))
    assert AutoModelForCausalLM.from_pretrained(home) is not None

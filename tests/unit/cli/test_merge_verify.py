"""`tightfit merge` and `tightfit verify` as a user meets them: output, exit codes, files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base with a tokenizer, and an adapter on it."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from small_models import make_llama

    library: Any = transformers
    make_config: Any = LoraConfig
    home = tmp_path_factory.mktemp("merge-verify")
    base = make_llama(home / "base")
    model = library.AutoModelForCausalLM.from_pretrained(base)
    config = make_config(task_type="CAUSAL_LM", target_modules="all-linear")
    adapted: Any = get_peft_model(model, config)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn_like(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(home / "adapter"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(base / name, home / "adapter" / name)
    return home


@pytest.fixture(scope="module")
def merged(home: Path) -> Path:
    from tightfit.cli.app import main

    assert main(["merge", str(home / "adapter"), "--no-verify", "--out", str(home / "model")]) == 0
    return home / "model"


def test_merge_checks_what_it_made(run: Run, home: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(home / "adapter", tmp_path / "adapter")

    answer = run("merge", str(adapter))

    assert answer.code == 0, answer.err
    assert "All of them pass." in answer.out
    assert "predicted" in answer.out
    assert "measured" in answer.out
    assert "merging takes" in answer.err
    assert (tmp_path / "adapter-merged" / "model.safetensors").is_file()


def test_merge_as_json(run: Run, home: Path, tmp_path: Path) -> None:
    answer = run(
        "merge", str(home / "adapter"), "--out", str(tmp_path / "m"), "--json", "--dtype", "bf16"
    )

    assert answer.code == 0, answer.err
    assert answer.json["dtypes"] == ["bfloat16"]
    assert answer.json["verdict"]["rows"][0]["kind"] == "format"
    assert answer.json["predicted"]["host_bytes"] > 0


def test_a_broken_merge_is_kept_apart(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that forgets one matrix: the check has to see it, the old model has to stay."""
    from tightfit.export.merge import MergePlan

    out = tmp_path / "model"
    assert run("merge", str(home / "adapter"), "--no-verify", "--out", str(out)).code == 0
    before = (out / "model.safetensors").read_bytes()
    apply = MergePlan.apply

    def forgetful(self: MergePlan, name: str, stored: Any) -> Any:
        is_lost = name == "model.layers.1.mlp.up_proj.weight"
        return stored if is_lost else apply(self, name, stored)

    monkeypatch.setattr(MergePlan, "apply", forgetful)
    answer = run("merge", str(home / "adapter"), "--out", str(out), "--force")

    assert answer.code == 8
    assert "error:" in answer.err
    assert (out / "model.safetensors").read_bytes() == before
    assert (tmp_path / "model.rejected" / "model.safetensors").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.rejected"}


def test_verify_passes_and_fails(run: Run, home: Path, merged: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(merged, tmp_path / "damaged")
    template = damaged / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", ""))
    page = tmp_path / "report.html"
    common = ("--tokens", "300", "--device", "cpu")

    good = run("verify", str(home / "adapter"), str(merged), *common)
    bad = run(
        "verify", str(home / "adapter"), str(merged), str(damaged), *common, "--html", str(page)
    )

    assert good.code == 0, good.out
    assert bad.code == 8
    assert "1 of 2 models did not pass." in bad.out
    assert "The chat template writes another text" in bad.out
    assert "chat_template.jinja" in bad.out
    markup = page.read_text()
    assert "damaged" in markup
    assert markup.count("<svg") == 1
    assert "http" not in markup.replace("http-equiv", "")


def test_verify_as_json_with_own_text_and_prompts(
    run: Run, home: Path, merged: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 30)
    (tmp_path / "prompts.jsonl").write_text(
        json.dumps({"instruction": "How many singers?", "output": "Three."}) + "\n"
    )

    answer = run(
        "verify", str(home / "adapter"), str(merged), "--json", "--device", "cpu",
        "--text", str(tmp_path / "text.txt"), "--prompts", str(tmp_path / "prompts.jsonl"),
    )  # fmt: skip

    assert answer.code == 0, answer.err
    assert answer.json["text"] == "text.txt"
    (row,) = answer.json["rows"]
    assert row["num_prompts"] == 1
    assert "How many singers?" in row["answers"][0]["prompt"]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("verify", "{model}"), 2, "OTHER"),
        (("verify", "{model}", "/nowhere/at/all"), 3, "nowhere"),
        (("verify", "{model}", "{model}", "--as", "9-bit"), 2, "--as"),
        (("verify", "{model}", "{model}", "--text", "/no/such.txt"), 3, "no/such.txt"),
        (("merge", "{model}"), 2, "whole model already"),
        (("merge", "{adapter}", "--dtype", "int3"), 2, "--dtype"),
        (("merge", "{adapter}", "--max-shard-size", "tiny"), 4, "size"),
        (("merge", "{adapter}", "--out", "{model}"), 2, "there already"),
    ],
)
def test_mistakes_are_told(
    run: Run, home: Path, merged: Path, argv: tuple[str, ...], code: int, says: str
) -> None:
    reported = [word.format(model=merged, adapter=home / "adapter") for word in argv]

    answer = run(*reported)

    assert answer.code == code, answer.err
    assert says in answer.err
    assert "try:" in answer.err

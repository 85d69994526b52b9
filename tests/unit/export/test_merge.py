"""Merging against peft: the merged model says what the adapter on its base says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import ADAPTERS, load_adapted, load_plain, make_adapter, make_base, scores

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.export.merge import MergeRequest, MergeResult, merge_adapter
from tightfit.runtime.model_files import find_artefact

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
FP32_NOISE = 2e-5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge")


def base_of(home: Path, name: str, **options: Any) -> Path:
    folder = home / "-".join([name, *(str(value) for value in options.values())])
    return folder if folder.exists() else make_base(folder, name, **options)


def merge(adapter: Path, target: Path, **settings: Any) -> MergeResult:
    artefact = find_artefact(str(adapter))
    return merge_adapter(MergeRequest(artefact=artefact, target=target, **settings))


def assert_same(base: Path, adapter: Path, target: Path) -> None:
    truth = scores(load_adapted(base, adapter))
    found = scores(load_plain(target))
    assert (truth - scores(load_plain(base))).abs().max() > 0.05, "the adapter does nothing"
    assert (truth - found).abs().max() <= FP32_NOISE * truth.abs().max()


@pytest.mark.parametrize(
    ("base_name", "name"),
    [
        (base_name, name)
        for base_name in ("llama", "tied")
        for name in ADAPTERS
        if (base_name, name) != ("tied", "lora-bias")  # that base has no biases
    ],
)
def test_every_kind_of_adapter(home: Path, tmp_path: Path, base_name: str, name: str) -> None:
    base = base_of(home, base_name)
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS[name])

    merged = merge(adapter, tmp_path / "merged")

    assert_same(base, adapter, tmp_path / "merged")
    assert merged.predicted.is_streamed
    assert merged.num_changed > 0


@pytest.mark.parametrize(
    ("base_name", "settings"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
        ("t5", {"target_modules": ["q", "v", "wi"]}),
        ("mixtral", {"target_modules": ["q_proj"]}),
    ],
)
def test_other_families(
    home: Path, tmp_path: Path, base_name: str, settings: dict[str, Any]
) -> None:
    base = base_of(home, base_name)
    adapter = make_adapter(tmp_path / "adapter", base, **settings)

    merge(adapter, tmp_path / "merged")

    assert_same(base, adapter, tmp_path / "merged")


def test_stacked_experts_are_merged_in_memory(home: Path, tmp_path: Path) -> None:
    """Mixtral's files hold each expert apart; the adapter was trained on all of them stacked."""
    base = base_of(home, "mixtral")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = make_adapter(
        tmp_path / "adapter", base, target_modules=["q_proj"], target_parameters=targets
    )

    merged = merge(adapter, tmp_path / "merged")

    assert not merged.predicted.is_streamed
    assert_same(base, adapter, tmp_path / "merged")


def test_merging_agrees_with_peft_tensor_by_tensor(home: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    base = base_of(home, "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])
    merge(adapter, tmp_path / "merged")

    truth = load_adapted(base, adapter).merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")

    assert set(found) == set(truth)
    for name, value in found.items():
        torch.testing.assert_close(value, truth[name], rtol=1e-6, atol=1e-6)


def test_a_tied_head_is_untied_and_the_embeddings_stay(home: Path, tmp_path: Path) -> None:
    """peft's own merge would write the head's change into the embeddings too."""
    base = base_of(home, "tied")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["head"])

    merged = merge(adapter, tmp_path / "merged")

    model = load_plain(tmp_path / "merged")
    assert torch.equal(model.model.embed_tokens.weight, load_plain(base).model.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert any("one matrix" in note for note in merged.notes)


def test_embeddings_trained_as_one_stay_tied(home: Path, tmp_path: Path) -> None:
    base = base_of(home, "tied")
    adapter = make_adapter(
        tmp_path / "adapter", base, ensure_weight_tying=True, **ADAPTERS["saved-embeddings"]
    )

    merge(adapter, tmp_path / "merged")

    model = load_plain(tmp_path / "merged")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("base_name", ["llama", "tied"])
def test_added_tokens(home: Path, tmp_path: Path, base_name: str) -> None:
    base = base_of(home, base_name)
    rows = load_plain(base).config.vocab_size + 2
    adapter = make_adapter(tmp_path / "adapter", base, rows=rows, target_modules=["q_proj"])

    merged = merge(adapter, tmp_path / "merged")

    found = load_plain(tmp_path / "merged")
    truth = load_adapted(base, adapter, rows=rows)
    assert found.config.vocab_size == rows
    assert (scores(truth) - scores(found)).abs().max() < 1e-4
    assert any("vocabulary" in note for note in merged.notes)


@pytest.mark.parametrize(("dtype", "wanted"), [(None, torch.bfloat16), (Dtype.FP32, torch.float32)])
def test_the_base_s_own_precision(
    home: Path, tmp_path: Path, dtype: Dtype | None, wanted: torch.dtype
) -> None:
    """Each matrix is added to in fp32 and rounded once, whatever it is stored as."""
    from safetensors.torch import load_file

    base = base_of(home, "llama", dtype=torch.bfloat16)
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])

    merge(adapter, tmp_path / "merged", dtype=dtype)

    found = load_file(tmp_path / "merged" / "model.safetensors")
    truth = load_adapted(base, adapter).merge_and_unload().state_dict()
    assert {value.dtype for value in found.values()} == {wanted}
    for name, value in found.items():
        torch.testing.assert_close(value, truth[name].to(wanted), rtol=1e-6, atol=1e-6)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == str(wanted).removeprefix("torch.")


def test_shards_in_and_out(home: Path, tmp_path: Path) -> None:
    base = base_of(home, "llama", shard_size="100KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])

    merge(adapter, tmp_path / "merged", max_shard_bytes=150_000)

    shards = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 160_000 for path in shards)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert_same(base, adapter, tmp_path / "merged")


def test_pickled_weights(home: Path, tmp_path: Path) -> None:
    base = shutil.copytree(base_of(home, "llama"), tmp_path / "base")
    from safetensors.torch import load_file

    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    homes: dict[str, str] = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, base / file)
        homes |= dict.fromkeys(part, file)
    (base / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": homes}
    (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])

    merge(adapter, tmp_path / "merged")

    assert_same(base, adapter, tmp_path / "merged")


def test_a_checkpoint_without_the_prefix(home: Path, tmp_path: Path) -> None:
    """GPT-2's published files leave out `transformer.`."""
    from safetensors.torch import load_file, save_file

    base = shutil.copytree(base_of(home, "gpt2"), tmp_path / "base")
    held = load_file(base / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in held.items()}
    save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(
        tmp_path / "adapter", base, target_modules=["c_attn"], fan_in_fan_out=True
    )

    merge(adapter, tmp_path / "merged")

    assert_same(base, adapter, tmp_path / "merged")


def test_what_the_model_speaks_with_goes_along(home: Path, tmp_path: Path) -> None:
    base = base_of(home, "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, adapter / name)
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }} of training")

    merge(adapter, tmp_path / "merged")

    merged = tmp_path / "merged"
    assert (merged / "chat_template.jinja").read_text().endswith("of training")
    assert (merged / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (merged / "generation_config.json").exists()


def test_nothing_is_overwritten_unasked(home: Path, tmp_path: Path) -> None:
    base = base_of(home, "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])
    merge(adapter, tmp_path / "merged")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")

    with pytest.raises(UsageError, match="there already"):
        merge(adapter, tmp_path / "merged")
    with pytest.raises(UsageError, match="no model folder"):
        merge(adapter, tmp_path / "mine", force=True)
    with pytest.raises(UsageError, match="which is read"):
        merge(adapter, adapter, force=True)

    assert merge(adapter, tmp_path / "merged", force=True).is_accepted
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "merged", "mine"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_refused_by_name(home: Path, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    base = base_of(home, "llama")
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    with pytest.raises(InvalidInputError, match=says):
        merge(adapter, tmp_path / "merged")


def test_an_adapter_of_another_base_is_refused(home: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base_of(home, "gpt2"), target_modules=["c_attn"])
    path = adapter / "adapter_config.json"
    reported = json.loads(path.read_text()) | {
        "base_model_name_or_path": str(base_of(home, "llama"))
    }
    path.write_text(json.dumps(reported))

    with pytest.raises(InvalidInputError, match="does not fit"):
        merge(adapter, tmp_path / "merged")


def test_values_beyond_fp16_are_found(home: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = base_of(home, "llama")
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    held = load_file(adapter / "adapter_model.safetensors")
    save_file({n: v * 1000 for n, v in held.items()}, adapter / "adapter_model.safetensors")

    with pytest.raises(InvalidInputError, match="range"):
        merge(adapter, tmp_path / "merged", dtype=Dtype.FP16)

    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


_MEASURE = """
import sys
from pathlib import Path
import peft, torch, transformers
from tightfit.export.merge import MergeRequest, merge_adapter
from tightfit.runtime.model_files import find_artefact
import psutil
artefact = find_artefact(sys.argv[1])
small = find_artefact(sys.argv[2])
merge_adapter(MergeRequest(artefact=small, target=Path(sys.argv[3] + "-small")))
before = psutil.Process().memory_info().rss
merged = merge_adapter(MergeRequest(artefact=artefact, target=Path(sys.argv[3])))
print(before, merged.predicted.host_bytes, merged.peak_host_bytes, merged.size_bytes)
"""


def test_memory_is_that_of_a_matrix_not_of_the_model(home: Path, tmp_path: Path) -> None:
    """In a process of its own, warmed up by a small merge, so that only values are counted."""
    import transformers

    library: Any = transformers
    small = base_of(home, "llama")
    small_adapter = make_adapter(tmp_path / "small", small, **ADAPTERS["plain"])
    base = shutil.copytree(small, tmp_path / "base")
    config = library.AutoConfig.from_pretrained(base)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 4096, 8
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 8, 128
    library.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])

    argv = [sys.executable, "-c", _MEASURE, str(adapter), str(small_adapter)]
    out = subprocess.check_output([*argv, str(tmp_path / "merged")], text=True)
    before, predicted, peak, size = map(int, out.split()[-4:])

    assert size > 500e6
    assert peak - before < size / 3, f"{(peak - before) / 1e6:.0f} MB"
    assert 0.9 * peak < predicted < 1.2 * peak

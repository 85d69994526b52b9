"""Weights, their index and adapters, mutated: one error by the verb that would load them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutate import NAMES, mutate_bytes, mutate_tree, plant_special, write_json

from hostile_trials import StartTrials
from word_model import plant_model

pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
pytest.importorskip("peft", reason="pip install 'tightfit[train]'")
HIDDEN, INNER, LAYERS = 16, 32, 2
RANK = 2
Header = dict[str, Any]


def pack(tensors: dict[str, tuple[int, ...]]) -> tuple[Header, bytes]:
    """A header and zeros for tensors of these shapes: fp32, but for the packed ones of GPTQ."""
    header: Header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        dtype = "I32" if name.endswith(("qweight", "qzeros", "g_idx")) else "F32"
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return header, bytes(end)


def join(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data


def write(path: Path, header: Header, data: bytes) -> None:
    path.write_bytes(join(json.dumps(header).encode(), data))


def list_weights(num_words: int) -> dict[str, tuple[int, ...]]:
    """Of the Llama of `plant_model`; it has as many query heads as others."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (num_words, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        found |= {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found |= {f"{at}.mlp.down_proj.weight": (HIDDEN, INNER)}
        found |= {
            f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")
        }
    return found | {"model.norm.weight": (HIDDEN,)}


def list_packed(num_words: int) -> dict[str, tuple[int, ...]]:
    """The same with its linear layers in 4 bits and groups of 16, as GPTQ packs them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in list_weights(num_words).items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            found[name] = shape
            continue
        rows, columns = shape
        found |= {f"{layer}.qweight": (columns // 8, rows), f"{layer}.g_idx": (columns,)}
        found |= {f"{layer}.qzeros": (columns // 16, rows // 8)}
        found |= {f"{layer}.scales": (columns // 16, rows)}
    return found


def list_adapter() -> dict[str, tuple[int, ...]]:
    at = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    return {
        at.format(layer, part): shape
        for layer in range(LAYERS)
        for part, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK)))
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/` in two shards with an index, and `adapter/` for it."""
    folder = tmp_path_factory.mktemp("weights")
    model, adapter = folder / "model", folder / "adapter"
    plant_model(model)
    (model / "model.safetensors").unlink()
    num_words = json.loads((model / "config.json").read_bytes())["vocab_size"]
    tensors = list(list_weights(num_words).items())
    homes: dict[str, str] = {}
    for number, part in enumerate((tensors[:9], tensors[9:]), start=1):
        name = f"model-{number:05}-of-00002.safetensors"
        write(model / name, *pack(dict(part)))
        homes |= {tensor: name for tensor, _ in part}
    index = {"metadata": {"total_size": 1}, "weight_map": homes}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter.mkdir()
    write(adapter / "adapter_model.safetensors", *pack(list_adapter()))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 4,
        "target_modules": ["q_proj"], "base_model_name_or_path": str(model),
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return folder


def mutate_header(rng: Random, path: Path) -> None:
    """The same file with its header changed, at times by what the format itself forbids."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry, length = header[name], None
    text = b""
    match rng.randrange(12):
        case 0:
            entry["data_offsets"] = [rng.choice((-1, 0, 8, 2**63, len(data))) for _ in range(2)]
        case 1:
            entry["shape"] = rng.choice(([-1, -64], [2**62, 4], [0], [], [1] * 100, [1.5], [True]))
        case 2:
            entry["dtype"] = rng.choice(("F99", "f32", 5, None, "I8", "F64", "BOOL", "F8_E8M0"))
        case 3:
            header[rng.choice(NAMES) or "x" * 100_000] = header.pop(name)
        case 4:
            length = rng.choice((0, 1, -1, 2**63, 2**62, size - 1, size + 1, size + len(data) + 1))
        case 5:
            header["__metadata__"] = rng.choice(([], 5, {"format": 5}, {"format": "tf"}, None, {}))
        case 6:
            data = data[: rng.randint(0, len(data))] + rng.choice((b"", b"more"))
        case 7:
            text = json.dumps(header).encode()
            text = text[:-1] + b"," + text[1:]  # each name twice
        case 8:
            other = rng.choice(list(header))
            header[name], header[other] = header[other], header[name]
        case 9:
            first, *rest = entry["shape"]
            entry["shape"] = rng.choice(([*rest, first], [1, first, *rest], [first * 2, *rest]))
        case 10:
            path.write_bytes(mutate_bytes(rng, content))
            return
        case _:
            header = mutate_tree(rng, header)
    path.write_bytes(join(text or write_json(rng, header), data, length))


def make_case(rng: Random, folder: Path, home: Path) -> list[str]:
    for name in ("model", "adapter"):
        shutil.copytree(home / name, folder / name)
    config = folder / "adapter" / "adapter_config.json"
    values = json.loads(config.read_bytes()) | {"base_model_name_or_path": str(folder / "model")}
    config.write_text(json.dumps(values))
    weights = [*sorted((folder / "model").glob("*.safetensors"))]
    weights.append(folder / "adapter" / "adapter_model.safetensors")
    index = folder / "model" / "model.safetensors.index.json"
    kind = rng.random()
    if kind < 0.6:
        mutate_header(rng, rng.choice(weights))
    elif kind < 0.75:
        tree = json.loads(index.read_bytes())
        if rng.random() < 0.5:
            tree["weight_map"][rng.choice(list(tree["weight_map"]))] = rng.choice(NAMES)
        else:
            tree = mutate_tree(rng, tree)
        index.write_bytes(write_json(rng, tree))
    elif kind < 0.9:
        config.write_bytes(write_json(rng, mutate_tree(rng, values)))
    else:
        plant_special(rng, rng.choice((*weights, index, config)))
    return rng.choice(
        (
            ["merge", "adapter", "--out", "out", "--no-verify"],
            ["convert", "model", "--to", "gguf", "--out", "model.gguf"],
            ["convert", "adapter", "--to", "gguf-lora", "--out", "a.gguf"],
            ["prepare", "model", "--data", "adapter"],
        )
    )


def test_safetensors(trials: StartTrials, home: Path) -> None:
    trials("safetensors", num_short=200).run(lambda rng, folder: make_case(rng, folder, home))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "model"
    plant_model(folder)
    config = json.loads((folder / "config.json").read_bytes())
    write(folder / "model.safetensors", *pack(list_packed(config["vocab_size"])))
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return folder


def make_packed_case(rng: Random, folder: Path, packed: Path) -> list[str]:
    shutil.copytree(packed, folder / "model")
    config = folder / "model" / "config.json"
    if rng.random() < 0.7:
        mutate_header(rng, folder / "model" / "model.safetensors")
    else:
        tree = json.loads(config.read_bytes())
        stated = mutate_tree(rng, tree["quantization_config"])
        config.write_bytes(write_json(rng, tree | {"quantization_config": stated}))
    (folder / "ask.txt").write_text("add 1 and 1\n")
    words = ["generate", "model", "--prompts", "ask.txt", "--out", "out.jsonl", "--no-check"]
    return [*words, "--device", "cpu", "--max-new-tokens", "1"]


def test_gptq(trials: StartTrials, packed: Path) -> None:
    once = trials("gptq", num_short=20)
    whole = ["--prompts", "ask.txt", "--out", "o", "--no-check", "--max-new-tokens", "1"]

    def make(folder: Path) -> list[str]:
        (folder / "ask.txt").write_text("add 1 and 1\n")
        return ["generate", str(packed), *whole]

    assert once.run_one("whole", make) == 0
    once.run(lambda rng, folder: make_packed_case(rng, folder, packed))


@pytest.mark.parametrize("verb", ["merge", "generate"])
@pytest.mark.parametrize("lost", ["shape", "name", "dtype", "extra", "rank"])
def test_tensors_of_another_model(trials: StartTrials, home: Path, verb: str, lost: str) -> None:
    """Whole files by the format, with what this model or adapter does not have."""
    wrong: dict[str, Callable[[dict[str, Any]], None]] = {
        "shape": lambda h: h[first(h)].update(shape=[*h[first(h)]["shape"][::-1], 1]),
        "name": lambda h: h.update({"nothing.weight": h.pop(first(h))}),
        "dtype": lambda h: h[first(h)].update(dtype="I32"),
        "extra": lambda h: h.update(
            {"more.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
        ),
        "rank": lambda h: h[first(h)].update(shape=[h[first(h)]["shape"][0] * 2, HIDDEN // 2]),
    }

    def first(header: dict[str, Any]) -> str:
        return next(name for name in header if name != "__metadata__")

    def make(folder: Path) -> list[str]:
        for name in ("model", "adapter"):
            shutil.copytree(home / name, folder / name)
        config = folder / "adapter" / "adapter_config.json"
        values = json.loads(config.read_bytes())
        config.write_text(json.dumps(values | {"base_model_name_or_path": str(folder / "model")}))
        header, data = pack(list_adapter())
        wrong[lost](header)
        write(folder / "adapter" / "adapter_model.safetensors", header, data)
        (folder / "ask.txt").write_text("add 1 and 1\n")
        if verb == "merge":
            return ["merge", "adapter", "--out", "out", "--no-verify"]
        return ["generate", "adapter", "--prompts", "ask.txt", "--out", "out.jsonl", "--no-check"]

    assert trials("tensors of another model").run_one(lost, make) != 70

"""Meta's checkpoints as Hugging Face folders, against Meta's own arithmetic and tokenizers."""

from __future__ import annotations

import base64
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from small_models import SENTENCES
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.export.convert import plan_conversion
from tightfit.export.meta_checkpoint import feed_forward_width

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DIM, LAYERS, HEADS, WIDTH = 64, 2, 4, 192
"""The width is what Meta's rule makes of 64 and a multiple of 32."""
TEXTS = ("Hello world", " two  spaces", "naïve café 123 😶\n\tx", SENTENCES[2])


def to_folder(source: Path, target: Path, **settings: Any) -> Path:
    return Path(plan_conversion(str(source), to="hf", target=target, **settings).run().path)


# A reference: the forward pass of Meta's `llama/model.py`, over Meta's own tensors.
def _frequencies(head_dim: int, length: int, params: dict[str, Any], *, factor: float) -> Tensor:
    theta = params.get("rope_theta", 10_000.0)
    freqs = 1.0 / (theta ** (torch.arange(0, head_dim, 2)[: head_dim // 2].float() / head_dim))
    if params.get("use_scaled_rope"):
        freqs = torch.tensor([_scaled(float(freq), factor) for freq in freqs])
    angles = torch.outer(torch.arange(length).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled(freq: float, factor: float) -> float:
    wavelen, old = 2 * math.pi / freq, 8192
    if wavelen < old / 4:
        return freq
    if wavelen > old / 1:
        return freq / factor
    smooth = (old / wavelen - 1) / (4 - 1)
    return (1 - smooth) * freq / factor + smooth * freq


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def meta_forward(
    state: dict[str, Tensor], params: dict[str, Any], tokens: Tensor, *, factor: float = 8.0
) -> Tensor:
    heads, kv_heads = params["n_heads"], params.get("n_kv_heads") or params["n_heads"]
    head_dim, eps = params["dim"] // heads, params["norm_eps"]
    batch, length = tokens.shape
    turns = _frequencies(head_dim, length, params, factor=factor)
    hidden = state["tok_embeddings.weight"][tokens]
    mask = torch.full((length, length), float("-inf")).triu(1)
    for layer in range(params["n_layers"]):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in state.items()}
        x = _norm(hidden, own["attention_norm.weight"], eps)
        q, k, v = (x @ own[f"attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        q = _rotate(q.view(batch, length, heads, head_dim), turns)
        k = _rotate(k.view(batch, length, kv_heads, head_dim), turns)
        v = v.view(batch, length, kv_heads, head_dim)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim) + mask
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(batch, length, -1)
        hidden = hidden + mixed @ own["attention.wo.weight"].T
        x = _norm(hidden, own["ffn_norm.weight"], eps)
        gate = torch.nn.functional.silu(x @ own["feed_forward.w1.weight"].T)
        up = x @ own["feed_forward.w3.weight"].T
        hidden = hidden + (gate * up) @ own["feed_forward.w2.weight"].T
    return _norm(hidden, state["norm.weight"], eps) @ state["output.weight"].T


def make_state(vocab: int, *, kv_heads: int, is_tied: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(5)
    kv = DIM // HEADS * kv_heads
    shapes = {"tok_embeddings.weight": (vocab, DIM), "norm.weight": (DIM,)}
    shapes["output.weight"] = (vocab, DIM)
    for layer in range(LAYERS):
        for name, shape in {
            "attention.wq": (DIM, DIM),
            "attention.wk": (kv, DIM),
            "attention.wv": (kv, DIM),
            "attention.wo": (DIM, DIM),
            "feed_forward.w1": (WIDTH, DIM),
            "feed_forward.w2": (DIM, WIDTH),
            "feed_forward.w3": (WIDTH, DIM),
            "attention_norm": (DIM,),
            "ffn_norm": (DIM,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    state = {
        name: torch.randn(shape) * 0.2 + (1 if len(shape) == 1 else 0)
        for name, shape in shapes.items()
    }
    if is_tied:
        state["output.weight"] = state["tok_embeddings.weight"].clone()
    return state


def write_shards(
    folder: Path, state: dict[str, Tensor], params: dict[str, Any], *, count: int, embeds_by: int
) -> None:
    """Split as fairscale's model-parallel layers are; Llama 3 splits the embedding by rows."""
    axis = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0, "wo": 1, "w2": 1}
    axis["tok_embeddings"] = embeds_by
    for number in range(count):
        shard = {"rope.freqs": torch.ones(8)}
        for name, value in state.items():
            kind = name.split(".")[-2]
            parts = value.chunk(count, axis[kind]) if kind in axis else [value] * count
            shard[name] = parts[number].clone()
        torch.save(shard, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))


def make_llama_2(folder: Path, *, count: int = 1, kv_heads: int = HEADS) -> dict[str, Any]:
    folder.mkdir()
    vocab = make_pieces(folder)
    params = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "norm_eps": 1e-5}
    params |= {"multiple_of": 32, "vocab_size": -1}
    if kv_heads != HEADS:
        params["n_kv_heads"] = kv_heads
    state = make_state(vocab, kv_heads=kv_heads)
    write_shards(folder, state, params, count=count, embeds_by=1)
    return {"state": state, "params": params, "vocab": vocab}


def make_pieces(folder: Path) -> int:
    """SentencePiece as Llama 2's: `<unk>`, `<s>`, `</s>` first."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SENTENCES, *TEXTS] * 2),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return int(processor.vocab_size())


def make_ranks(folder: Path) -> dict[bytes, int]:
    """A tiktoken file: all bytes, then merges in the order of their rank."""
    words = [b" the", b"th", b"he", b"in", b" s", b"ll", b"12", b"123", b"  ", b"\n\n", b"lo"]
    tokens = [bytes([byte]) for byte in range(256)] + [b" t", *words, b"hello", b"el"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    return {token: rank for rank, token in enumerate(tokens)}


def make_llama_3(folder: Path, *, count: int, is_tied: bool, is_scaled: bool) -> dict[str, Any]:
    folder.mkdir()
    vocab = len(make_ranks(folder)) + 256
    vocab += -vocab % 2
    params: dict[str, Any] = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": 2}
    params |= {"norm_eps": 1e-5, "multiple_of": 32, "rope_theta": 500_000.0, "vocab_size": vocab}
    if is_scaled:
        params["use_scaled_rope"] = True
    state = make_state(vocab, kv_heads=2, is_tied=is_tied)
    write_shards(folder, state, params, count=count, embeds_by=0)
    return {"state": state, "params": params, "vocab": vocab}


def furthest(folder: Path, made: dict[str, Any], *, factor: float = 8.0) -> float:
    """Largest difference between transformers' scores and the reference's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, made["vocab"], (2, 96), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(tokens).logits
    theirs = meta_forward(made["state"], made["params"], tokens, factor=factor)
    assert theirs.std() > 0.5  # else anything would agree
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize(("count", "kv_heads"), [(1, 4), (2, 4), (2, 2), (4, 4)])
def test_llama_2_computes_as_metas_code(tmp_path: Path, count: int, kv_heads: int) -> None:
    made = make_llama_2(tmp_path / "meta", count=count, kv_heads=kv_heads)

    folder = to_folder(tmp_path / "meta", tmp_path / "hf")

    assert furthest(folder, made) < 1e-4
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert config["intermediate_size"] == WIDTH


@pytest.mark.parametrize(
    ("count", "is_tied", "is_scaled", "factor"),
    [(1, False, False, 8.0), (2, False, True, 8.0), (1, True, True, 32.0)],
)
def test_llama_3_computes_as_metas_code(
    tmp_path: Path, count: int, is_tied: bool, is_scaled: bool, factor: float
) -> None:
    made = make_llama_3(tmp_path / "meta", count=count, is_tied=is_tied, is_scaled=is_scaled)

    folder = to_folder(tmp_path / "meta", tmp_path / "hf")

    assert furthest(folder, made, factor=factor) < 1e-4
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.tie_word_embeddings is is_tied
    assert config.rope_parameters["rope_type"] == ("llama3" if is_scaled else "default")
    if is_scaled:
        assert config.rope_parameters["factor"] == factor
        assert config.max_position_embeddings == 131_072


def test_the_reference_sees_a_missing_rotary_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_llama_2(tmp_path / "meta")
    monkeypatch.setattr(
        "tightfit.export.meta_checkpoint.split_rotary", lambda values, _heads: values
    )

    assert furthest(to_folder(tmp_path / "meta", tmp_path / "hf"), made) > 0.1


def test_sentencepiece_tokens_are_sentencepieces_own(tmp_path: Path) -> None:
    import sentencepiece

    make_llama_2(tmp_path / "meta")
    folder = to_folder(tmp_path / "meta", tmp_path / "hf")

    theirs = sentencepiece.SentencePieceProcessor(
        model_file=str(tmp_path / "meta" / "tokenizer.model")
    )
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text
        assert ours.encode(text).ids[0] == theirs.bos_id()
        assert ours.decode(ours.encode(text).ids) == text


def byte_pairs(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule: merge the adjacent pair of the lowest rank until none is left."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        pairs = [(ranks.get(pair, 10**9), at) for at, pair in enumerate(joined)]
        best, at = min(pairs, default=(10**9, 0))
        if best == 10**9:
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_tiktoken_tokens_follow_the_ranks(tmp_path: Path) -> None:
    made = make_llama_3(tmp_path / "meta", count=1, is_tied=False, is_scaled=True)
    ranks = make_ranks(tmp_path / "meta")
    folder = to_folder(tmp_path / "meta", tmp_path / "hf")

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for word in ("hello", " then", "lol", "12", "123", " sinful", "é", "thhe", "elll"):
        ids = tokenizer.encode(word, add_special_tokens=False).ids
        assert ids == byte_pairs(word.encode(), ranks), word
    begin = len(ranks)
    assert tokenizer.encode("a").ids == [begin, ranks[b"a"]]
    numbered = [tokenizer.token_to_id(name) for name in ("<|eom_id|>", "<|eot_id|>")]
    assert numbered == [begin + 8, begin + 9]  # 128009 and 128008 in the real one
    assert tokenizer.get_vocab_size() == begin + 256 <= made["vocab"]
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [begin + 1, begin + 8, begin + 9]


def test_a_file_that_is_missing_or_cut_short_is_told(tmp_path: Path) -> None:
    make_llama_2(tmp_path / "meta", count=2)
    second = tmp_path / "meta" / "consolidated.01.pth"
    whole = second.read_bytes()

    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInputError, match=r"01\.pth is cut short"):
        to_folder(tmp_path / "meta", tmp_path / "hf")
    second.unlink()
    with pytest.raises(InvalidInputError, match="1 of 2 consolidated"):
        to_folder(tmp_path / "meta", tmp_path / "hf")
    second.write_bytes(whole)
    (tmp_path / "meta" / "tokenizer.model").unlink()
    with pytest.raises(NotFoundError, match=r"tokenizer\.model"):
        to_folder(tmp_path / "meta", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_params_of_another_model_are_refused(tmp_path: Path) -> None:
    made = make_llama_2(tmp_path / "meta")
    params = tmp_path / "meta" / "params.json"

    params.write_text(json.dumps(made["params"] | {"multiple_of": 512}))
    with pytest.raises(InvalidInputError, match=r"192 wide; by params\.json they would be 512"):
        to_folder(tmp_path / "meta", tmp_path / "hf")
    params.write_text(json.dumps(made["params"] | {"n_layers": 3}))
    with pytest.raises(InvalidInputError, match=r"lacks layers\.2\."):
        to_folder(tmp_path / "meta", tmp_path / "hf")


def test_published_feed_forward_widths() -> None:
    """Of the models' params.json, beside the width in their published config.json."""
    assert feed_forward_width(4096, multiple_of=256) == 11_008  # Llama 2 7B
    assert feed_forward_width(5120, multiple_of=256) == 13_824  # Llama 2 13B
    assert feed_forward_width(8192, multiple_of=4096, multiplier=1.3) == 28_672  # Llama 2 70B
    assert feed_forward_width(4096, multiple_of=1024, multiplier=1.3) == 14_336  # Llama 3 8B
    assert feed_forward_width(2048, multiple_of=256, multiplier=1.5) == 8192  # Llama 3.2 1B


def test_shards_with_an_index_and_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightfit.export.meta_checkpoint import plan_meta

    made = make_llama_2(tmp_path / "meta", count=2)
    monkeypatch.setattr("tightfit.export.meta_checkpoint.REOPEN_BYTES", 10_000)  # many times over

    plan = plan_meta(tmp_path / "meta", torch.bfloat16)
    (tmp_path / "hf").mkdir()
    plan.fill(tmp_path / "hf", max_shard_bytes=60_000)

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == torch.bfloat16
    theirs = made["state"]["layers.1.feed_forward.w2.weight"].bfloat16()
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, theirs)


def test_the_command_recognises_it(tmp_path: Path) -> None:
    make_llama_2(tmp_path / "meta")

    made = plan_conversion(str(tmp_path / "meta")).run()

    assert (made.source_kind.value, made.format, made.dtype) == ("meta", "hf", "f32")
    assert made.path == str(tmp_path / "meta-hf")
    assert "Llama 2" in made.notes[0]
    with pytest.raises(UsageError, match="by way of"):
        plan_conversion(str(tmp_path / "meta"), to="gguf").run()

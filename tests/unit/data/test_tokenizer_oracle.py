"""Our tokenizer and templates against transformers' own on the same folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="un-skip with: pip install 'tightfit[train]'")

from chat_models import (
    CHATML,
    KINDS,
    LLAMA_2_NAMES,
    MARKED,
    byte_level,
    make_model,
    save_model,
    sentencepiece_like,
)

from tightfit.core.settings import TrainOn
from tightfit.data.encode_rows import mask_tokens
from tightfit.data.formats import Message
from tightfit.data.templates import ChatRenderer, choose_template, fold_system, list_templates
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer

CHATS = [
    [("user", "What is the capital of France?"), ("assistant", "Paris.")],
    [
        ("user", "  hello \n\n you "),
        ("assistant", "Grüße 🙂 日本語"),
        ("user", "SELECT name;\tFROM x"),
        ("assistant", " 12 34\nthe lazy dog \n"),
    ],
    [("system", "Be brief."), ("user", "a"), ("assistant", "{{ b }} <think>\nc\n</think> d")],
]


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def as_objects(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def ours(tokenizer: ChatTokenizer, chat: list[tuple[str, str]], template: str | None) -> Any:
    chosen = choose_template(template, tokenizer)
    renderer = ChatRenderer(tokenizer, chosen, train_on=TrainOn.ALL)
    return renderer.rows([Message(role, content) for role, content in chat])[0]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("chat", CHATS)
def test_same_tokens_as_transformers(
    kind: str, chat: list[tuple[str, str]], tmp_path: Path
) -> None:
    folder = make_model(tmp_path, kind)
    theirs, tokenizer = oracle(folder), load_tokenizer(folder)
    if kind == "gemma" and chat[0][0] == "system":
        folded = fold_system([Message(role, content) for role, content in chat])
        assert folded is not None
        expected_chat = [(m.role, m.content) for m in folded]
    else:
        expected_chat = chat
    expected = theirs.apply_chat_template(as_objects(expected_chat), return_dict=False)

    sealed = ours(tokenizer, chat, None)

    [encoding] = tokenizer.encode_sealed([sealed.text])
    assert encoding.ids == expected
    assert tokenizer.control.unseal(sealed.text) == theirs.apply_chat_template(
        as_objects(expected_chat), tokenize=False
    )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_same_prompt_as_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, kind)
    tokenizer = load_tokenizer(folder)
    chat = CHATS[1][:3]
    chosen = choose_template(None, tokenizer)
    renderer = ChatRenderer(tokenizer, chosen, train_on=TrainOn.ANSWERS)

    prompt = renderer.prompt([Message(role, content) for role, content in chat])

    [encoding] = tokenizer.encode_sealed([prompt])
    assert encoding.ids == oracle(folder).apply_chat_template(
        as_objects(chat), add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("chat", CHATS)
def test_same_mask_as_transformers_where_the_template_has_marks(
    chat: list[tuple[str, str]], tmp_path: Path
) -> None:
    # transformers finds no token at a blank where the tokenizer trims offsets, and then masks all
    chat = [(role, content.strip()) for role, content in chat]
    folder = make_model(tmp_path, "marked")
    tokenizer = load_tokenizer(folder)
    expected = oracle(folder).apply_chat_template(
        as_objects(chat), return_assistant_tokens_mask=True, return_dict=True
    )
    chosen = choose_template(None, tokenizer)
    renderer = ChatRenderer(tokenizer, chosen, train_on=TrainOn.ANSWERS)

    [sealed] = renderer.rows([Message(role, content) for role, content in chat])

    [encoding] = tokenizer.encode_sealed([sealed.text])
    trained, _ = mask_tokens(encoding.offsets, sealed.spans)
    assert encoding.ids == expected["input_ids"]
    assert trained.astype(int).tolist() == expected["assistant_masks"]


def test_marks_and_prefixes_give_one_mask(tmp_path: Path) -> None:
    """The same template with and without `{% generation %}`: two ways to one mask."""
    masks = []
    for name, template in (("marked", MARKED), ("bare", CHATML)):
        own = tmp_path / f"{name}.jinja"
        own.write_text(template)
        tokenizer = load_tokenizer(make_model(tmp_path / name, "chatml"))
        renderer = ChatRenderer(
            tokenizer, choose_template(str(own), tokenizer), train_on=TrainOn.ANSWERS
        )
        masks.append(renderer.rows([Message(role, content) for role, content in CHATS[1]]))

    assert masks[0] == masks[1]


@pytest.mark.parametrize("name", list_templates())
@pytest.mark.parametrize("kind", ["chatml", "llama-2", "llama-3"])
def test_a_named_template_renders_the_same_once_saved(name: str, kind: str, tmp_path: Path) -> None:
    """What is written beside the tuned weights gives inference the tokens of training."""
    tokenizer = load_tokenizer(make_model(tmp_path, kind))
    chosen = choose_template(name, tokenizer)
    (tmp_path / "chat_template.jinja").write_text(chosen.text)
    expected = oracle(tmp_path).apply_chat_template(as_objects(CHATS[1]), return_dict=False)

    [encoding] = tokenizer.encode_sealed([ours(tokenizer, CHATS[1], name).text])

    is_foreign = kind == "llama-2" and name in (
        "chatml",
        "hermes",
        "llama-3",
    )  # no token for its marks
    assert encoding.ids == expected + ([tokenizer.eos_id] if is_foreign else [])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_special_tokens_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, kind)
    theirs, tokenizer = oracle(folder), load_tokenizer(folder)

    assert tokenizer.eos_id == theirs.eos_token_id
    text = "hello the lazy dog"
    bos = [] if tokenizer.begins_with is None else [tokenizer.token_id(tokenizer.begins_with)]
    assert bos + tokenizer.encode(text) == theirs(text)["input_ids"]
    assert tokenizer.decode(theirs(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"])


@pytest.mark.parametrize("stated", [True, False])
def test_bos_as_the_file_says_not_the_setting(stated: bool, tmp_path: Path) -> None:
    settings = {**LLAMA_2_NAMES, "add_bos_token": stated}
    folder = save_model(tmp_path, sentencepiece_like(), settings)

    assert oracle(folder)("a")["input_ids"][0] == 1
    assert load_tokenizer(folder).begins_with == "<s>"


def test_templates_by_name_by_file_and_by_object(tmp_path: Path) -> None:
    listed = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "tools " + CHATML},
    ]
    names = {
        "bos_token": {"content": "<|im_start|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
    }
    folder = save_model(tmp_path / "a", byte_level(), {**names, "chat_template": listed})
    tokenizer = load_tokenizer(folder)

    assert choose_template(None, tokenizer).text == CHATML
    assert choose_template("tool_use", tokenizer).text == "tools " + CHATML
    assert tokenizer.names["bos_token"] == "<|im_start|>"
    (folder / "chat_template.jinja").write_text("file " + CHATML)
    assert choose_template(None, load_tokenizer(folder)).text == "file " + CHATML


def test_special_tokens_from_the_map_file(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path, byte_level(), {}, special_tokens_map={"eos_token": {"content": "<|eot_id|>"}}
    )

    assert load_tokenizer(folder).names == {"eos_token": "<|eot_id|>"}


@pytest.mark.parametrize(
    ("stated", "expected"), [(6, {6}), ([0, 6], {0, 6}), (None, set()), ([0, 10**9], {0})]
)
def test_stop_tokens_of_the_generation_config(
    stated: int | list[int] | None, expected: set[int], tmp_path: Path
) -> None:
    folder = save_model(
        tmp_path,
        byte_level(),
        {"eos_token": "<|im_end|>"},
        generation_config={"eos_token_id": stated},
    )

    assert set(load_tokenizer(folder).stop_ids) == {2} | expected


def test_pad_is_never_a_stop_token(tmp_path: Path) -> None:
    for name in ("<|im_end|>", None, "<pad>"):
        settings = {"eos_token": "<|im_end|>", **({"pad_token": name} if name else {})}
        tokenizer = load_tokenizer(save_model(tmp_path, byte_level(), settings))
        pad, note = tokenizer.choose_pad(tokenizer.stop_ids)

        assert tokenizer.token_name(pad) == "<pad>"
        assert (note is None) == (name == "<pad>")
    few = load_tokenizer(save_model(tmp_path, byte_level(["</s>"]), {"eos_token": "</s>"}))
    pad, note = few.choose_pad(few.stop_ids)
    assert pad not in few.stop_ids
    assert note is not None


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    from tightfit.core.errors import InvalidInputError, NotFoundError

    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInputError, match="JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    with pytest.raises(InvalidInputError, match="not a tokenizer"):
        load_tokenizer(tmp_path)

"""Tokenizer files as a hostile or broken model would bring them: one error names the file.

`TIGHTFIT_FUZZ_CASES=10000 pytest tests/hostile/test_tokenizers.py` makes more of the random ones.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutate import VALUES, mutate_tree, write_json
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cli_run import run_here
from hostile_trials import StartTrials
from tightfit.core.errors import UserError
from tightfit.data.formats import Message
from tightfit.data.templates import Prompter, TemplateRenderError
from tightfit.data.tokenizer import load_tokenizer
from word_model import ROWS, plant_model

NUM_SHORT = 300
SECONDS = 12.0
"""To load and to encode a little; a slow pattern is given up after eight."""
MOST_MEMORY = 2**30
MESSAGES = [Message("user", "What is <|im_end|> é 日本 " + "a" * 60 + " 123 ?")]
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>"]


def bpe() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*SPECIAL, *letters, "aa", "aaaa"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa")], unk_token="<unk>"))
    cut = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("``", '"')])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", 1)]
    )
    made.add_special_tokens(SPECIAL)
    return made


def unigram() -> Tokenizer:
    pieces = [(text, 0.0) for text in SPECIAL] + [
        (text, -2.0) for text in ("▁", "a", "aa", "▁what")
    ]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(SPECIAL)
    return made


def word_piece() -> Tokenizer:
    words = [*SPECIAL, "what", "is", "a", "##a", "1", "##2"]
    vocab = {text: number for number, text in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(SPECIAL)
    return made


SEEDS = [json.loads(make().to_str()) for make in (bpe, unigram, word_piece)]


def plant(folder: Path, document: dict[str, Any]) -> Path:
    """A sound model folder, of which a test then breaks one file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<pad>"},
    }
    listed = {"1": {"content": "<|im_start|>", "special": True}}
    settings = {**names, "added_tokens_decoder": listed, "chat_template": TEMPLATE}
    contents: dict[str, Any] = {
        "tokenizer.json": document,
        "tokenizer_config.json": settings,
        "special_tokens_map.json": names,
        "generation_config.json": {"eos_token_id": [2], "pad_token_id": 3},
        "config.json": {"model_type": "llama", "eos_token_id": 2, "vocab_size": 300},
    }
    for name, value in contents.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def attempt(folder: Path) -> UserError | None:
    """The one error of its use, in limited time and memory."""
    started, memory = time.process_time(), peak_bytes()
    found: UserError | None = None
    try:
        use(folder)
    except UserError as error:
        found = error
    assert found is None or found.remedy
    assert time.process_time() - started < SECONDS
    assert peak_bytes() - memory < MOST_MEMORY
    return found


def use(folder: Path) -> None:
    """Load, ask, encode and decode."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("What is a 12 " + "a" * 40)
    tokenizer.decode([*ids, 10**6])
    tokenizer.choose_pad(tokenizer.stop_ids)
    prompter = Prompter(tokenizer)
    with contextlib.suppress(TemplateRenderError):
        prompter.decode(prompter.ask(MESSAGES))
        prompter.continue_text("aa é")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# What once ended in a traceback, an abort, or never.


def with_part(section: str, part: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SEEDS[0]), section: part}


def cut_by(pattern: str) -> dict[str, Any]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return with_part("pre_tokenizer", part)


def with_model(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(SEEDS[0])
    document["model"] |= changes
    return document


def added(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(SEEDS[0])
    document["added_tokens"][1] |= changes
    return document


def nested(depth: int, part: Any) -> Any:
    for _ in range(depth):
        part = {"type": "Sequence", "normalizers": [part]}
    return part


def charsmap(size: int) -> dict[str, Any]:
    table = base64.b64encode(size.to_bytes(4, "little") + b"\xff" * 8).decode()
    return with_part("normalizer", {"type": "Precompiled", "precompiled_charsmap": table})


def replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


TEMPLATE_OF_NOTHING = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
UNKNOWN = [{"SpecialToken": {"id": "q", "type_id": 0}}]
DOCUMENTS: dict[str, Any] = {
    "a list": [],
    "a number": 1,
    "empty": {},
    "no vocab": {"model": {"type": "BPE"}},
    "model is a text": {"model": "BPE"},
    "vocab of texts": with_model(vocab={"a": "b"}),
    "vocab of huge numbers": with_model(vocab={"a": 10**30}),
    "vocab beyond range": with_model(vocab={"a": 2**32}),
    "vocab is null": with_model(vocab=None),
    "vocab of short lists": with_model(type="Unigram", vocab=[[]]),
    "vocab of lists of numbers": with_model(type="Unigram", vocab=[[1, 2]]),
    "merge of unknown pieces": with_model(merges=[["zzzz", "zzzz"]]),
    "merge of one text": with_model(merges=["a"]),
    "merge that slices too far": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
    },
    "merge inside a character": {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "é": 3, "b": 1, "ab": 2},
            "merges": [["é", "b"]],
            "continuing_subword_prefix": "é",
        }
    },
    "unknown token is a list": with_model(unk_token=[]),
    "word length": with_model(type="WordPiece", max_input_chars_per_word=10**9),
    "added tokens are a text": with_part("added_tokens", "abc"),
    "added token is a number": with_part("added_tokens", [1]),
    "added token without content": with_part("added_tokens", [{"id": 1}]),
    "added token without id": with_part("added_tokens", [{"content": "x"}]),
    "added token empty": added(content=""),
    "added token id is a text": added(id="1"),
    "added token id is negative": added(id=-1),
    "added token id is huge": added(id=2**63),
    "added token of private characters": added(content="\U0010fff2\U0010fff2"),
    "lone surrogate": added(content="\ud800"),
    "deep": with_part("normalizer", nested(400, {"type": "NFC"})),
    "broken pattern": cut_by("(a"),
    "backtracking": cut_by("(a|aa)+b"),
    "nested repeats": cut_by("(a+)+b"),
    "pattern too deep": cut_by("(" * 5000 + "a" + ")" * 5000),
    "charsmap without content": with_part(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "charsmap of eight gigabytes": charsmap(2**32 - 1),
    "charsmap of an odd size": charsmap(5),
    "charsmap is a number": with_part(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": 5}
    ),
    "growing text": with_part(
        "normalizer", {"type": "Sequence", "normalizers": [replace("a" * 10)] * 30}
    ),
    "growing bytes": with_part(
        "pre_tokenizer",
        {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                    "use_regex": False,
                }
            ]
            * 60,
        },
    ),
    "chunks of nothing": with_part("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "unknown special token": with_part(
        "post_processor", {**TEMPLATE_OF_NOTHING, "single": UNKNOWN}
    ),
}
SOUND_DOCUMENTS: dict[str, Any] = {
    "template of nothing": with_part("post_processor", TEMPLATE_OF_NOTHING),
    "huge truncation": with_part(
        "truncation",
        {"direction": "Right", "max_length": 2**40, "strategy": "LongestFirst", "stride": 0},
    ),
    "added id far out": added(id=2**31 - 1),
    "no added tokens": with_part("added_tokens", None),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_broken_tokenizer_file_is_named_in_one_error(name: str, tmp_path: Path) -> None:
    plant(tmp_path, DOCUMENTS[name])
    error = attempt(tmp_path)
    assert error is not None
    assert str(tmp_path / "tokenizer.json") in error.problem
    assert len(error.problem) < 600


@pytest.mark.parametrize("name", SOUND_DOCUMENTS)
def test_what_is_odd_but_sound_is_used(name: str, tmp_path: Path) -> None:
    plant(tmp_path, SOUND_DOCUMENTS[name])
    assert attempt(tmp_path) is None


def write_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def write_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def write_sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(3 * 2**30)


RAW: dict[str, Callable[[Path], object]] = {
    "a folder": write_folder,
    "a pipe": write_pipe,
    "three gigabytes": write_sparse,
    "not UTF-8": lambda path: path.write_bytes(b'{"a": "\xff\xfe"}'),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "nothing": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(100)),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000),
    "objects": lambda path: path.write_bytes(b'{"a":' * 100_000),
    "a long number": lambda path: path.write_bytes(b'{"a": ' + b"9" * 100_000 + b"}"),
    "a loop": write_loop,
}


TEXTS_TOO = {"half of it", "nothing", "zeros", "brackets", "objects", "a long number"}
"""Of a template these say something else, and are a text all the same."""


@pytest.mark.parametrize("kind", RAW)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_file_is_named_in_one_error(name: str, kind: str, tmp_path: Path) -> None:
    plant(tmp_path, SEEDS[0])
    RAW[kind](tmp_path / name)
    error = attempt(tmp_path)
    if name != "chat_template.jinja" or kind not in TEXTS_TOO:
        assert error is not None
        assert str(tmp_path / name) in error.problem


def test_a_file_of_too_many_items_is_refused_before_it_is_read(tmp_path: Path) -> None:
    plant(tmp_path, SEEDS[0])
    (tmp_path / "tokenizer.json").write_bytes(b"[" + b"[]," * 7_000_000 + b"[]]")
    error = attempt(tmp_path)
    assert error is not None
    assert "6,000,000 items" in error.problem


SETTINGS: list[dict[str, Any]] = [
    {"chat_template": [{}]},
    {"chat_template": [{"name": 1, "template": 2}]},
    {"chat_template": [{"template": "{{ 1 }}"}]},
    {"chat_template": {"default": 1}},
    {"chat_template": 1},
    {"added_tokens_decoder": {"x": {"content": [], "special": 1}}},
    {"added_tokens_decoder": []},
    {"eos_token": []},
    {"eos_token": {"content": {"content": "x"}}},
    {"bos_token": "a\U0010fff2\U0010fff2"},
    {"eos_token": 10**400},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=range(len(SETTINGS)))
def test_settings_of_wrong_types_are_passed_over_or_named(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    plant(tmp_path, SEEDS[0])
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    attempt(tmp_path)


# Random changes.

TYPES: tuple[Any, ...] = (
    *({"type": "BPE"}, {"type": "Sequence"}, {"Regex": "(a+)+b"}, {"String": ""}, [1], ["a"]),
    *("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Replace", "Metaspace"),
    *("(?<=a*)b", "<|im_end|>", "\U0010fff2", "a" * 100_000, "é" * 100, 2**31),
)
"""What these files are made of, where it does not belong."""


def break_folder(rng: Random, folder: Path) -> None:
    """Change one file of a sound folder."""
    plant(folder, copy.deepcopy(rng.choice(SEEDS)))
    path = folder / rng.choice([*FILES[:5], "tokenizer.json", "tokenizer.json"])
    tree = mutate_tree(rng, json.loads(path.read_text()), values=(*VALUES, *TYPES, *TYPES))
    path.write_bytes(write_json(rng, tree) if rng.random() < 0.2 else json.dumps(tree).encode())


def test_random_files_load_or_end_in_one_error(trials: StartTrials, tmp_path: Path) -> None:
    def make(rng: Random) -> Callable[[], object]:
        break_folder(rng, tmp_path / "model")
        return partial(use, tmp_path / "model")

    trials("tokenizers", num_short=NUM_SHORT).try_each(make)


# Through the command line.


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    plant_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name", ["a list", "no vocab", "backtracking", "charsmap of eight gigabytes", "lone surrogate"]
)
def test_prepare_says_in_one_error_what_is_wrong_with_a_tokenizer(
    model: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "tokenizer.json").write_text(json.dumps(DOCUMENTS[name]))
    (model.parent / "rows.jsonl").write_text(json.dumps({"prompt": "a" * 60, "completion": "a"}))
    answer = run_here(["prepare", str(model), "--data", "rows.jsonl"], capfd)
    assert answer.code == 4, answer.err
    assert "error: " in answer.err
    assert "try: " in answer.err
    assert "Traceback" not in answer.err


def test_prepare_survives_random_tokenizers(trials: StartTrials) -> None:
    def make(rng: Random, folder: Path) -> list[str]:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        plant_model(folder / "model")
        break_folder(rng, folder / "other")
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copyfile(folder / "other" / name, folder / "model" / name)
        return ["prepare", "model", "--data", "rows.jsonl"]

    trials("prepare a tokenizer", num_short=NUM_SHORT // 10).run(make)

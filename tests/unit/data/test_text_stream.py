"""TextStream: the text of tokens that come one by one, against decoding them all at once."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from small_models import SENTENCES, make_tokenizer
from tightfit.data.call_syntax import GEMMA, HARMONY, HERMES, CallSyntax
from tightfit.data.templates import CallStream, Prompter, TextStream
from tightfit.data.tokenizer import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@functools.cache
def open_prompter(kind: str) -> Prompter:
    folder = Path(tempfile.mkdtemp())
    if kind == "bytes":
        make_tokenizer(folder)
    else:
        _make_other(kind, folder)
    return Prompter(load_tokenizer(folder))


def _make_other(kind: str, folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    library: Any = transformers
    specials = ["<unk>", "<s>", "</s>"]
    if kind == "sentencepiece":
        bytes_ = [f"<0x{number:02X}>" for number in range(256)]
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer: Any = trainers.BpeTrainer(
            vocab_size=700, special_tokens=[*specials, *bytes_], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=specials, show_progress=False
        )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    document = tokenizer.to_str()
    if kind == "sentencepiece":
        # Byte tokens belong to the model's vocabulary, and are no special ones.
        tokenizer = Tokenizer.from_str(_without_added(document, keep=specials))
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def _without_added(document: str, *, keep: list[str]) -> str:
    import json

    held = json.loads(document)
    held["added_tokens"] = [t for t in held["added_tokens"] if t["content"] in keep]
    return json.dumps(held)


def stream_all(prompter: Prompter, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(prompter, stops)
    pieces = [stream.push([token]) for token in tokens]
    pieces.append("" if stream.is_stopped else stream.finish())
    assert "".join(pieces) == stream.text
    return pieces


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "wordpiece"])
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from("aeiou  .,'nt1"), st.characters(codec="utf-8")), max_size=30
    )
)
def test_pushing_one_by_one_says_what_decoding_all_at_once_says(kind: str, text: str) -> None:
    prompter = open_prompter(kind)
    tokens = prompter.tokenizer.encode(text)

    assert "".join(stream_all(prompter, tokens)) == prompter.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(4, 370), max_size=40))
def test_any_tokens_of_a_byte_level_model_stream_alike(tokens: list[int]) -> None:
    prompter = open_prompter("bytes")

    assert "".join(stream_all(prompter, tokens)) == prompter.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 370), max_size=40),
    stops=st.lists(st.text("aes ,", min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_end_the_text_where_they_first_stand(
    tokens: list[int], stops: list[str]
) -> None:
    prompter = open_prompter("bytes")
    whole = prompter.decode(tokens)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]

    text = "".join(stream_all(prompter, tokens, tuple(stops)))

    assert text == (whole[: min(found)] if found else whole)


def test_a_piece_never_ends_inside_a_character() -> None:
    for kind in ("bytes", "sentencepiece"):
        prompter = open_prompter(kind)
        tokens = prompter.tokenizer.encode("a 🦊 über 漢字")
        pieces = stream_all(prompter, tokens)

        assert len(tokens) > 12
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert sum(piece != "" for piece in pieces) > 5


def test_long_answers_cost_the_same_for_every_token() -> None:
    prompter = open_prompter("bytes")
    tokens = prompter.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8)

    def seconds(repeats: int) -> float:
        stream = TextStream(prompter, ("never",))
        started = time.process_time()  # a pause of the machine costs none
        for _ in range(repeats):
            for token in tokens:
                stream.push([token])
        return time.process_time() - started

    seconds(1)
    short, long = (min(seconds(repeats) for _ in range(3)) for repeats in (4, 40))
    assert long < 40 * short  # decoding all anew would take 100 times as long


FINAL = "<|channel|>final<|message|>4"
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (HARMONY, FINAL),
        (HARMONY, f"<|channel|>commentary<|message|>wait<|end|><|start|>assistant{FINAL}"),
        (HARMONY, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}"),
        (GEMMA, "<|channel>thought\nhm<channel|>4"),
        (GEMMA, "<|channel>thought\nhm<channel|>I look.<|tool_call>call:add{}<tool_call|>"),
        (GEMMA, "4"),
        (HERMES, f"I look.\n{CALL}"),
        (HERMES, "I look.\n<tool_call>{"),
    ],
)
def test_a_stream_of_calls_shows_the_content_of_the_whole(syntax: CallSyntax, text: str) -> None:
    """Piece by piece; blanks before a call aside."""
    stream = CallStream(syntax)
    shown = "".join(map(stream.push, text))
    rest, parsed = stream.finish()
    assert (shown + rest).rstrip() == parsed.content

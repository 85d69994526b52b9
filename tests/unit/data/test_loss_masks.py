"""Masks: what is trained is the answers and their stop tokens, whatever the text says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="un-skip with: pip install 'tightfit[data]'")
pytest.importorskip("jinja2", reason="un-skip with: pip install 'tightfit[data]'")

from chat_models import CHATML, KINDS, STOP_OF, make_model

from tightfit.core.settings import TrainOn
from tightfit.data.encode_rows import EncoderOptions, Example, RowEncoder, mask_tokens
from tightfit.data.formats import Message
from tightfit.data.report import DataIssues
from tightfit.data.templates import (
    ChatRenderer,
    Span,
    TemplateRenderError,
    choose_template,
    list_templates,
)
from tightfit.data.token_store import NewRow
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer

CHAT = [
    Message("user", "What is the capital of France?"),
    Message("assistant", "Paris is the capital."),
    Message("user", "And of the dog?"),
    Message("assistant", "hello 12 34 Grüße 🙂"),
]


@cache
def model(kind: str) -> ChatTokenizer:
    return load_tokenizer(make_model(Path(mkdtemp()) / kind, kind))


def encode(
    tokenizer: ChatTokenizer,
    messages: list[Message],
    *,
    template: str | None = None,
    train_on: TrainOn = TrainOn.ANSWERS,
    seq_len: int = 4096,
) -> tuple[list[NewRow], RowEncoder, DataIssues]:
    findings = DataIssues()
    options = EncoderOptions(
        template=choose_template(template, tokenizer),
        train_on=train_on,
        seq_len=seq_len,
        is_encoder_decoder=False,
    )
    encoder = RowEncoder(tokenizer, options, findings)
    rows = list(encoder.add(Example(messages, False, "a.jsonl line 1", 0, 1)))
    return rows + list(encoder.flush()), encoder, findings


def trained_texts(row: NewRow, tokenizer: ChatTokenizer) -> list[str]:
    """Each trained stretch, decoded; a blank that joins it to the prompt set aside."""
    texts, held = [], []
    for token, is_trained in zip(row.tokens.tolist(), row.trained.tolist(), strict=True):
        if is_trained:
            held.append(token)
        elif held:
            texts.append(tokenizer.decode(held))
            held = []
    return [*texts, tokenizer.decode(held)] if held else texts


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"thinking"}))
def test_trained_are_the_answers_and_their_stop_tokens(kind: str) -> None:
    tokenizer, stop = model(kind), STOP_OF[kind]

    [row], _, _ = encode(tokenizer, CHAT)

    gap = " " if kind == "llama-2" else ""  # its template writes one before the stop token
    expected = [CHAT[1].content + gap + stop, CHAT[3].content + gap + stop]
    assert [text.strip() for text in trained_texts(row, tokenizer)] == expected
    assert row.has_stop


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bos_stands_once(kind: str) -> None:
    tokenizer = model(kind)
    bos = tokenizer.token_id(tokenizer.names["bos_token"])
    rows, _, _ = encode(tokenizer, CHAT[:2])

    # ChatML opens each turn with it; Zephyr's template leaves it out, as transformers then does
    expected = {"chatml": 2, "marked": 2, "thinking": 2, "zephyr": 0}.get(kind, 1)
    assert rows[0].tokens.tolist().count(bos) == expected


def test_history_that_is_rewritten_makes_one_row_per_answer() -> None:
    tokenizer = model("thinking")
    chat = [
        CHAT[0],
        Message("assistant", "<think>\nParis, I guess\n</think>\n\nParis."),
        CHAT[2],
        Message("assistant", "<think>\nhm\n</think>\n\nNone."),
    ]

    rows, encoder, _ = encode(tokenizer, chat)

    assert [trained_texts(row, tokenizer) for row in rows] == [
        ["<think>\nParis, I guess\n</think>\n\nParis.<|im_end|>"],
        ["<think>\nhm\n</think>\n\nNone.<|im_end|>"],
    ]
    second = tokenizer.decode(rows[1].tokens.tolist())
    assert "I guess" not in second
    assert "<|im_start|>assistant\nParis.<|im_end|>" in second
    assert encoder.renderer is not None
    assert encoder.counts["split"] == 1


def test_prompt_that_opens_the_answer_itself(tmp_path: Path) -> None:
    """DeepSeek-R1's way: the prompt ends in `<think>`, the finished turn is written without."""
    tokenizer = model("chatml")
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|im_start|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}"
    )
    chat = [Message("user", "hello"), Message("assistant", "<think>\nhm\n</think>you")]

    [row], _, _ = encode(tokenizer, chat, template=str(own))

    assert tokenizer.decode(row.tokens.tolist()) == (
        "hello<|im_start|><think>\nhm\n</think>you<|im_end|>"
    )
    assert trained_texts(row, tokenizer) == ["hm\n</think>you<|im_end|>"]


def test_system_text_is_folded_where_the_template_has_no_such_role() -> None:
    tokenizer = model("gemma")
    chat = [Message("system", "Be brief."), *CHAT[:2]]

    [row], encoder, _ = encode(tokenizer, chat)

    text = tokenizer.decode(row.tokens.tolist())
    assert "user\nBe brief.\n\nWhat is the capital of France?<end_of_turn>" in text
    assert encoder.renderer is not None
    assert encoder.counts["folded-system"] == 1


def test_a_refusal_is_a_finding_in_the_templates_words() -> None:
    rows, _, findings = encode(model("gemma"), [CHAT[0], CHAT[2], CHAT[1]])

    assert rows == []
    [finding] = findings.listed()
    assert finding.kind == "refused"
    reason = "Conversation roles must alternate"
    assert finding.shown == (f"a.jsonl line 1: the chat template refuses it: {reason}",)


def test_an_answer_before_any_question(tmp_path: Path) -> None:
    """Trained where the template can ask for it; never is what the template puts before it."""
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% if messages[0].role != 'system' %}<|im_start|>be kind<|im_end|>\n{% endif %}" + CHATML
    )
    tokenizer = model("chatml")
    chat = [CHAT[1], CHAT[2], CHAT[3]]

    [row], _, _ = encode(tokenizer, chat)
    [guarded], encoder, _ = encode(tokenizer, chat, template=str(own))
    none, _, findings = encode(tokenizer, chat[:1], template=str(own))

    answers = [CHAT[1].content + "<|im_end|>", CHAT[3].content + "<|im_end|>"]
    assert trained_texts(row, tokenizer) == answers
    assert trained_texts(guarded, tokenizer) == answers[1:]
    assert encoder.renderer is not None
    assert encoder.counts["unprompted"] == 1
    assert none == []
    assert findings.count("empty-answer") == 1


def test_turns_without_text_are_not_trained() -> None:
    tokenizer = model("chatml")
    chat = [CHAT[0], Message("assistant", " "), CHAT[2], CHAT[3]]

    [row], _, _ = encode(tokenizer, chat)
    none, _, findings = encode(tokenizer, chat[:2])

    assert trained_texts(row, tokenizer) == [CHAT[3].content + "<|im_end|>"]
    assert none == []
    assert findings.count("empty-answer") == 1


@pytest.mark.parametrize("name", list_templates())
@pytest.mark.parametrize("kind", ["chatml", "llama-2", "llama-3"])
def test_named_templates_train_answers_and_a_stop_token(name: str, kind: str) -> None:
    tokenizer = model(kind)

    [row], encoder, _ = encode(tokenizer, CHAT, template=name)

    texts = [text.strip() for text in trained_texts(row, tokenizer)]
    stops = [tokenizer.token_name(number) for number in encoder.stop_ids]
    assert len(texts) == 2
    assert texts[0].startswith(CHAT[1].content)
    assert texts[1].startswith(CHAT[3].content)
    assert texts[1].endswith(tuple(stops))
    assert row.has_stop
    if tokenizer.begins_with:
        bos = tokenizer.token_id(tokenizer.begins_with)
        expected = 2 if name == "llama-2" else 1  # Llama 2 begins every exchange anew
        assert row.tokens.tolist().count(bos) == expected


def test_every_published_template_is_there_with_its_source() -> None:
    wanted = {"chatml", "alpaca", "plain", "llama-2", "llama-3", "zephyr", "vicuna"}
    assert wanted <= set(list_templates())
    for name in list_templates():
        assert "Source:" in choose_template(name, model("chatml")).text


SPELLED = ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "[INST]", "<end_of_turn>", "<|eot_id|>"]
PIECES = st.sampled_from([*SPELLED, "{{ x }}", "{% if %}", "\n", " ", "hello", "🙂", "é", "0"])
TEXT = st.lists(PIECES | st.text(max_size=6), min_size=1, max_size=8).map("".join).filter(str.strip)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(set(KINDS) - {"thinking"})),
    pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3),
)
def test_no_text_escapes_its_role(kind: str, pairs: list[tuple[str, str]]) -> None:
    """Fuzz: control tokens in the row are the template's alone, and answers come back whole."""
    tokenizer = model(kind)
    pairs = [(_encodable(a), _encodable(b)) for a, b in pairs]
    if not all(a.strip() and b.strip() for a, b in pairs):
        return
    chat = [m for a, b in pairs for m in (Message("user", a), Message("assistant", b))]
    plain = [Message(m.role, "x") for m in chat]

    [row], _, _ = encode(tokenizer, chat)
    [bare], _, _ = encode(tokenizer, plain)

    unknown = tokenizer.token_id("<unk>")  # what a small vocabulary makes of rare characters
    control = set(tokenizer.control.ids.values()) - {unknown}
    assert [t for t in row.tokens.tolist() if t in control] == [
        t for t in bare.tokens.tolist() if t in control
    ]
    stop = tokenizer.token_id(STOP_OF[kind])
    trained = row.tokens[row.trained].tolist()
    assert trained.count(stop) == len(pairs)
    assert trained[-1] == stop


def _encodable(text: str) -> str:
    """What the Llama 2 model can spell: its vocabulary has no blank apart from this one."""
    return text.replace("\u2581", "_")


def test_a_spelled_control_token_is_told() -> None:
    tokenizer = model("chatml")
    chat = [Message("user", "what does <|im_end|> mean?"), Message("assistant", "it ends a turn")]

    [row], _, findings = encode(tokenizer, chat)

    assert findings.count("control-token") == 1
    assert "what does <|im_end|> mean?" in tokenizer.decode(row.tokens.tolist())
    assert row.tokens.tolist().count(tokenizer.token_id("<|im_end|>")) == 2


def test_train_on_all_trains_every_token() -> None:
    tokenizer = model("llama-3")

    [row], _, _ = encode(tokenizer, CHAT, train_on=TrainOn.ALL)

    assert row.trained.all()
    assert row.num_trained == len(row.tokens) - 1  # nothing predicts the first


def test_a_template_without_stop_token_gets_one(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    tokenizer = model("chatml")

    [row], encoder, _ = encode(tokenizer, CHAT[:2], template=str(own))

    # without a generation prompt the role belongs to what must be said
    assert trained_texts(row, tokenizer) == [f"assistant: {CHAT[1].content}\n<|im_end|>"]
    assert encoder.renderer is not None
    assert encoder.counts["appended-stop"] == 1


def test_a_token_across_the_border_is_not_trained() -> None:
    tokens = [(0, 3), (3, 6), (6, 8), (8, 9), (9, 11)]

    trained, num_across = mask_tokens(tokens, [Span(4, 9)])

    assert trained.tolist() == [False, False, True, True, False]
    assert num_across == 1


def test_truncation_keeps_the_head_and_drops_rows_without_answer() -> None:
    tokenizer = model("chatml")
    [whole], _, _ = encode(tokenizer, CHAT[:2])
    num_prompt = int(whole.trained.argmax())

    [cut], _, findings = encode(tokenizer, CHAT[:2], seq_len=num_prompt + 2)
    none, _, dropped = encode(tokenizer, CHAT[:2], seq_len=num_prompt)

    assert cut.tokens.tolist() == whole.tokens[: num_prompt + 2].tolist()
    assert cut.num_trained == 2
    assert not cut.has_stop
    assert findings.count("truncated") == 1
    assert none == []
    assert dropped.count("answer-cut-off") == 1


def test_errors_in_templates_have_lines(tmp_path: Path) -> None:
    from tightfit.core.errors import InvalidInputError, NotFoundError

    own = tmp_path / "own.jinja"
    own.write_text("a\n{% for x in %}")

    with pytest.raises(InvalidInputError, match="line 2"):
        encode(model("chatml"), CHAT, template=str(own))
    with pytest.raises(NotFoundError, match="Did you mean `chatml`"):
        choose_template("chatlm", model("chatml"))


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(escape: str, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(escape + "{{ messages[0].content }}")
    tokenizer = model("chatml")
    renderer = ChatRenderer(
        tokenizer, choose_template(str(own), tokenizer), train_on=TrainOn.ANSWERS
    )

    render: Callable[[], object] = lambda: renderer.rows(CHAT)  # noqa: E731
    with pytest.raises(TemplateRenderError):
        render()


def test_reasoning_is_text_before_the_answer_where_the_template_has_no_field() -> None:
    tokenizer = model("chatml")
    chat = [CHAT[0], Message("assistant", "Paris.", reasoning="I know it")]

    [row], _, _ = encode(tokenizer, chat)

    [text] = trained_texts(row, tokenizer)
    assert text == "<think>\nI know it\n</think>\n\nParis.<|im_end|>"

"""Chat templates: choosing one, rendering it with sandboxed Jinja, loss masks, and prompts and
answers as text and tokens.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, first_line
from tightfit.core.settings import TrainOn
from tightfit.core.text import did_you_mean, printable
from tightfit.data.call_syntax import CallSyntax, ParsedAnswer, find_syntax
from tightfit.data.formats import ASSISTANT, SYSTEM, THOUGHT_KEYS, TOOL, USER, Conversation, Message
from tightfit.data.tokenizer import ChatTokenizer, read_text
from tightfit.data.tools import Tool, ToolError

if TYPE_CHECKING:
    from jinja2 import Environment, Template


# Chat templates as transformers runs them: sandboxed Jinja with the same names and blank rules.

ANSWER_STARTS = "\U0010fff0"
ANSWER_ENDS = "\U0010fff1"
"""Written around what a `{% generation %}` block makes. Private use: no text holds them, for
`ControlTokens.escape` takes that plane out of messages."""


class TemplateRenderError(Exception):
    """A template refused these messages, or broke on them."""


@lru_cache(maxsize=16)  # verbs open the same model several times: tens of milliseconds each
def compile_template(text: str, name: str) -> Template:
    """A template ready to render; raises `InvalidInputError` for an error in its text."""
    from jinja2 import TemplateSyntaxError

    environment, sandbox = _environment(), _sandbox()
    remedy = "correct the template, or name another one with `template:`"
    if len(text) > sandbox.MAX_SOURCE_CHARS:
        raise InvalidInputError(
            f"The template {name} has {len(text):,} characters; "
            f"at most {sandbox.MAX_SOURCE_CHARS:,} are compiled.",
            remedy=remedy,
        )
    sandbox.start_compile()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the Python that Jinja writes
            compiled = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise InvalidInputError(
            f"The template {name} is not Jinja: line {error.lineno}: {error.message}.",
            remedy="correct that line, or name another template with `template:`",
        ) from error
    except sandbox.TemplateLimitError as error:
        raise InvalidInputError(
            f"The template {name} is refused: {error}.", remedy=remedy
        ) from error
    except RecursionError as error:
        raise InvalidInputError(
            f"The template {name} nests its expressions too deep to compile.", remedy=remedy
        ) from error
    except Exception as error:  # its constants are computed, which can fail in any way
        raise InvalidInputError(
            f"The template {name} cannot be compiled: {_shortened(error)}.", remedy=remedy
        ) from error
    compiled.name = name
    return compiled


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    *,
    tools: Sequence[Tool] = (),
    add_generation_prompt: bool = False,
) -> str:
    """The text of a conversation.

    Raises `TemplateRenderError` in the template's own words, and `InvalidInputError` where the
    template exceeds a limit: the next messages would not fare better.
    """
    sandbox = _sandbox()
    sandbox.start_render((messages, tools))
    try:
        text = template.render(
            messages=[dict(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **names,
        )
        text.encode()  # `{{ '%c' % 55296 }}` writes half a character
    except sandbox.TemplateLimitError as error:
        raise InvalidInputError(
            f"The chat template ({template.name}) is refused: {error}.",
            remedy="use another template: --set template=NAME, with a name or a Jinja file",
        ) from error
    except Exception as error:  # a template is code: it can fail in any way
        raise TemplateRenderError(_shortened(error)) from error
    return text


def _shortened(error: Exception) -> str:
    """What an error says, at a length that can be shown."""
    return printable(first_line(error), most=_ERROR_CHARS)


_ERROR_CHARS = 500


def _sandbox() -> ModuleType:
    try:
        from tightfit.data import sandbox
    except ImportError as error:
        raise SetupError(
            "Chat templates need jinja2, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from error
    return sandbox


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment: Environment = _sandbox().ChatEnvironment([_generation_tag()])
    return environment


def _generation_tag() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}`: what the model says, marked in the output."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{ANSWER_STARTS}{caller()}{ANSWER_ENDS}"

    return Generation


DEFAULT_FOR_BASE_MODELS = "plain"
"""Adds no words, so a base model needs to learn no new marks."""
_PACKAGE = "tightfit.catalogue"
_FOLDER = "templates"
_ENDING = ".jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja template and where it came from."""

    name: str
    """`tokenizer`, a name of ours, or a file: as reports say it."""
    text: str
    """Complete: saved as `chat_template.jinja`, it renders the same in any tool."""
    note: str | None = None


def list_templates() -> list[str]:
    """Names of the templates that come with tightfit."""
    entries = files(_PACKAGE).joinpath(_FOLDER).iterdir()
    return sorted(
        entry.name.removesuffix(_ENDING) for entry in entries if entry.name.endswith(_ENDING)
    )


def choose_template(wanted: str | None, tokenizer: ChatTokenizer) -> ChatTemplate:
    """The template asked for; unasked the tokenizer's own; for a base model without one `plain`."""
    own = tokenizer.chat_templates
    if wanted is None or (wanted == "tokenizer" and own):
        if own:
            name = "default" if "default" in own else next(iter(own))
            return ChatTemplate(name="tokenizer", text=own[name])
        note = (
            f"The tokenizer has no chat template; `{DEFAULT_FOR_BASE_MODELS}` is used. "
            f"Others: {', '.join(list_templates())}, or a Jinja file."
        )
        text = _named(DEFAULT_FOR_BASE_MODELS, tokenizer)
        return ChatTemplate(name=DEFAULT_FOR_BASE_MODELS, text=text, note=note)
    if wanted in list_templates():
        return ChatTemplate(name=wanted, text=_named(wanted, tokenizer))
    if wanted in own:
        return ChatTemplate(name=f"tokenizer ({wanted})", text=own[wanted])
    return ChatTemplate(name=wanted, text=_own_file(wanted))


def _named(name: str, tokenizer: ChatTokenizer) -> str:
    """A template of ours, with marks that the model lacks set to nothing.

    Ours write BOS first. A model whose tokenizer puts no BOS before a text was
    not trained to see one, whatever its config calls BOS.
    """
    text = files(_PACKAGE).joinpath(_FOLDER).joinpath(name + _ENDING).read_text(encoding="utf-8")
    bos = tokenizer.names.get("bos_token")
    unset = "" if bos and tokenizer.begins_with == bos else "{%- set bos_token = '' -%}\n"
    if "eos_token" not in tokenizer.names:
        unset += "{%- set eos_token = '' -%}\n"
    return unset + text


def _own_file(wanted: str) -> str:
    path = Path(wanted).expanduser()
    known = list_templates()
    try:
        text = None if path.is_dir() else read_text(path)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"The template {wanted} cannot be read: {error}",
            remedy="name a readable Jinja file in UTF-8",
        ) from error
    if text is None:
        raise NotFoundError(
            f"There is no template `{wanted}`, neither by that name nor as a file."
            f"{did_you_mean(wanted, known)}",
            remedy=f"name one of {', '.join(known)}, or a Jinja file",
        )
    return text


# Conversations as text with the answers marked, by how the template was run, not by search.


class Span(NamedTuple):
    """Characters from `start` up to `end`."""

    start: int
    end: int


class RenderedRow(NamedTuple):
    """One training row as text: control tokens are aliases, trained stretches are known."""

    text: str
    spans: tuple[Span, ...]


Made = TypeVar("Made")
_OTHER_TEXT = "\N{HORIZONTAL ELLIPSIS}"
"""An answer that begins like no tool call."""


class ChatRenderer:
    """Messages to sealed rows with one template."""

    def __init__(
        self, tokenizer: ChatTokenizer, template: ChatTemplate, *, train_on: TrainOn
    ) -> None:
        self.counts: Counter[str] = Counter()
        """What rendering did to rows beyond writing them down, by the keys of `NOTE_TEXTS`."""
        self.stop_ids: set[int] = set()
        """Tokens that ended an answer."""
        self._tokenizer = tokenizer
        self._control = tokenizer.control
        self._compiled = compile_template(template.text, template.name)
        self._fields = _TemplateFields.of(template.text)
        stops = [a for a, number in self._control.ids.items() if number in tokenizer.stop_ids]
        self._stops = re.compile(f"[{''.join(stops)}]" if stops else "(?!)")
        self._train_on = train_on

    def rows(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[RenderedRow]:
        """One row, or one per answer where the template rewrites earlier turns.

        Raises `TemplateRenderError` where the template refuses the messages.
        """
        return self._try(Conversation(list(messages), tuple(tools)), self._rows)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Sealed text that asks for the next answer, as inference would see it."""
        chat = Conversation(list(messages), tuple(tools))
        return self._try(chat, lambda chat: self._render(chat, asks=True))

    def _try(self, chat: Conversation, make: Callable[[Conversation], Made]) -> Made:
        """What is made of a conversation, or of one written otherwise where that is refused."""
        self._fields.require(chat)
        safe = self._escaped(chat)
        try:
            return make(safe)
        except TemplateRenderError as error:
            refused = error
        for kinds, change in _OTHERWISE:
            if (other := change(safe.messages)) is None:
                continue
            try:
                made = make(safe._replace(messages=other))
            except TemplateRenderError:
                continue
            self.counts.update(kinds)
            return made
        raise refused

    def _escaped(self, chat: Conversation) -> Conversation:
        escape = self._control.escape

        def deep(value: Any) -> Any:
            if isinstance(value, str):
                return escape(value)
            if isinstance(value, Mapping):
                return {escape(str(key)): deep(part) for key, part in value.items()}
            return [deep(part) for part in value] if isinstance(value, list | tuple) else value

        messages = [
            m._replace(
                content=escape(m.content),
                reasoning=escape(m.reasoning),
                name=escape(m.name),
                call_id=escape(m.call_id),
                tool_calls=tuple(type(call)(*deep(tuple(call))) for call in m.tool_calls),
            )
            for m in chat.messages
        ]
        return Conversation(messages, tuple(deep(chat.tools)))

    def _rows(self, chat: Conversation) -> list[RenderedRow]:
        if self._train_on is TrainOn.ALL:
            return [self._whole(chat)]
        asked = [i for i, m in enumerate(chat.messages) if m.role == ASSISTANT and not m.is_empty]
        if not asked:
            return []
        chat = chat.first(asked[-1] + 1)  # what follows the last answer trains nothing
        full = self._render(chat)
        self._check_calls(chat, full)
        self._look_for_lost(chat.messages, full)
        if ANSWER_STARTS in full:
            return [self._by_marks(full)]
        if asked[0] == 0 and not self._opens(chat):
            self.counts["unprompted"] += 1
            asked = asked[1:]
        spans: list[Span] = []
        for at in asked:
            piece = self._answer_at(chat, at, full)
            if piece is None:
                self.counts["split"] += 1
                return [self._turn_alone(chat, turn) for turn in asked]
            spans.append(piece)
        return [self._closed(full, spans)] if spans else []

    def _check_calls(self, chat: Conversation, full: str) -> None:
        """Some templates write the first call of a message and pass over the others."""
        for at, message in enumerate(chat.messages):
            if len(message.tool_calls) < 2:
                continue
            fewer = message._replace(tool_calls=message.tool_calls[:-1])
            others = [*chat.messages[:at], fewer, *chat.messages[at + 1 :]]
            if self._render(chat._replace(messages=others)) == full:
                raise TemplateRenderError(
                    f"it writes only some of the {len(message.tool_calls)} calls of one message"
                )

    def _opens(self, chat: Conversation) -> bool:
        """Can the template ask for an answer before the first message?"""
        try:
            before = self._render(chat.first(0), asks=True)
        except TemplateRenderError:
            return False
        return bool(before) and self._render(chat.first(1)).startswith(before)

    def _whole(self, chat: Conversation) -> RenderedRow:
        text = _unmark(self._render(chat))
        self._check_calls(chat, text)
        self._look_for_lost(chat.messages, text)
        if not self._note_stop(text.rstrip()[-1:]):
            text, _ = self._with_stop(text, Span(0, len(text)))
        return RenderedRow(text, (Span(0, len(text)),))

    def _answer_at(self, chat: Conversation, at: int, full: str) -> Span | None:
        """The answer's place in `full`; None where a later turn changes how the history reads."""
        before = self._render(chat.first(at), asks=True)
        upto = full if at == len(chat.messages) - 1 else self._render(chat.first(at + 1))
        if not upto.startswith(before):
            return None
        span = Span(len(before), len(upto))
        span = self._end_at_stop(upto, span) or span
        return span if full.startswith(upto[: span.end]) else None

    def _turn_alone(self, chat: Conversation, at: int) -> RenderedRow:
        """One answer as inference would come to it: its own prompt, then the answer."""
        before = self._render(chat.first(at), asks=True)
        upto = self._render(chat.first(at + 1))
        if upto.startswith(before):
            return self._closed(upto, [Span(len(before), len(upto))])
        # The finished turn is written otherwise than the prompt opens it, or the history before it
        # is; the prompt is what a model sees, so the answer follows that.
        answer = self._answer_alone(chat, at, before, upto)
        text = before + answer[_overlap(before, answer) :]
        return self._closed(text, [Span(len(before), len(text))])

    def _answer_alone(self, chat: Conversation, at: int, before: str, upto: str) -> str:
        """What the template writes of one answer, without its history."""
        message, history = chat.messages[at], self._render(chat.first(at))
        others = [*chat.messages[:at], Message(ASSISTANT, _OTHER_TEXT)]
        other = self._render(chat._replace(messages=others))
        alike = (a == b for a, b in zip(upto, other, strict=False))
        shared = upto[: sum(takewhile(bool, alike))]
        opening = before[len(history) :] if before.startswith(history) else ""
        if opening and opening in shared:
            return upto[shared.rindex(opening) + len(opening) :]
        if message.tool_calls:  # only the template knows how they are written
            return upto[len(shared) :]
        end = upto.rstrip()[-1:]
        answer = self._control.seal(self._fields.content(message))
        return answer + (end if self._is_control(end) else "")

    def _closed(self, text: str, spans: list[Span]) -> RenderedRow:
        """The last answer ends with a stop token, the template's or, failing that, EOS."""
        *earlier, last = spans
        ended = self._end_at_stop(text, Span(last.start, len(text)))
        if ended is None:
            text, ended = self._with_stop(text, Span(last.start, len(text)))
        return RenderedRow(text, (*earlier, ended))

    def _by_marks(self, marked: str) -> RenderedRow:
        """Spans from `{% generation %}` blocks, each drawn out to the stop token behind it."""
        spans: list[Span] = []
        at = start = 0
        for piece in re.split(f"([{ANSWER_STARTS}{ANSWER_ENDS}])", marked):
            if piece == ANSWER_STARTS:
                start = at
            elif piece == ANSWER_ENDS:
                spans.append(Span(start, at))
            else:
                at += len(piece)
        if not spans:  # it wrote such a character itself
            raise TemplateRenderError("it marks no answer")
        text = _unmark(marked)
        limits = [*(span.start for span in spans[1:]), len(text)]
        drawn = [self._draw_out(text, s, limit) for s, limit in zip(spans, limits, strict=True)]
        filled = [span for span in drawn if span.end > span.start]
        if not filled:
            raise TemplateRenderError("its generation blocks hold no answer")
        *earlier, last = filled
        if not self._is_control(text[last.end - 1]):
            text, last = self._with_stop(text[: last.end], last)
        return RenderedRow(text, (*earlier, last))

    def _draw_out(self, text: str, span: Span, limit: int) -> Span:
        inside = self._end_at_stop(text, span)
        if inside is not None:
            return inside
        behind = next((i for i in range(span.end, limit) if not text[i].isspace()), None)
        if behind is not None and self._note_stop(text[behind]):
            return Span(span.start, behind + 1)
        return span

    def _end_at_stop(self, text: str, span: Span) -> Span | None:
        """The span up to its stop token; what the template writes behind it is not trained.

        A known stop token first. Else the control token that the answer ends
        on: templates close turns with tokens that configs forget to name.
        Messages hold no control tokens, so whatever is found the template wrote.
        """
        found = self._stops.search(text, span.start, span.end)
        end = found.end() if found else len(text[: span.end].rstrip())
        if end <= span.start or not self._note_stop(text[end - 1]):
            return None
        return Span(span.start, end)

    def _note_stop(self, char: str) -> bool:
        """Is it a control token, one that ends an answer?"""
        if not self._is_control(char):
            return False
        self.stop_ids.add(self._control.ids[char])
        return True

    def _with_stop(self, text: str, span: Span) -> tuple[str, Span]:
        stop = self._tokenizer.eos_alias
        if not stop:
            return text, span
        self.counts["appended-stop"] += 1
        self.stop_ids.add(self._control.ids[stop])
        text = text[: span.end] + stop
        return text, Span(span.start, len(text))

    def _is_control(self, char: str) -> bool:
        return char in self._control.ids

    def _render(self, chat: Conversation, *, asks: bool = False) -> str:
        text = render(
            self._compiled,
            [self._fields.as_object(message) for message in chat.messages],
            self._tokenizer.names,
            tools=chat.tools,
            add_generation_prompt=asks,
        )
        if asks:
            text = _unmark(text)
        return self._control.seal(text)

    def _look_for_lost(self, messages: Sequence[Message], full: str) -> None:
        asked = (m.content for m in messages if m.role in (SYSTEM, USER))
        texts = (self._control.seal(text).strip() for text in asked)
        self.counts["lost-text"] += any(text not in full for text in texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TemplateFields:
    """What a template reads of a message beside its text."""

    has_tools: bool
    has_calls: bool
    thought: str | None
    """The name under which it takes reasoning; None where reasoning is text before the answer."""
    moves_thought: bool
    """It does not look for `<think>` in the text itself."""

    @classmethod
    def of(cls, text: str) -> _TemplateFields:
        return cls(
            has_tools=re.search(r"\btools\b", text) is not None,
            has_calls="tool_calls" in text,
            # As an attribute or a key: `enable_thinking` is no field.
            thought=next((k for k in THOUGHT_KEYS if re.search(rf"""[.'"]{k}\b""", text)), None),
            moves_thought="</think>" not in text,
        )

    def require(self, chat: Conversation) -> None:
        """Raises `TemplateRenderError` for what the template would pass over in silence."""
        lacking = (
            "tools" if chat.tools and not self.has_tools else
            "tool calls" if not self.has_calls and any(m.tool_calls for m in chat.messages) else
            None
        )  # fmt: skip
        if lacking:
            raise TemplateRenderError(f"it writes no {lacking}; the template `hermes` does")

    def content(self, message: Message) -> str:
        """The text, after the reasoning where the template has no field for that."""
        if message.reasoning and self.thought is None:
            return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
        return message.content

    def as_object(self, message: Message) -> dict[str, Any]:
        """The message as transformers documents it."""
        if message.role != ASSISTANT:
            return message.as_object()
        if self.thought is None:
            return message._replace(content=self.content(message), reasoning="").as_object()
        if not message.reasoning and self.moves_thought:
            reasoning, content = split_thought(message.content)
            message = message._replace(reasoning=reasoning, content=content)
        return message.as_object(self.thought)


_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>", re.DOTALL)


def split_thought(text: str) -> tuple[str, str]:
    """The reasoning at the head of a text, and the rest."""
    found = _THOUGHT.match(text)
    return (found[1].strip(), text[found.end() :].lstrip("\n")) if found else ("", text)


def fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """The system text at the head of the first user message; None where there is none to fold."""
    if len(messages) < 2 or messages[0].role != SYSTEM or messages[1].role != USER:
        return None
    head = f"{messages[0].content}\n\n{messages[1].content}"
    return [messages[1]._replace(content=head), *messages[2:]]


_ID_CHARS = 9
"""Mistral's templates take only ids of nine letters and digits."""


def shorten_ids(messages: Sequence[Message]) -> list[Message] | None:
    """Calls and results with ids that every template takes; None where there are no calls."""
    changed: list[Message] = []
    waiting: list[str] = []
    for at, given in enumerate(messages):
        message = given
        if message.tool_calls:
            calls = tuple(
                call._replace(id=_short_id(call.id or f"{at}.{number}"))
                for number, call in enumerate(message.tool_calls)
            )
            message, waiting = message._replace(tool_calls=calls), [call.id for call in calls]
        elif message.role == TOOL and waiting:
            own = _short_id(message.call_id)
            own = own if message.call_id and own in waiting else waiting[0]
            waiting.remove(own)
            message = message._replace(call_id=own)
        changed.append(message)
    return changed if any(message.tool_calls for message in messages) else None


def _short_id(text: str) -> str:
    if len(text) == _ID_CHARS and text.isascii() and text.isalnum():
        return text
    return hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:_ID_CHARS]


def _fold_and_shorten(messages: Sequence[Message]) -> list[Message] | None:
    short = shorten_ids(messages)
    return None if short is None else fold_system(short)


_OTHERWISE: tuple[
    tuple[tuple[str, ...], Callable[[Sequence[Message]], list[Message] | None]], ...
] = (
    (("short-ids",), shorten_ids),
    (("folded-system",), fold_system),
    (("short-ids", "folded-system"), _fold_and_shorten),
)
"""How a conversation that a template refuses may be written otherwise, and what is counted then."""


def _unmark(text: str) -> str:
    return text.replace(ANSWER_STARTS, "").replace(ANSWER_ENDS, "")


def _overlap(before: str, after: str) -> int:
    """How much of `after` the end of `before` has already: `<think>` in a prompt and an answer."""
    longest = min(len(before), len(after), 64)
    return next((n for n in range(longest, 0, -1) if before.endswith(after[:n])), 0)


# Prompter: messages and texts to the tokens a model answers, and its tokens back to text.

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts where a character's last bytes have not come yet."""


class Prompter:
    """Makes prompts with the template and tokenizer that training uses."""

    def __init__(self, tokenizer: ChatTokenizer, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        # An encoder-decoder reads plain text unless a template is named: see `data/encode.py`.
        is_bare = tokenizer.is_encoder_decoder and template is None
        self.template: ChatTemplate | None = (
            None if is_bare else choose_template(template, tokenizer)
        )
        self._renderer = (
            None
            if self.template is None
            else ChatRenderer(tokenizer, self.template, train_on=TrainOn.ANSWERS)
        )
        self.control_ids = frozenset(tokenizer.control.ids.values())
        """Tokens that are left out of an answer's text."""
        text = "" if self.template is None else self.template.text
        has_calls = _TemplateFields.of(text).has_calls
        self.call_syntax: CallSyntax | None = find_syntax(text) if has_calls else None
        """How the model writes tool calls; None without a template that takes them."""
        names = self.call_syntax.control if self.call_syntax is not None else ()
        aliases = {tokenizer.control.alias_of.get(name) for name in names}
        self.call_control = tuple(i for a, i in tokenizer.control.ids.items() if a in aliases)
        """Control tokens that stay in an answer's text, for `call_syntax` to parse."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.tokenizer.stop_ids

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Tokens that the answer follows. Raises `TemplateRenderError` where refused."""
        ids = list(self.tokenizer.encode_sealed([self._sealed(messages, tools)])[0].ids)
        end = self.tokenizer.eos_id
        if self.tokenizer.is_encoder_decoder and end is not None and ids[-1:] != [end]:
            ids.append(end)
        return tuple(ids)

    def ask(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, place: str = ""
    ) -> tuple[int, ...]:
        """As `chat`; messages that the template refuses raise `InvalidInputError`."""
        for message in messages:
            message.content.encode()  # half a character: UnicodeEncodeError, which callers know
        try:
            return self.chat(messages, tools)
        except TemplateRenderError as error:
            where = f"{place}: the" if place else "The"
            raise InvalidInputError(
                f"{where} chat template refuses these messages: {str(error).splitlines()[0]}.",
                remedy="correct the messages, or name another template: --set template=NAME",
            ) from error

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The prompt's text as the template writes it, control tokens by their names."""
        return self.tokenizer.control.unseal(self._sealed(messages, tools))

    def continue_text(self, text: str, *, begins: bool = True) -> tuple[int, ...]:
        """Tokens of a plain text to be continued; `begins` as the tokenizer begins a text."""
        text.encode()  # as in `ask`
        control = self.tokenizer.control
        sealed = self.tokenizer.bos_alias * begins + control.seal(control.escape(text))
        return tuple(self.tokenizer.encode_sealed([sealed])[0].ids)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int], kept: Collection[int] = ()) -> str:
        """An answer as text, control tokens left out but for those that are to be kept."""
        hidden = self.control_ids.difference(kept)
        return self.tokenizer.decode([i for i in token_ids if i not in hidden])

    def _sealed(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        if self._renderer is not None:
            return self._renderer.prompt(messages, tools)
        if tools or any(message.tool_calls for message in messages):
            raise TemplateRenderError("an encoder-decoder reads plain text, without tools")
        control = self.tokenizer.control
        return control.seal(control.escape("\n".join(m.content for m in messages)))


class StopTextFilter:
    """Text as it comes, held back where it may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._shown: list[str] = []
        self._held = ""
        self.stopped_by: str | None = None
        """The stop text that was found: nothing that comes after it counts."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """All text so far, cut at a stop text."""
        return "".join(self._shown) + self._held

    def completes_stop(self, text: str) -> bool:
        """Whether a stop text ends in `text`."""
        return any(stop in self._held + text for stop in self._stops)

    def push(self, text: str) -> str:
        """What can be shown now that this has come; often nothing."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = text[:at]
            return self.finish()
        longest = max(map(len, self._stops), default=1) - 1
        count = next(
            (
                count
                for count in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-count:]) for stop in self._stops)
            ),
            0,
        )
        self._held = text[len(text) - count :]
        self._shown.append(text[: len(text) - count])
        return self._shown[-1]

    def finish(self) -> str:
        """What was held back, now that no more comes."""
        self._shown.append(self._held)
        self._held = ""
        return self._shown[-1]


class CallStream:
    """An answer's text as it comes: what is content is shown, what may be a call is held back."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._filter = StopTextFilter(syntax.starts)
        self._text = ""
        self._num_passed = 0
        """Characters that the filter has received."""
        self._shown = ""

    def push(self, text: str) -> str:
        """Content that can be shown now."""
        self._text += text
        if self._syntax.may_begin_call(self._text):
            return ""
        start = self._syntax.answer_start
        if self._num_passed == 0 and start:
            # Looked for where it may have ended just now.
            at = self._text.find(start, max(len(self._text) - len(text) - len(start), 0))
            # Content before it comes first, and is known when the answer has ended.
            if at < 0 or parse_answer(self._syntax, self._text[: at + len(start)]).content:
                return ""
            self._num_passed = at + len(start)
        if self._num_passed == 0 and self._syntax.thought is not None:
            opening, end = self._syntax.thought
            begun = self._text.lstrip()[: len(opening)]
            if opening.startswith(begun):
                at = self._text.find(end) if begun == opening else -1
                if at < 0:
                    return ""
                self._num_passed = at + len(end)
        piece = self._filter.push(self._text[self._num_passed :])
        self._num_passed = len(self._text)
        self._shown += piece
        return piece

    def finish(self) -> tuple[str, ParsedAnswer]:
        """The content that is still to be shown, and the whole answer.

        A malformed call is content.
        """
        parsed = parse_answer(self._syntax, self._text)
        # Where it does not begin so, blanks were shown that a call behind them takes off.
        begins = parsed.content.startswith(self._shown)
        return parsed.content[len(self._shown) :] if begins else "", parsed


def parse_answer(syntax: CallSyntax, text: str) -> ParsedAnswer:
    """Content and calls; a malformed call is content."""
    try:
        return syntax.parse(text)
    except ToolError:
        return ParsedAnswer(text)


class TextStream:
    """Tokens as they come, to text that never ends inside a character or a stop text.

    Only the last few tokens are decoded anew. What a token says can depend on the one before it
    (a space, the rest of a character), so decoding starts one settled piece earlier, and what
    that piece says by itself is taken off again.
    """

    def __init__(
        self, prompter: Prompter, stops: Sequence[str] = (), kept: Collection[int] = ()
    ) -> None:
        self._tokenizer = prompter.tokenizer
        self._hidden = prompter.control_ids.difference(kept)
        self._filter = StopTextFilter(stops)
        self._tokens: list[int] = []
        self._start = 0
        """Where decoding starts: the piece before the last settled one."""
        self._settled = 0
        """Tokens whose text is final."""
        self._tail = ""
        """Text that may still change: the end of it, when no more comes."""

    @property
    def is_stopped(self) -> bool:
        return self._filter.is_stopped

    @property
    def stopped_by(self) -> str | None:
        """The stop text that was found."""
        return self._filter.stopped_by

    @property
    def text(self) -> str:
        """All that was decoded so far, cut at a stop text."""
        return self._filter.text + self._tail

    def push(self, token_ids: Sequence[int]) -> str:
        """What can be shown now that these have come; often nothing."""
        if self.is_stopped:
            return ""
        self._tokens.extend(token for token in token_ids if token not in self._hidden)
        before = self._tokenizer.decode(self._tokens[self._start : self._settled])
        piece = self._tokenizer.decode(self._tokens[self._start :])[len(before) :]
        is_whole = not piece.endswith(_UNFINISHED)
        if is_whole and piece:
            self._start, self._settled = self._settled, len(self._tokens)
        self._tail = ""
        if is_whole or self._filter.completes_stop(piece):
            return self._filter.push(piece)
        self._tail = piece
        return ""

    def finish(self) -> str:
        """What was held back, now that no more comes."""
        tail, self._tail = self._tail, ""
        return self._filter.push(tail) + self._filter.finish()

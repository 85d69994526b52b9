"""Prompter: messages and texts to the tokens a model answers, and its tokens back to text."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.core.errors import InvalidInputError
from tightfit.core.training import TrainOn
from tightfit.data.formats import Message
from tightfit.data.templates import ChatRenderer, ChatTemplate, TemplateRenderError, choose_template
from tightfit.data.tokenizer import ChatTokenizer

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

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.tokenizer.stop_ids

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens that the answer follows. Raises `TemplateRenderError` where refused."""
        ids = list(self.tokenizer.encode_sealed([self._sealed(messages)])[0].ids)
        end = self.tokenizer.eos_id
        if self.tokenizer.is_encoder_decoder and end is not None and ids[-1:] != [end]:
            ids.append(end)
        return tuple(ids)

    def ask(self, messages: Sequence[Message], *, place: str = "") -> tuple[int, ...]:
        """As `chat`; messages that the template refuses are the user's to mend."""
        for message in messages:
            message.content.encode()  # half a character: UnicodeEncodeError, which callers know
        try:
            return self.chat(messages)
        except TemplateRenderError as error:
            where = f"{place}: the" if place else "The"
            raise InvalidInputError(
                f"{where} chat template refuses these messages: {str(error).splitlines()[0]}.",
                remedy="correct the messages, or name another template: --set template=NAME",
            ) from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt's text as the template writes it, control tokens by their names."""
        return self.tokenizer.control.unseal(self._sealed(messages))

    def continue_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a plain text to be continued, begun as the tokenizer begins a text."""
        text.encode()  # as in `ask`
        control = self.tokenizer.control
        sealed = self.tokenizer.bos_alias + control.seal(control.escape(text))
        return tuple(self.tokenizer.encode_sealed([sealed])[0].ids)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """An answer as text, control tokens left out."""
        return self.tokenizer.decode([i for i in token_ids if i not in self.control_ids])

    def _sealed(self, messages: Sequence[Message]) -> str:
        if self._renderer is not None:
            return self._renderer.prompt(messages)
        control = self.tokenizer.control
        return control.seal(control.escape("\n".join(m.content for m in messages)))


class TextStream:
    """Tokens as they come, to text that never ends inside a character or a stop text.

    Only the last few tokens are decoded anew. What a token says can depend on the one before it
    (a space, the rest of a character), so decoding starts one settled piece earlier, and what
    that piece says by itself is taken off again.
    """

    def __init__(self, prompter: Prompter, stops: Sequence[str] = ()) -> None:
        self._prompter = prompter
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._start = 0
        """Where decoding starts: the piece before the last settled one."""
        self._settled = 0
        """Tokens whose text is final."""
        self._pieces: list[str] = []
        """Settled text."""
        self._tail = ""
        """Text that may still change: the end of it, when no more comes."""
        self._held = ""
        """Settled text that was not shown, as it may be the head of a stop text."""
        self.is_stopped = False
        """A stop text was found: nothing that comes after it counts."""

    @property
    def text(self) -> str:
        """All that was decoded so far, cut at a stop text."""
        return "".join(self._pieces) + self._tail

    def push(self, token_ids: Sequence[int]) -> str:
        """What can be shown now that these have come; often nothing."""
        if self.is_stopped:
            return ""
        control = self._prompter.control_ids
        self._tokens.extend(token for token in token_ids if token not in control)
        before = self._prompter.decode(self._tokens[self._start : self._settled])
        piece = self._prompter.decode(self._tokens[self._start :])[len(before) :]
        is_whole = not piece.endswith(_UNFINISHED)
        if is_whole and piece:
            self._start, self._settled = self._settled, len(self._tokens)
        new = self._held + piece
        found = [at for stop in self._stops if (at := new.find(stop)) >= 0]
        if found:
            return self._stop(new[: min(found)])
        if not is_whole:
            self._tail = piece
            return ""
        self._tail = ""
        self._pieces.append(piece)
        count = len(new) - self._num_held_back(new)
        self._held = new[count:]
        return new[:count]

    def finish(self) -> str:
        """What was held back, now that no more comes."""
        rest, self._held = self._held + self._tail, ""
        self._pieces.append(self._tail)
        self._tail = ""
        return rest

    def _stop(self, rest: str) -> str:
        """Keep only `rest` of what was not shown yet."""
        whole = "".join(self._pieces)
        self._pieces = [whole[: len(whole) - len(self._held)], rest]
        self._held = self._tail = ""
        self.is_stopped = True
        return rest

    def _num_held_back(self, text: str) -> int:
        """Characters at the end that may be the head of a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0

"""Answers held to a grammar: llguidance says which tokens may come next."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, SetupError, first_line
from tightfit.core.text import printable
from tightfit.data.grammar import read_grammar, write_lark
from tightfit.data.templates import Prompter

if TYPE_CHECKING:
    import torch


class ConstraintMaker:
    """Constraints over one tokenizer, which is read once, when the first one is asked for."""

    def __init__(self, prompter: Prompter, *, num_vocabulary: int) -> None:
        self._prompter = prompter
        self._num_vocabulary = num_vocabulary
        self._lock = threading.Lock()
        self._tokens: Any = None

    def make(self, grammar: str) -> Constraint:
        """For one answer. Raises `InvalidInputError` for a grammar that llguidance refuses."""
        try:
            import llguidance
        except ImportError as error:
            raise SetupError(
                "Answers in a given format need llguidance, which is not installed.",
                remedy="pip install 'tightfit[serve]'",
            ) from error
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_tokens(llguidance)
        control = {
            name: token
            for name, token in self._control_names().items()
            if self._tokens.is_special_token(token)
        }
        lark = write_lark(read_grammar(grammar), control)
        matcher = llguidance.LLMatcher(self._tokens, lark, log_level=0)
        if matcher.is_error():
            raise _refusal(matcher)
        return Constraint(matcher, self._num_vocabulary)

    def _read_tokens(self, library: Any) -> Any:
        tokenizer = self._prompter.tokenizer
        stops = list(self._prompter.stop_ids)
        if not stops:
            raise InvalidInputError(
                "The model has no token that ends an answer, so that none can be held to a format.",
                remedy="leave the format out, or use a tokenizer with an `eos_token`",
            )
        try:
            return library.LLTokenizer(
                tokenizer.to_json(), n_vocab=self._num_vocabulary, eos_token=stops
            )
        except (ValueError, RuntimeError) as error:
            raise InvalidInputError(
                f"llguidance cannot read this tokenizer: {printable(first_line(error), most=200)}.",
                remedy="leave the format out, or serve the model as GGUF",
            ) from error

    def _control_names(self) -> dict[str, int]:
        tokenizer = self._prompter.tokenizer
        return {tokenizer.token_name(token): token for token in tokenizer.control.ids.values()}


class Constraint:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, num_vocabulary: int) -> None:
        self._matcher = matcher
        self._num_vocabulary = num_vocabulary
        self.error: Exception | None = None
        """Why the answer cannot go on."""

    def allowed(self) -> torch.Tensor | None:
        """Which tokens may come next: (vocabulary,), on the CPU. None where none can be found."""
        import numpy as np
        import torch

        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self.error = _refusal(self._matcher)
            return None
        bits = np.unpackbits(packed, bitorder="little")[: self._num_vocabulary]
        mask = torch.zeros(self._num_vocabulary, dtype=torch.bool)
        mask[: len(bits)] = torch.from_numpy(bits.astype(bool))
        return mask

    def take(self, token: int) -> bool:
        """Go on by a token. True where the answer is complete and nothing may follow."""
        if not self._matcher.consume_token(token) and self.error is None:
            self.error = _refusal(self._matcher)
        return self.error is None and bool(self._matcher.is_stopped())


def _refusal(matcher: Any) -> InvalidInputError:
    said = printable(first_line(RuntimeError(matcher.get_error())), most=200).rstrip(".")
    return InvalidInputError(
        f"The answer's format cannot be kept to: {said}.", remedy="simplify the schema or pattern"
    )

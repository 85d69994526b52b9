"""Grammars that answers are held to: one small tree, checked, and written for each engine.

Everything here comes from a client. A grammar is bounded before an engine sees it: in size, in how
often it repeats, and in how many ways one text can be read at once, which is what the parsers of
engines pay for with each token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_NODES = 50_000
MAX_EXPANDED = 500_000
"""Parts of all rules with every repetition written out."""
MAX_REPEATS = 2000
"""llama.cpp's own limit."""
MAX_READINGS = 2000
"""Places of a grammar at which one text may stand at once; a parser follows all of them."""
_FIRST_CHAR, _LAST_CHAR = 1, 0x10FFFF
"""llama.cpp takes the character of number zero for the end of a text, and may not come back."""
_SURROGATES = (0xD800, 0xDFFF)


class GrammarError(Exception):
    """A grammar, schema or pattern that is refused; says why without a full stop."""


@dataclass(frozen=True, slots=True)
class Literal:
    """This very text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges, which are sorted and apart."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One after the other; of nothing: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    items: tuple[Node, ...]
    is_distinct: bool = False
    """The text itself says which one it is, before two of them could go on side by side."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same several times. `most` is None where there is no end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A part that may be read as one word: its end shows in the next character."""

    item: Node


Node = Literal | Chars | Series | Choice | Repeat | Rule | Lexeme
EMPTY = Series(())


def sequence(*items: Node | str) -> Node:
    """One after the other; texts stand for themselves."""
    return Series(tuple(Literal(one) if isinstance(one, str) else one for one in items))


def choice(*items: Node | str, is_distinct: bool = False) -> Node:
    made = tuple(Literal(one) if isinstance(one, str) else one for one in items)
    return made[0] if len(made) == 1 else Choice(made, is_distinct)


def repeat(item: Node, least: int, most: int | None) -> Node:
    return EMPTY if most == 0 else Repeat(item, least, most)


def optional(item: Node) -> Node:
    return Repeat(item, 0, 1)


def chars(*ranges: tuple[int, int] | str, is_negated: bool = False) -> Chars:
    """One character of these; a text names its characters."""
    given: list[tuple[int, int]] = []
    for one in ranges:
        given += [(ord(char), ord(char)) for char in one] if isinstance(one, str) else [one]
    merged: list[tuple[int, int]] = []
    for low, high in sorted(given):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    if is_negated:
        return Chars(_complement(merged))
    return Chars(tuple(merged))


def without(node: Chars, *removed: tuple[int, int] | str) -> Chars:
    """The characters that are none of these."""
    kept = _complement(node.ranges)
    return chars(*kept, *removed, _SURROGATES, is_negated=True)


def _complement(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found, start = [], _FIRST_CHAR
    for low, high in ranges:
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= _LAST_CHAR:
        found.append((start, _LAST_CHAR))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name; `root` is the whole answer."""

    rules: Mapping[str, Node]

    def to_json(self) -> str:
        """As `Sampling.grammar` holds it."""
        return json.dumps({name: _write(node) for name, node in self.rules.items()})


@lru_cache(maxsize=64)
def read_grammar(text: str) -> Grammar:
    """A grammar from its JSON."""
    return Grammar({name: _read(value) for name, value in json.loads(text).items()})


def _write(node: Node) -> Any:
    if isinstance(node, Literal):
        return node.text
    if isinstance(node, Chars):
        return {"chars": [list(pair) for pair in node.ranges]}
    if isinstance(node, Series):
        return [_write(item) for item in node.items]
    if isinstance(node, Choice):
        return {"choice": [_write(item) for item in node.items], "distinct": node.is_distinct}
    if isinstance(node, Repeat):
        return {"repeat": _write(node.item), "least": node.least, "most": node.most}
    return {"rule": node.name} if isinstance(node, Rule) else {"lexeme": _write(node.item)}


def _read(value: Any) -> Node:
    if isinstance(value, str):
        return Literal(value)
    if isinstance(value, list):
        return Series(tuple(map(_read, value)))
    if "chars" in value:
        return Chars(tuple((low, high) for low, high in value["chars"]))
    if "choice" in value:
        return Choice(tuple(map(_read, value["choice"])), value["distinct"])
    if "repeat" in value:
        return Repeat(_read(value["repeat"]), value["least"], value["most"])
    return Rule(value["rule"]) if "rule" in value else Lexeme(_read(value["lexeme"]))


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Series | Choice):
        return node.items
    return (node.item,) if isinstance(node, Repeat | Lexeme) else ()


# Checks.


def check_grammar(grammar: Grammar) -> None:
    """Raise `GrammarError` for a grammar that is too large, endless or too ambiguous."""
    if sum(map(count_parts, grammar.rules.values())) > MAX_NODES:
        raise GrammarError(f"it has more than {MAX_NODES:,} parts")
    for node in (one for root in grammar.rules.values() for one in _parts(root)):
        ranges = node.ranges if isinstance(node, Chars) else ()
        if (isinstance(node, Literal) and "\0" in node.text) or any(low == 0 for low, _ in ranges):
            raise GrammarError("it holds the character of number zero")
    groups = _group_rules(grammar)
    _check_endings(grammar, [name for group in groups for name in group])
    if sum(map(_write_out, grammar.rules.values())) > MAX_EXPANDED:
        raise GrammarError(f"written out it has more than {MAX_EXPANDED:,} parts")
    if _Readings(grammar, groups).of_root > MAX_READINGS:
        raise GrammarError(f"one text can have more than {MAX_READINGS:,} readings")


def count_parts(node: Node) -> int:
    """A node and all below it."""
    return sum(1 for _ in _parts(node))


def _parts(node: Node) -> Iterator[Node]:
    """A node and all below it, in no order."""
    left = [node]
    while left:
        one = left.pop()
        yield one
        left += children(one)


def _group_rules(grammar: Grammar) -> list[list[str]]:
    """Rules by which of them contain each other, each group after those that it needs.

    Tarjan's algorithm with a stack of its own: a chain of rules is longer than Python's.
    """
    needs = {
        name: [one.name for one in _parts(node) if isinstance(one, Rule)]
        for name, node in grammar.rules.items()
    }
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    held: list[str] = []
    is_held: set[str] = set()
    groups: list[list[str]] = []
    for start in grammar.rules:
        work = [(start, iter(needs[start]))] if start not in number else []
        while work:
            name, rest = work[-1]
            if name not in number:
                number[name] = lowest[name] = len(number)
                held.append(name)
                is_held.add(name)
            for other in rest:
                if other not in number:
                    work.append((other, iter(needs[other])))
                    break
                if other in is_held:
                    lowest[name] = min(lowest[name], number[other])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    lowest[above] = min(lowest[above], lowest[name])
                if lowest[name] == number[name]:
                    at = held.index(name)
                    groups.append(held[at:])
                    is_held.difference_update(held[at:])
                    del held[at:]
    return groups


def _check_endings(grammar: Grammar, order: Sequence[str]) -> None:
    """Every answer can end, and nothing is repeated that may be empty."""

    def holds(node: Node, known: set[str], *, literal: Callable[[str], bool], char: bool) -> bool:
        if isinstance(node, Literal):
            return literal(node.text)
        if isinstance(node, Chars | Rule):
            return char if isinstance(node, Chars) else node.name in known
        found = (holds(one, known, literal=literal, char=char) for one in children(node))
        if isinstance(node, Choice):
            return any(found)
        return (isinstance(node, Repeat) and node.least == 0) or all(found)

    def grow(is_so: Callable[[Node, set[str]], bool]) -> set[str]:
        known: set[str] = set()
        before = -1
        while before < len(known):
            before = len(known)
            known.update(name for name in order if is_so(grammar.rules[name], known))
            # In order, one round is enough but for rules that contain themselves.
        return known

    if "root" not in grow(
        lambda node, known: holds(node, known, literal=lambda _: True, char=True)
    ):
        raise GrammarError("nothing that is finite fits it")

    def is_empty(node: Node, known: set[str]) -> bool:
        return holds(node, known, literal=lambda text: not text, char=False)

    may_be_empty = grow(is_empty)
    for root in grammar.rules.values():
        for one in _parts(root):
            if not isinstance(one, Repeat):
                continue
            if max(one.least, one.most or 0) > MAX_REPEATS:
                raise GrammarError(f"it repeats a part more than {MAX_REPEATS:,} times")
            if (one.least, one.most) != (0, 1) and is_empty(one.item, may_be_empty):
                raise GrammarError("it repeats a part that may be empty")


def _write_out(node: Node) -> int:
    """Parts of one rule with every repetition written out, as parsers keep them."""
    times = max(1, node.least, node.most or 0) if isinstance(node, Repeat) else 1
    return 1 + times * sum(map(_write_out, children(node)))


class _Readings:
    """At how many places of a rule one text may stand at once, at most."""

    def __init__(self, grammar: Grammar, groups: Sequence[Sequence[str]]) -> None:
        self._known: dict[str, int] = {}
        for group in groups:
            self._group = frozenset(group)
            for name in group:
                self._known[name] = self._measure(grammar.rules[name])
        self.of_root = self._known["root"]

    def _measure(self, node: Node) -> int:
        if isinstance(node, Rule):
            return self._known.get(node.name, 1)
        found = list(map(self._measure, children(node)))
        if not isinstance(node, Choice):
            return max(found, default=1) + isinstance(node, Repeat)
        if node.is_distinct:
            return max(found) + len(found)
        if sum(self._comes_back(item) for item in node.items) > 1:
            raise GrammarError(
                "alternatives that begin alike contain themselves, so that one text has too many "
                "readings"
            )
        return sum(found)

    def _comes_back(self, node: Node) -> bool:
        """Whether a part holds the rule that it stands in."""
        return any(isinstance(one, Rule) and one.name in self._group for one in _parts(node))


# llama.cpp's notation. Source: llama.cpp, grammars/README.md.


def write_gbnf(grammar: Grammar) -> str:
    """For llama.cpp, and for vLLM, which reads the same."""
    return "\n".join(f"{name} ::= {_gbnf(node)}" for name, node in grammar.rules.items()) + "\n"


def _gbnf(node: Node) -> str:
    if isinstance(node, Literal):
        return '"' + "".join(map(_gbnf_char, node.text)) + '"'
    if isinstance(node, Chars):
        return "[" + "".join(_range(pair, r"\U{:08X}") for pair in node.ranges) + "]"
    if isinstance(node, Series):
        return " ".join(map(_gbnf, node.items)) or '""'
    if isinstance(node, Choice):
        return "(" + " | ".join(map(_gbnf, node.items)) + ")"
    if isinstance(node, Repeat):
        return f"({_gbnf(node.item)}){_times(node)}"
    return node.name if isinstance(node, Rule) else f"({_gbnf(node.item)})"


def _gbnf_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else f"\\U{ord(char):08X}"


def _range(pair: tuple[int, int], form: str) -> str:
    low, high = pair
    return form.format(low) if low == high else f"{form.format(low)}-{form.format(high)}"


def _times(node: Repeat) -> str:
    marks = {(0, 1): "?", (0, None): "*", (1, None): "+"}
    most = "" if node.most is None else str(node.most)
    return marks.get((node.least, node.most)) or f"{{{node.least},{most}}}"


# llguidance's notation. Source: llguidance, docs/syntax.md.


def write_lark(grammar: Grammar, control: Mapping[str, int]) -> str:
    """For llguidance, where control tokens match no text: they are named by their numbers."""
    names = {name: f"r{number}" for number, name in enumerate(grammar.rules)}
    writer = _LarkWriter(names, control)
    lines = [f"{names[name]}: {writer.write(node)}" for name, node in grammar.rules.items()]
    lexemes = [f"T{number}: {text}" for text, number in writer.lexemes.items()]
    return "\n".join([f"start: {names['root']}", *lines, *lexemes]) + "\n"


class _LarkWriter:
    def __init__(self, names: Mapping[str, str], control: Mapping[str, int]) -> None:
        self._names = names
        self._control = control
        self.lexemes: dict[str, int] = {}
        """Terminals, by their expressions."""

    def write(self, node: Node) -> str:
        if isinstance(node, Literal):
            return self._literal(node.text)
        if isinstance(node, Chars | Lexeme):
            return self._lexeme(_regex(node))
        if isinstance(node, Rule):
            return self._names[node.name]
        if isinstance(node, Repeat):
            return f"({self.write(node.item)}){_times(node)}"
        parts = [self.write(item) for item in children(node)]
        return f"({' | '.join(parts)})" if isinstance(node, Choice) else " ".join(parts) or '""'

    def _lexeme(self, expression: str) -> str:
        text = "/" + expression.replace("/", r"\/") + "/"
        return f"T{self.lexemes.setdefault(text, len(self.lexemes))}"

    def _literal(self, text: str) -> str:
        found = min(
            ((text.find(name), name) for name in self._control if name in text), default=None
        )
        if found is None:
            return json.dumps(text)
        at, name = found
        parts = [json.dumps(text[:at])] if at else []
        rest = text[at + len(name) :]
        return " ".join(
            [*parts, f"<[{self._control[name]}]>", *([self._literal(rest)] if rest else [])]
        )


def _regex(node: Node) -> str:
    if isinstance(node, Literal):
        return "".join(
            char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
            for char in node.text
        )
    if isinstance(node, Chars):
        return "[" + "".join(_range(pair, r"\x{{{:x}}}") for pair in node.ranges) + "]"
    if isinstance(node, Series):
        return "".join(map(_regex, node.items))
    if isinstance(node, Choice):
        return "(" + "|".join(map(_regex, node.items)) + ")"
    if isinstance(node, Repeat):
        return f"({_regex(node.item)}){_times(node)}"
    if isinstance(node, Lexeme):
        return _regex(node.item)
    raise ValueError("a lexeme holds no rules")

"""YAML files as people mean them: `on` is a word, 1e-4 a number, and every value has a line."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.reading import MAX_DEPTH, MAX_DIGITS, UnreadableFileError, read_text
from tightfit.core.text import did_you_mean
from tightfit.core.units import KIB
from tightfit.core.validation import KeyPath

MAX_BYTES = 256 * KIB
"""Far above any file written by hand; keeps a wrong file from being parsed for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """A parsed file: plain mappings, lists and scalars, and the line each one starts on."""

    path: Path
    value: Any
    lines: dict[KeyPath, int]


def read_yaml(path: Path) -> YamlDocument:
    """Parse one YAML file, or say in which line it cannot be."""
    text = _read(path)
    try:
        loader = _Loader(text)  # raises for characters that are not allowed
        try:
            node = loader.get_single_node()
            value = None if node is None else loader.construct_document(node)
            lines = {} if node is None else _lines(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise _not_yaml(path, line, error.problem or error.context or "cannot be read") from error
    except yaml.reader.ReaderError as error:
        line = f" line {text.count(chr(10), 0, error.position) + 1}"
        raise _not_yaml(path, line, f"a character that is not allowed: {error.reason}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise _not_yaml(path, "", str(error).split(";")[0]) from error
    return YamlDocument(path=path, value=value, lines=lines)


def _read(path: Path) -> str:
    remedy = "name a YAML file written by hand"
    try:
        return read_text(path, most_bytes=MAX_BYTES, remedy=remedy)
    except UnreadableFileError:
        raise
    except FileNotFoundError as error:
        try:
            beside = [item.name for item in path.parent.iterdir()]
        except OSError:
            beside = []
        raise NotFoundError(
            f"There is no file {path}.{did_you_mean(path.name, beside)}",
            remedy="name an existing YAML file",
        ) from error
    except OSError as error:
        raise InvalidInputError(
            f"Cannot read {path}: {error.strerror or error}.", remedy=remedy
        ) from error


def _not_yaml(path: Path, line: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path}{line} is not valid YAML: {reason}.",
        remedy="indent with spaces, put `key: value` on each line, quote text with `: ` or `#`",
    )


class PlainLoader(yaml.SafeLoader):
    """SafeLoader that keeps scalars as text and refuses aliases, which can make a file endless,
    and depth, which ends in a RecursionError."""

    _depth = 0

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (`*name`) are not read", problem_mark=mark)
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem=f"it is nested too deeply (more than {MAX_DEPTH} levels)",
                problem_mark=mark,
            )
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Loader(PlainLoader):
    """The scalars of YAML 1.2, and no key given twice.

    YAML 1.1 reads `on` as true, 1e-4 as text and 1:30 as 90. Of two equal keys
    one would be dropped unseen.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"`{key}` is given twice", problem_mark=key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:
            raise yaml.MarkedYAMLError(
                problem=f"a number has more than {MAX_DIGITS} digits", problem_mark=node.start_mark
            )
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _pattern, _starts in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_starts)
    )


def write_text_value(text: str) -> str:
    """`text` as a value that is read back as this text: in quotes only where it must be."""
    try:
        is_plain = _Loader(f"key: {text} # remark").get_single_data() == {"key": text}
    except (yaml.YAMLError, ValueError, TypeError):
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _lines(root: yaml.Node) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    todo: list[tuple[KeyPath, yaml.Node, int]] = [((), root, root.start_mark.line)]
    while todo:
        place, node, line = todo.pop()
        lines[place] = line + 1
        if isinstance(node, yaml.MappingNode):
            for key, item in node.value:
                todo.append(((*place, str(key.value)), item, key.start_mark.line))
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                todo.append(((*place, number), item, item.start_mark.line))
    return lines

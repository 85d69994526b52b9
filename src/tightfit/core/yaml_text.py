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
from tightfit.core.files import describe_kind
from tightfit.core.text import did_you_mean
from tightfit.core.units import KIB, MIB
from tightfit.core.validation import KeyPath

MAX_BYTES = 256 * 1024
"""Far above any file written by hand; keeps a wrong file from being parsed for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """A parsed file: plain mappings, lists and scalars, and the line each one starts on."""

    path: Path
    value: Any
    lines: dict[KeyPath, int]


def read_yaml(path: Path) -> YamlDocument:
    """Parse one YAML file, or say in which line it cannot be."""
    text = read_text(path, max_bytes=MAX_BYTES, remedy="name a YAML file written by hand")
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
    except RecursionError as error:
        raise _not_yaml(path, "", "it is nested too deeply") from error
    return YamlDocument(path=path, value=value, lines=lines)


def read_text(path: Path, *, max_bytes: int, remedy: str) -> str:
    """The text of a file that a person wrote, or why it cannot be one."""
    try:
        # Looked at before it is opened: a pipe would wait for ever.
        kind = describe_kind(path.stat().st_mode)
        if kind is not None:
            raise InvalidInputError(f"{path} is {kind}, not a file.", remedy=remedy)
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
        if len(data) > max_bytes:
            size = f"{max_bytes // MIB} MiB" if max_bytes >= MIB else f"{max_bytes // KIB} KiB"
            raise InvalidInputError(f"{path} is larger than {size}.", remedy=remedy)
        return data.decode("utf-8-sig")
    except FileNotFoundError as error:
        try:
            beside = [item.name for item in path.parent.iterdir()]
        except OSError:
            beside = []
        raise NotFoundError(
            f"There is no file {path}.{did_you_mean(path.name, beside)}",
            remedy="name an existing YAML file",
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidInputError(
            f"{path} line {line} is not UTF-8 text.", remedy="save it as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"Cannot read {path}: {reason}.", remedy=remedy) from error


def _not_yaml(path: Path, line: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{path}{line} is not valid YAML: {reason}.",
        remedy="indent with spaces, put `key: value` on each line, quote text with `: ` or `#`",
    )


class PlainLoader(yaml.SafeLoader):
    """SafeLoader that keeps scalars as text and refuses aliases, which can make a file endless."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (`*name`) are not read", problem_mark=mark)
        return super().compose_node(parent, index)


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

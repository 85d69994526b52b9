"""Jinja for chat templates, with limits on processor time, sizes and nesting.

A chat template is code that comes with a model. jinja2's sandbox keeps it away from files and
Python's internals, but lets it run for ever or fill the memory. Here each block, call, filter and
intercepted operator checks the time, and each value is measured before or as it is made. Between
two checks only one operation on values of limited size runs, so a render ends soon after its time.
"""

from __future__ import annotations

import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType
from typing import Any

from jinja2 import BaseLoader, Environment, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace

MAX_SOURCE_CHARS = 100_000
"""Of a template. The longest published ones, for tools and vision, have about 17,000."""
CPU_SECONDS = 1.0
"""Processor time of this thread for one render; an ordinary one takes less than a millisecond."""
_CPU_SECONDS_PER_CHAR = 1e-6
_COMPILE_SECONDS = 2.0
_MAX_CHARS = 1_000_000
_CHARS_PER_INPUT_CHAR = 10
"""One value or the output may be this many times as long as the messages, and `_MAX_CHARS`."""
_MADE_PER_CHAR = 100
"""All values of a render together may be this many times as long as one."""
_ITEM_CHARS = 10
"""What an item of a list counts, besides what it says."""
_MAX_DEPTH = 100
"""Of lists in lists: Python's own hash of a tuple would overflow the stack."""
_MAX_BITS = 4096
_MAX_RANGE_NUMBER = 10**12
_MAX_SCAN = 10**9
"""Characters times characters, for searches from the right, which can compare all with all."""
_TICKS_PER_CLOCK = 8
_SECONDS_PER_CHECK = 0.05
_SCALARS = frozenset({str, int, float, bool, type(None)})
_SLOW_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Removed: their time grows with the square of the text, and no chat template needs them."""
_SLOW_METHODS = frozenset({"striptags", "unescape"})
_SCANS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_TEXTS = (str, bytes)
_METHODS = (BuiltinMethodType, MethodType)
_COUNTED = (list, tuple, dict, Set)
_COLLECTIONS = (list, tuple, Set, ValuesView)  # `keys()` and `items()` are sets


class TemplateLimitError(Exception):
    """A template asked for more than a limit allows; the message names the limit."""


class _Limits:
    """What one render may still use."""

    __slots__ = ("cpu_end", "left_chars", "max_chars", "next_check", "seconds", "ticks")

    def __init__(self, input_chars: int, *, seconds: float = CPU_SECONDS) -> None:
        self.seconds = seconds + input_chars * _CPU_SECONDS_PER_CHAR
        self.max_chars = _MAX_CHARS + input_chars * _CHARS_PER_INPUT_CHAR
        self.left_chars = self.max_chars * _MADE_PER_CHAR
        self.ticks = 0
        self.next_check = time.monotonic() + self.seconds
        self.cpu_end: float | None = None

    def tick(self) -> None:
        self.ticks += 1
        if not self.ticks % _TICKS_PER_CLOCK and time.monotonic() > self.next_check:
            self._check_cpu()

    def _check_cpu(self) -> None:
        """Processor time, which is a system call, counts from when the clock's time has passed.

        So a busy or suspended machine fails no render.
        """
        now = time.thread_time()
        if self.cpu_end is None:
            self.cpu_end = now + self.seconds
        elif now > self.cpu_end:
            raise TemplateLimitError(f"it runs for more than {self.seconds:.0f} s")
        self.next_check = time.monotonic() + _SECONDS_PER_CHECK

    def check(self, num_chars: int) -> None:
        """Refuse a value of this size, before it is made."""
        if num_chars > self.max_chars:
            raise TemplateLimitError(
                f"it makes a value or a text of more than {self.max_chars:,} characters"
            )

    def count(self, num_chars: int) -> None:
        """A value of this size is being made."""
        if num_chars > self.max_chars:
            self.check(num_chars)
        self.left_chars -= num_chars
        if self.left_chars < 0:
            raise TemplateLimitError(
                f"its values have more than {self.max_chars * _MADE_PER_CHAR:,} characters together"
            )

    def measure(self, value: Any) -> int:
        """About how long a value is when written out: an item counts wherever it is met."""
        if type(value) is str:
            return len(value)
        total = 0
        level = [value]
        for _ in range(_MAX_DEPTH):
            below: list[Any] = []
            for item in level:
                kind = type(item)
                total += _ITEM_CHARS
                if kind is str:
                    total += len(item)
                elif kind in _SCALARS:
                    continue
                elif kind is list or kind is tuple:
                    below += item
                elif isinstance(item, Mapping):
                    below += [*item.keys(), *item.values()]
                elif isinstance(item, _TEXTS):
                    total += len(item)
                elif isinstance(item, _COLLECTIONS):
                    below += item
                elif isinstance(item, Namespace):
                    below += object.__getattribute__(item, "_Namespace__attrs").items()
                if total + len(below) > self.max_chars:
                    self.check(total + len(below))
            if not below:
                return total
            level = below
        raise TemplateLimitError(f"it nests lists more than {_MAX_DEPTH} deep")


class _Thread(threading.local):
    """The limits of the template that this thread runs."""

    limits = _Limits(0)


_THREAD = _Thread()


def start_render(input_value: Any) -> None:
    """Begin to count what this thread's next render uses; longer input allows more."""
    _THREAD.limits = unlimited = _Limits(0)
    unlimited.max_chars = 2**62
    _THREAD.limits = _Limits(unlimited.measure(input_value))


def start_compile() -> None:
    """Begin to count what compiling a template uses; constants are computed by it."""
    _THREAD.limits = _Limits(0, seconds=_COMPILE_SECONDS)


class _CheckedNamespace(Namespace):
    """As in transformers, no attribute begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")
        if type(value) not in _SCALARS:
            _THREAD.limits.measure(value)
        super().__setitem__(name, value)


class _Dict:
    """`dict` without the methods that change one; as in transformers."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _NoLoader(BaseLoader):
    """A chat template is one file."""

    def get_source(self, environment: Environment, template: str) -> Any:  # noqa: ARG002
        raise TemplateLimitError(f"it includes `{str(template)[:100]}`, and must be one file")


class _CheckedCode(CodeGenerator):
    """Python of a template, with a check in each block and around what makes values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loops: set[int] = set()

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        _THREAD.limits.tick()
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        self._loops.add(id(node.body))
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._loops:
            self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        volatile = "(markup_join if context.eval_ctx.autoescape else str_join)"
        self.write(volatile if frame.eval_ctx.volatile else "str_join")
        self.write("(environment.check_parts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """`a + b + c` as one call, which templates are full of."""
        parts = [node.right]
        first = node.left
        while isinstance(first, nodes.Add):
            parts.append(first.right)
            first = first.left
        self.write("environment.add(")
        for part in (first, *reversed(parts)):
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._keep(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._keep(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._keep(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._keep(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _keep(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.keep(")
        visit(node, frame)
        self.write(")")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The names and blank rules of transformers' chat templates, and the limits of this module."""

    code_generator_class = _CheckedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Iterable[Any] = ()) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, *extensions],
            loader=_NoLoader(),
            finalize=self._check_shown,
            cache_size=0,
        )
        # Jinja's own escapes HTML, which no model was trained on.
        self.filters["tojson"] = _to_json
        self.filters["sum"] = self._sum
        for name in _SLOW_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._checked_filter(name, function)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        self.globals["range"] = _range
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _CheckedNamespace

    # What generated code calls.

    def tick(self) -> None:
        _THREAD.limits.tick()

    def keep(self, value: Any) -> Any:
        """A value just made, measured; a generator's items are made now."""
        kind = type(value)
        if kind is bool or value is None:
            return value
        if kind is str or isinstance(value, _TEXTS):
            _THREAD.limits.count(len(value))
        elif kind is int:
            _check_bits(value.bit_length())
        elif kind is GeneratorType:
            return self._drain(value)
        elif isinstance(value, _COUNTED):
            _THREAD.limits.measure(value)
            _THREAD.limits.count(len(value) * _ITEM_CHARS)
        return value

    def add(self, value: Any, *others: Any) -> Any:
        """The sum of two or more values, from left to right."""
        for other in others:
            value = value + other
            if type(value) is not str:
                value = self.keep(value)
            elif len(value) > _MAX_CHARS:
                _THREAD.limits.check(len(value))
        return self.keep(value)

    def check_parts(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of `a ~ b`, before they are joined."""
        _THREAD.limits.count(sum(map(_THREAD.limits.measure, parts)))
        return parts

    def concat(self, parts: Iterable[str]) -> str:
        """The output of a template, a macro or a block."""
        limits = _THREAD.limits
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            if length > limits.max_chars:
                limits.check(length)
            kept.append(part)
        limits.count(length)
        return "".join(kept)

    def _check_shown(self, value: Any) -> Any:
        if type(value) not in _SCALARS:
            _THREAD.limits.measure(value)
        return value

    def _drain(self, values: Iterator[Any]) -> Iterator[Any]:
        kept: list[Any] = []
        length = 0
        for value in values:
            _THREAD.limits.tick()
            length += _THREAD.limits.measure(value) + _ITEM_CHARS
            _THREAD.limits.check(length)
            kept.append(value)
        _THREAD.limits.count(len(kept) * _ITEM_CHARS)
        return iter(kept)

    # What jinja2 calls.

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _THREAD.limits.tick()
        kind = type(obj)
        if kind is BuiltinMethodType or kind is MethodType:
            _check_method(obj.__self__, obj.__name__, args, kwargs)
        elif kind is FunctionType:
            method = getattr(obj, "__wrapped__", None)
            if isinstance(method, _METHODS):
                _THREAD.limits.check(_size_of_format(method.__self__, args, kwargs))
        given = (*args, *kwargs.values()) if kwargs else args
        for value in given:
            if type(value) not in _SCALARS:
                _THREAD.limits.measure(given)
                break
        return self.keep(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right) if abs(left) > 1 else 0)
        elif operator == "%" and isinstance(left, _TEXTS):
            _THREAD.limits.check(_size_of_percent(left, right))
        return self.keep(super().call_binop(context, operator, left, right))

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        _THREAD.limits.tick()
        return super().call_test(*args, **kwargs)

    def _checked_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        size = _FILTER_SIZES.get(name)
        first = int(hasattr(function, "jinja_pass_arg"))  # jinja2 puts a context before the value

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _THREAD.limits.tick()
            if size is not None:
                _THREAD.limits.check(size(*args[first:], **kwargs))
            return self.keep(function(*args, **kwargs))

        return checked

    def _sum(self, values: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        for value in values:
            _THREAD.limits.tick()
            start = self.keep(start + value)
        return start


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {_MAX_BITS:,} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    times, value = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(times, int) and isinstance(value, (str, bytes, list, tuple)):
        _THREAD.limits.check(times * _THREAD.limits.measure(value))


def _check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not isinstance(owner, (str, bytes, int)):
        return
    if name in _SLOW_METHODS:
        raise TemplateLimitError(f"it calls `{name}`, whose time has no limit")
    if not args and not kwargs:
        return
    _THREAD.limits.check(_largest((*args, *kwargs.values())))
    if name in _SCANS and args and isinstance(args[0], _TEXTS):
        _check_scan(owner, args[0])
    size = _METHOD_SIZES.get(name)
    if size is not None:
        _THREAD.limits.check(size(owner, *args, **kwargs))


def _check_scan(text: Any, searched: Any) -> None:
    if len(text) * len(searched) > _MAX_SCAN:
        raise TemplateLimitError(
            f"it searches for {len(searched):,} characters in {len(text):,}: more than "
            f"{_MAX_SCAN:,} comparisons"
        )


def _largest(values: Iterable[Any]) -> int:
    largest = 0
    for value in values:
        if isinstance(value, int):
            largest = max(largest, abs(value))
    return largest


# About how long a result will be, from the arguments of the filter or method.


def _size_of_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    if not isinstance(text, _TEXTS):
        text = str(text)
        _THREAD.limits.check(len(text))
    if isinstance(text, str):
        old, new = str(old), str(new)
    times: int = text.count(old) if old else len(text) + 1
    return len(text) + times * len(new)


def _size_of_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    lines = len(str(text).splitlines()) + 1
    return len(str(text)) + lines * (len(width) if isinstance(width, str) else abs(int(width)))


def _size_of_numbers(_value: Any, *args: Any, **kwargs: Any) -> int:
    return _largest((*args, *kwargs.values())) * _ITEM_CHARS


def _size_of_round(_value: Any, *args: Any, **kwargs: Any) -> int:
    _check_bits(_largest((*args, *kwargs.values())) * 4)  # 10**precision is computed
    return 0


def _size_of_join(values: Any, d: Any = "", *_: Any, **__: Any) -> int:
    count = len(values) if hasattr(values, "__len__") else _most_items()
    return count * _THREAD.limits.measure(d)


def _most_items() -> int:
    """The most items that something without a length may hold."""
    return _THREAD.limits.max_chars // _ITEM_CHARS


def _size_of_join_method(separator: Any, values: Any = ()) -> int:
    return _size_of_join(values, separator) + _THREAD.limits.measure(values)


def _size_of_tabs(text: Any, tabsize: Any = 8) -> int:
    tabs: int = text.count("\t" if isinstance(text, str) else b"\t")
    return len(text) + tabs * abs(int(tabsize))


def _size_of_translate(text: Any, table: Any = None, *_: Any, **__: Any) -> int:
    if not isinstance(text, str) or not isinstance(table, Mapping):
        return 0
    longest = max((len(item) for item in table.values() if isinstance(item, str)), default=1)
    return len(text) * longest


def _size_of_trim(text: Any, chars: Any = None) -> int:
    if isinstance(chars, str):
        _check_scan(str(text), chars)
    return 0


def _size_of_tojson(
    value: Any, _ascii: Any = False, indent: Any = None, separators: Any = None, *_: Any, **__: Any
) -> int:
    # json makes the indent of a number and of an empty text too.
    size = _THREAD.limits.measure(value) + _ITEM_CHARS
    wide = abs(indent) if isinstance(indent, int) else len(indent or "")
    for separator in separators or ():
        wide += len(str(separator))
    return size if wide <= _ITEM_CHARS else size * wide


def _size_of_string(value: Any) -> int:
    return _THREAD.limits.measure(value)


_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_NESTED_KEY = re.compile(r"%\([^)]*\(")
_NUMBER = re.compile(r"\d+")


def _size_of_percent(text: Any, args: Any) -> int:
    """Of `text % args`."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if _NESTED_KEY.search(text):
        raise TemplateLimitError("it writes a format with parentheses in the name of a field")
    size = _THREAD.limits.measure(args)
    num_fields = text.count("%") if isinstance(args, Mapping) else 1
    total = len(text) + size * num_fields
    for width, precision in _CONVERSION.findall(text):
        for number in (width, precision):
            if number == "*":
                total += _largest(args if isinstance(args, tuple) else (args,))
            elif number:
                total += _as_number(number)
    return total


def _size_of_percent_filter(text: Any, *args: Any, **kwargs: Any) -> int:
    return _size_of_percent(str(text), kwargs or args)


def _size_of_format(text: Any, args: Any, kwargs: Any) -> int:
    """Of `text.format(...)`."""
    size = _THREAD.limits.measure((args, kwargs))
    total = len(text)
    for _, field, spec, _ in string.Formatter().parse(text):
        if field is None:
            continue
        if spec and "{" in spec:
            raise TemplateLimitError("it writes a format inside a format, whose width has no limit")
        total += size + sum(map(_as_number, _NUMBER.findall(spec or "")))
        _THREAD.limits.check(total)
    return total


def _as_number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else 10**10


_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "batch": _size_of_numbers,
    "center": _size_of_numbers,
    "format": _size_of_percent_filter,
    "indent": _size_of_indent,
    "join": _size_of_join,
    "replace": _size_of_replace,
    "round": _size_of_round,
    "slice": _size_of_numbers,
    "string": _size_of_string,
    "tojson": _size_of_tojson,
    "trim": _size_of_trim,
}
_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "expandtabs": _size_of_tabs,
    "join": _size_of_join_method,
    "replace": _size_of_replace,
    "translate": _size_of_translate,
}


# Functions that templates call.


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 1000:
        raise TemplateLimitError("it writes a date in a form of more than 1,000 characters")
    return datetime.now().strftime(form)


def _range(*args: int) -> range:
    """Numbers that are multiples of 2**61-1 have one hash: a set of them takes for ever."""
    if _largest(args) > _MAX_RANGE_NUMBER:
        raise TemplateLimitError(f"it counts beyond {_MAX_RANGE_NUMBER:,}")
    return safe_range(*args)

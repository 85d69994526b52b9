"""Chat templates as transformers runs them: sandboxed Jinja with the same names and blank rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import EnvironmentFaultError, InvalidInputError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

ANSWER_STARTS = "\U0010fff0"
ANSWER_ENDS = "\U0010fff1"
"""Written around what a `{% generation %}` block makes. Private use: no text holds them, for
`ControlTokens.escape` takes that plane out of messages."""


class TemplateFault(Exception):  # noqa: N818
    """A template refused these messages, or broke on them."""


def compile_template(text: str, name: str) -> Template:
    """A template ready to render; a fault in its text is the user's to mend."""
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(text)
    except TemplateSyntaxError as fault:
        raise InvalidInputError(
            f"The template {name} is not Jinja: line {fault.lineno}: {fault.message}.",
            remedy="correct that line, or name another template with `template:`",
        ) from fault


def render(
    template: Template,
    messages: Sequence[Mapping[str, str]],
    names: Mapping[str, str],
    *,
    add_generation_prompt: bool = False,
) -> str:
    """The text of a conversation. Raises `TemplateFault` in the template's own words."""
    try:
        return template.render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **names,
        )
    except Exception as fault:  # a template is code: it can fail in any way
        raise TemplateFault(str(fault).strip() or type(fault).__name__) from fault


@lru_cache(maxsize=1)
def _environment() -> Environment:
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as fault:
        raise EnvironmentFaultError(
            "Chat templates need jinja2, which is not installed.",
            remedy="pip install 'tightfit[data]'",
        ) from fault
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


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

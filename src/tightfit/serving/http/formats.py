"""The grammar that a request's answers must fit: of a format, of calls, or of either."""

from __future__ import annotations

from collections.abc import Sequence

from tightfit.data.call_syntax import CallForm, CallSyntax
from tightfit.data.grammar import Grammar, GrammarError, Node, choice
from tightfit.data.json_schema import SchemaCompiler, read_pattern
from tightfit.data.templates import Prompter
from tightfit.data.tools import Tool, tool_names
from tightfit.serving.http.limits import MAX_PARALLEL_CALLS
from tightfit.serving.http.schemas import (
    AnswerRequest,
    ApiError,
    ChatRequest,
    JsonFormat,
    PatternFormat,
    SchemaFormat,
)


def make_grammar(
    body: AnswerRequest, prompter: Prompter, tools: Sequence[Tool] = ()
) -> Grammar | None:
    """None where any text will do. Raises `ApiError` for what cannot be promised."""
    compiler = SchemaCompiler()
    required = body.required_tools if isinstance(body, ChatRequest) else None
    param = "response_format"
    try:
        wanted = _format_node(body, compiler)
        if required is not None or (wanted is not None and tools):
            param = "tools"
            assert isinstance(body, ChatRequest)
            calls = _call_node(body, prompter, _choose_tools(tools, required or []), compiler)
            wanted = calls if required is not None or wanted is None else choice(calls, wanted)
        return None if wanted is None else compiler.finish(wanted)
    except GrammarError as error:
        raise ApiError(400, f"`{param}`: {error}.", code="invalid_value", param=param) from error


def _format_node(body: AnswerRequest, compiler: SchemaCompiler) -> Node | None:
    given = body.response_format
    if isinstance(given, JsonFormat):
        return compiler.add({"type": "object"})
    if isinstance(given, SchemaFormat):
        return compiler.add(given.json_schema.schema_)
    return read_pattern(given.pattern) if isinstance(given, PatternFormat) else None


def _choose_tools(tools: Sequence[Tool], names: Sequence[str]) -> Sequence[Tool]:
    if not tools:
        raise ApiError(
            400,
            "A call is asked for, and there are no `tools`.",
            code="invalid_value",
            param="tool_choice",
        )
    unknown = [name for name in names if name not in tool_names(tools)]
    if unknown:
        raise ApiError(
            400,
            f"`tool_choice` names `{unknown[0][:100]}`, which is not in `tools`.",
            code="invalid_value",
            param="tool_choice",
        )
    return [tool for tool in tools if not names or tool["function"]["name"] in names]


def _call_node(
    body: ChatRequest, prompter: Prompter, tools: Sequence[Tool], compiler: SchemaCompiler
) -> Node:
    syntax: CallSyntax | None = prompter.call_syntax
    if syntax is None or syntax.write is None:
        raise ApiError(
            400,
            "How this model writes calls cannot be promised: leave `tool_choice` out, and "
            "`response_format` where there are `tools`.",
            code="unsupported_parameter",
            param="tool_choice",
        )
    arguments = {
        str(tool["function"]["name"]): compiler.rule(
            lambda tool=tool: compiler.add(_parameters(tool))  # type: ignore[misc]
        )
        for tool in tools
    }
    is_single = body.parallel_tool_calls is False or bool(body.required_tools)
    template = "" if prompter.template is None else prompter.template.text
    most = 1 if is_single else MAX_PARALLEL_CALLS
    return syntax.write(CallForm(arguments=arguments, most=most, template=template))


def _parameters(tool: Tool) -> object:
    """A call's arguments are an object, whether or not the schema says so."""
    given = tool["function"].get("parameters") or {}
    return given if "$ref" in given or "anyOf" in given else {**given, "type": "object"}

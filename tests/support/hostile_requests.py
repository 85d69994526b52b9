"""Requests that no client should send, drawn by a seed, and what a server made of them."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TOKENIZE = "/tokenize"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = (
    *(CHAT, COMPLETION, TOKENIZE, "/detokenize", RESPONSES, MESSAGES),
    f"{MESSAGES}/count_tokens",
)
"""That take a JSON body."""
FEW_TOKENS = 4
READ_SECONDS = 30.0
"""For an answer; a server that is silent for longer has lost the request."""


class Leaving(str, Enum):
    """When the client closes its connection."""

    ANSWERED = "when the server has closed it, or has answered"
    STREAMING = "in the midst of the answer"
    SENT = "as soon as everything is sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileRequest:
    """What is sent on one connection."""

    kind: str
    pieces: Sequence[bytes]
    pause_seconds: float = 0.0
    """Between two pieces."""
    leaving: Leaving = Leaving.ANSWERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response on a connection."""

    status: int
    headers: dict[str, str]
    body: bytes


def send_hostile(request: HostileRequest, port: int) -> list[Answer] | None:
    """The answers; None where the server is silent for too long."""
    with socket.socket() as raw:
        raw.settimeout(READ_SECONDS)
        try:
            raw.connect(("127.0.0.1", port))
            for number, piece in enumerate(request.pieces):
                if number and request.pause_seconds:
                    time.sleep(request.pause_seconds)
                raw.sendall(piece)
        except OSError:  # it has closed already; its answer can still be read
            pass
        if request.leaving is Leaving.SENT:
            return []
        received = b""
        try:
            while piece := raw.recv(65_536):
                received += piece
                if request.leaving is Leaving.STREAMING and b"data: " in received:
                    break
        except TimeoutError:
            return None
        except OSError:
            pass
    return list(read_answers(received))


_HEAD = re.compile(rb"HTTP/1\.1 (\d{3})[^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")


def read_answers(received: bytes) -> Iterator[Answer]:
    """Every response in what came on a connection."""
    heads = list(_HEAD.finditer(received))
    for head, following in zip_longest(heads, heads[1:]):
        lines = (line.partition(": ") for line in head[2].decode("latin-1").splitlines())
        end = len(received) if following is None else following.start()
        yield Answer(
            status=int(head[1]),
            headers={name.lower(): value for name, _, value in lines},
            body=received[head.end() : end],
        )


def draw_requests(seed: int, num_requests: int) -> Iterator[HostileRequest]:
    """The same for the same seed; every kind comes up."""
    drawn = random.Random(seed)
    kinds = [*_KINDS, *(kind for kind in _BODY_KINDS for _ in range(2))]
    for number in range(num_requests):
        if number % 500 == 250:
            yield _large_body(drawn)
        kind = kinds[number % len(kinds)] if number < len(kinds) else drawn.choice(kinds)
        yield kind(drawn)


# Bodies.


def http_request(
    body: bytes, path: str = CHAT, *, method: str = "POST", headers: Sequence[str] = ()
) -> bytes:
    """A whole request, after which the connection is to be closed."""
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def _valid_fields(path: str) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "how many singers"}]}
    if path in (COMPLETION, TOKENIZE):
        prompt = {"prompt": "how many singers"}
    if path == RESPONSES:
        return {"input": "how many singers", "max_output_tokens": FEW_TOKENS}
    if path == "/detokenize":
        prompt = {"tokens": [5, 6, 7]}
    return {**prompt, "max_tokens": FEW_TOKENS}


_FIELDS = (
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("top_k", "min_p", "repetition_penalty", "seed", "stop", "n", "ignore_eos", "stream", "user"),
    *("stream_options", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "tools"),
    *("top_logprobs", "tool_choice", "functions", "function_call", "response_format", "modalities"),
    *("audio", "best_of", "echo", "suffix", "unknown", "presence_penalty", "tokens"),
    *("add_special_tokens", "return_token_strs", "input", "instructions", "max_output_tokens"),
    *("text", "system", "stop_sequences", "thinking", "previous_response_id", "background"),
)
_SCHEMAS = (
    *("{}", "true", "[]", '{"$ref": "#"}', '{"$ref": "#/$defs/a"}', '{"type": 5}', '{"enum": []}'),
    '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
    '{"anyOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}}]}',
    '{"items": ' * 60 + "{}" + "}" * 60,
    '{"const": "' + "x" * 100_000 + '"}',
    '{"enum": [' + ",".join(map(str, range(9000))) + "]}",
    '{"type": "string", "minLength": 1e300}',
    '{"type": "array", "items": {"type": "array", "minItems": 2000}, "minItems": 2000}',
    '{"type": "integer", "minimum": 1e308, "maximum": -1e308}',
    '{"properties": {"\\ud800": {}}}',
)
_PATTERNS = (
    *("(a*)*", "(a|a)+$", "(.{0,99}x){0,99}", "(" * 999, "[", "\\", "a{2000}{2000}", "(?i)a"),
    *("(((a?){30}){30}){30}", "[^\\u0000-\\u{10ffff}]", "\\ud800", "|" * 900, "x*" * 400),
)
_VALUES = (
    *("null", "true", "false", "0", "-1", "1e999", "-1e999", "NaN", "Infinity", "1.5", "-0.0"),
    *('""', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\u202e\\u001b]52;c;YQ==\\u0007"'),
    *("[]", "{}", "[[]]", "[null]", '[""]', '{"a": {}}', '{"type": "json_object"}', "[[[1]]]"),
    *(
        str(2**31),
        str(2**63),
        str(-(2**64)),
        "9" * 400,
        "9" * 5000,
        "1e-400",
        '"' + "x" * 5000 + '"',
    ),
    *(
        "[1,2,3]",
        "[-1]",
        "[99999999]",
        "[2147483648]",
        '["a", 1]',
        '[["a"]]',
        '{"include_usage": 7}',
    ),
    *(f'{{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}' for schema in _SCHEMAS),
    *(f'{{"type": "regex", "pattern": {json.dumps(pattern)}}}' for pattern in _PATTERNS),
    *('"required"', '{"type": "function", "function": {"name": "f"}}'),
    *('[{"type": "function_call_output", "call_id": "a", "output": "b"}]', '[{"type": "x"}]'),
    *('[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]', '"any"'),
    *('{"format": {"type": "json_schema", "schema": {"$ref": "#"}}}', '{"type": "tool"}'),
    *('{"5": -100}', '{"-1": 0}', '{"5": 1e999}', '{"99999999": 1}', "20", "0.5"),
    *('[{"role": "user"}]', '[{"role": "\\ud83d", "content": "a"}]', '[{"content": [1]}]'),
    *('[{"role": "user", "content": [{"type": "image_url"}]}]', '"<script>alert(1)</script>"'),
)


def _with_field(path: str, name: str, value: str) -> bytes:
    """A valid body with one field set to JSON text."""
    fields = {key: json.dumps(one) for key, one in _valid_fields(path).items()} | {name: value}
    return ("{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}").encode()


def _wrong_type(drawn: random.Random) -> HostileRequest:
    path = drawn.choice(PATHS)
    body = _with_field(path, drawn.choice(_FIELDS), drawn.choice(_VALUES))
    return HostileRequest(kind="wrong type", pieces=[http_request(body, path)])


def _deep(drawn: random.Random) -> HostileRequest:
    path, depth = drawn.choice(PATHS), drawn.choice((90, 990, 2_000, 100_000))
    value = "[" * depth + "]" * depth
    if drawn.random() < 0.5:
        value = '{"a":' * depth + "1" + "}" * depth
    is_whole = drawn.random() < 0.3
    body = value.encode() if is_whole else _with_field(path, drawn.choice(_FIELDS), value)
    return HostileRequest(kind="deep", pieces=[http_request(body, path)])


def _long_list(drawn: random.Random) -> HostileRequest:
    path = drawn.choice(PATHS)
    num_items = drawn.choice((20, 1_000, 50_000, 1_000_000))
    item = drawn.choice(('"a"', "1", "-1", "{}", "[1]", "null", '{"role":"user","content":"a"}'))
    most = 3_900_000 // (len(item) + 1)
    value = "[" + ",".join([item] * min(num_items, most)) + "]"
    name = drawn.choice(("messages", "prompt", "stop", "tools", "modalities", "user", "unknown"))
    return HostileRequest(
        kind="long list", pieces=[http_request(_with_field(path, name, value), path)]
    )


def _many_keys(drawn: random.Random) -> HostileRequest:
    path = drawn.choice(PATHS)
    name = drawn.choice(("same", "k%d", "messages", "\\ud800%d"))
    num_keys = drawn.choice((2, 500, 100_000))
    keys = ",".join(f'"{name.replace("%d", str(n))}": 1' for n in range(num_keys))
    body = (json.dumps(_valid_fields(path))[:-1] + f",{keys}}}").encode()
    return HostileRequest(kind="many keys", pieces=[http_request(body, path)])


def _broken_bytes(drawn: random.Random) -> HostileRequest:
    path = drawn.choice(PATHS)
    body = bytearray(json.dumps(_valid_fields(path)).encode())
    for _ in range(drawn.randint(1, 4)):
        place = drawn.randrange(len(body))
        what = drawn.randrange(4)
        if what == 0:
            del body[place:]
            body += b" "
        elif what == 1:
            body[place] = drawn.randrange(256)
        elif what == 2:
            body[place:place] = drawn.choice((b"\xff", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf"))
        else:
            body[place:place] = drawn.randbytes(drawn.randint(1, 50))
    # A number that grew is no reason to wait for a long answer.
    body = bytearray(re.sub(rb"(?<=[0-9])[0-9]+", b"", bytes(body)))
    encoded = bytes(body)
    if drawn.random() < 0.2:
        encoded = json.dumps(_valid_fields(path)).encode(drawn.choice(("utf-16", "utf-32")))
    return HostileRequest(kind="broken bytes", pieces=[http_request(encoded, path)])


def _other_type(drawn: random.Random) -> HostileRequest:
    given = drawn.choice(
        (
            "text/plain",
            "multipart/form-data; boundary=x",
            "application/x-www-form-urlencoded",
            "application/json; charset=utf-7",
            "application/json\tx",
            "/",
            "",
        )
    )
    body = json.dumps(_valid_fields(CHAT)).encode()
    request = http_request(body).replace(b"application/json", given.encode(), 1)
    return HostileRequest(kind="other type", pieces=[request])


_BODY_KINDS: tuple[Callable[[random.Random], HostileRequest], ...] = (
    *(_wrong_type, _wrong_type, _deep, _long_list, _many_keys, _broken_bytes, _other_type),
)


def _large_body(_drawn: random.Random) -> HostileRequest:
    head = http_request(b"").replace(b"Content-Length: 0", b"Content-Length: 104857600")
    return HostileRequest(kind="100 MiB", pieces=[head, *[b" " * 2**20] * 100])


# What is no HTTP, or odd HTTP.


def _framing(drawn: random.Random) -> HostileRequest:
    lengths = drawn.choice(
        (
            ["Content-Length: -1"],
            ["Content-Length: 99999999999999999999999"],
            ["Content-Length: 1e3"],
            ["Content-Length: +5"],
            ["Content-Length: 5", "Content-Length: 6"],
            ["Content-Length: 5, 6"],
            ["Content-Length: 5", "Transfer-Encoding: chunked"],
            ["Transfer-Encoding: chunked", "Content-Length: 0"],
            ["Transfer-Encoding: gzip"],
            ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
            ["Transfer-Encoding: chunked, chunked"],
            ["Transfer-Encoding: xchunked"],
            ["Transfer-Encoding: identity", "Content-Length: 2"],
        )
    )
    head = "\r\n".join((f"POST {CHAT} HTTP/1.1", "Host: localhost", *lengths, "Connection: close"))
    rest = drawn.choice((b"{}", b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"))
    return HostileRequest(
        kind="framing", pieces=[head.encode() + b"\r\n\r\n" + rest], leaving=_sometimes_sent(drawn)
    )


def _chunks(drawn: random.Random) -> HostileRequest:
    chunk = drawn.choice(
        (
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"-2\r\n{}\r\n0\r\n\r\n",
            b"2\r\n{}x\r\n0\r\n\r\n",
            b"ffffffffffffffffffff\r\n{}",
            b"2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"2\n{}\n0\n\n",
            b"2\r\n{}\r\n0\r\nX: y\r\nBad\r\n\r\n",
            b"1\r\n{\r\n" * 2_000 + b"0\r\n\r\n",
            b"2\r\n{}\r\n0\r\n" + b"T: t\r\n" * 20_000 + b"\r\n",
        )
    )
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    pieces = [head.encode() + b"Connection: close\r\n\r\n", chunk]
    return HostileRequest(kind="chunks", pieces=pieces)


def _headers(drawn: random.Random) -> HostileRequest:
    lines = drawn.choice(
        (
            b"X: " + b"y" * 200_000,
            b"\r\n".join(b"X-%d: y" % number for number in range(10_000)),
            b"no colon",
            b"X : space",
            b"X: a\r\n folded",
            b"X: a\x00b",
            b"X: \xff\xfe",
            b"\xc3\xa4: x",
            b": nameless",
            b"Host: evil.example",
            b"Origin: https://evil.example",
            b"Origin: null",
            b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
            b"Expect: 100-continue",
            b"Expect: nonsense",
            b"Range: bytes=0-0,0-0,0-0,0-0",
            b"Cookie: " + b"a=b; " * 1_000,
            b"Authorization: Bearer \xff",
            b"X-Forwarded-For: 1.2.3.4\r\nForwarded: for=1.2.3.4;host=evil",
            b"Accept-Encoding: " + b"gzip, " * 500,
            b"Connection: keep-alive, close, \x0b",
        )
    )
    path = drawn.choice(("/health", "/v1/models", CHAT, "/metrics"))
    method = b"POST" if path == CHAT else b"GET"
    head = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n"
    return HostileRequest(kind="headers", pieces=[head + b"Connection: close\r\n\r\n"])


def _request_line(drawn: random.Random) -> HostileRequest:
    line = drawn.choice(
        (
            b"GET /%00 HTTP/1.1",
            b"GET /v1/models/%00%ff%fe HTTP/1.1",
            b"GET /v1/models/../../etc/passwd HTTP/1.1",
            b"GET /v1/models/%2e%2e/%2e%2e/etc/passwd HTTP/1.1",
            b"GET //evil.example/%2f.. HTTP/1.1",
            b"GET http://evil.example/health HTTP/1.1",
            b"GET /" + b"a" * 60_000 + b" HTTP/1.1",
            b"GET /" + b"a" * 90_000 + b" HTTP/1.1",
            b"GET /health?" + b"a=b&" * 5_000 + b" HTTP/1.1",
            b"GET /v1/models/%ED%A0%80%1b%5d52;c HTTP/1.1",
            b"GET /%zz%u1234 HTTP/1.1",
            b"GET /\xc3\xa4 HTTP/1.1",
            b"GET * HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
            b"CONNECT evil.example:443 HTTP/1.1",
            b"TRACE /health HTTP/1.1",
            b"PROPFIND / HTTP/1.1",
            b"DELETE /v1/models HTTP/1.1",
            b"HEAD /health HTTP/1.1",
            b"HEAD /v1/chat/completions HTTP/1.1",
            b"get /health HTTP/1.1",
            b"BREW /coffee HTTP/1.1",
            b"G\x00T /health HTTP/1.1",
            b"GET /health HTTP/9.9",
            b"GET /health HTTP/2.0",
            b"GET /health HTTP/0.9",
            b"GET /health",
            b"GET  /health  HTTP/1.1",
            b" GET /health HTTP/1.1",
            b"GET /health HTTP/1.1\nX: y",
            b"POST /v1/chat/completions HTTP/1.0",
            b"PRI * HTTP/2.0",
        )
    )
    host = drawn.choice((b"Host: localhost\r\n", b"Host: localhost\r\n", b"", b"Host: evil\r\n"))
    return HostileRequest(
        kind="request line", pieces=[line + b"\r\n" + host + b"Connection: close\r\n\r\n"]
    )


def _no_http(drawn: random.Random) -> HostileRequest:
    sent = drawn.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + drawn.randbytes(300),
            drawn.randbytes(drawn.randint(1, 5_000)) + b"\r\n\r\n",
            b"\r\n" * 5_000 + b"\r\n\r\nx\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + drawn.randbytes(50),
            b"\x00" * 100_000,
            b"\xff" * 70_000,
        )
    )
    return HostileRequest(kind="no HTTP", pieces=[sent], leaving=_sometimes_sent(drawn))


def _pipelined(drawn: random.Random) -> HostileRequest:
    path = drawn.choice(("/health", "/v1/models", "/openapi.json", "/nowhere"))
    one = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    last = drawn.choice((http_request(b"{"), b"junk\r\n\r\n", http_request(b"", method="GET")))
    return HostileRequest(
        kind="pipelined",
        pieces=[one * drawn.randint(2, 60) + last],
        leaving=_sometimes_sent(drawn),
    )


# Clients that are slow, silent or gone.


def _slow_head(drawn: random.Random) -> HostileRequest:
    head = http_request(b"{}")[: -drawn.randint(3, 30)]
    return HostileRequest(
        kind="slow head",
        pieces=[head[place : place + 4] for place in range(0, len(head), 4)],
        pause_seconds=0.05,
    )


def _half_body(drawn: random.Random) -> HostileRequest:
    request = http_request(json.dumps(_valid_fields(CHAT)).encode())
    pieces = [request[: -drawn.randint(1, 60)]]
    if drawn.random() < 0.5:
        pieces = [pieces[0][:-3], *[bytes([byte]) for byte in pieces[0][-3:]]]
    return HostileRequest(
        kind="half body", pieces=pieces, pause_seconds=0.1, leaving=_sometimes_sent(drawn)
    )


def _silent(drawn: random.Random) -> HostileRequest:
    return HostileRequest(
        kind="silent", pieces=[drawn.choice((b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n"))]
    )


def _gone(drawn: random.Random) -> HostileRequest:
    """Much is asked, and nobody stays to read it."""
    fields = {
        **_valid_fields(CHAT),
        "max_tokens": 2**31 - 1,
        "n": drawn.choice((1, 8)),
        "stream": drawn.random() < 0.7,
        "ignore_eos": True,
    }
    leaving = Leaving.STREAMING if fields["stream"] and drawn.random() < 0.6 else Leaving.SENT
    return HostileRequest(
        kind="gone", pieces=[http_request(json.dumps(fields).encode())], leaving=leaving
    )


def _sometimes_sent(drawn: random.Random) -> Leaving:
    return Leaving.SENT if drawn.random() < 0.3 else Leaving.ANSWERED


_KINDS: tuple[Callable[[random.Random], HostileRequest], ...] = (
    *(_framing, _chunks, _headers, _headers, _request_line, _request_line, _no_http, _pipelined),
    *(_slow_head, _half_body, _silent, _gone, _gone),
)


def draw_misbehaviour(seed: int) -> Iterator[HostileRequest]:
    """Without end: slow, silent and vanishing clients, and junk."""
    drawn = random.Random(seed)
    while True:
        yield drawn.choice((_slow_head, _half_body, _silent, _gone, _no_http))(drawn)


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing until the block ends."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            raw = socket.socket()
            opened.append(raw)
            raw.settimeout(READ_SECONDS)
            raw.connect(("127.0.0.1", port))
        yield opened
    finally:
        for raw in opened:
            raw.close()

"""What a server takes from its clients, and how long it waits for them: all limits."""

from __future__ import annotations

import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Of the HTTP API; the page uses those of connections and bodies."""

    max_connections: int = 1000
    """Open at once. When all are taken, the one whose client has been silent longest is closed."""
    max_head_bytes: int = 64 * 2**10
    """Of a request's first line and headers; more get 431."""
    max_body_bytes: int = 4 * 2**20
    """More get 413."""
    request_seconds: float = 60.0
    """For a whole request to arrive, from connecting or its first byte; later ones get 408."""
    idle_seconds: int = 30
    """Between two requests of one connection."""
    stall_seconds: float = 60.0
    """How long a client may leave a full connection unread."""
    max_queue: int = 128
    """Answers that may wait for a slot, for each model; more get 503."""
    answer_seconds: float = 600.0
    """For a whole answer, its wait included; longer ones end with 504."""


DISCARDED_BYTES = 64 * 2**20
"""Of a body that is too large, so much is read and dropped: a client that is still sending when
the connection closes never sees the answer."""
MAX_VALUES = 500_000
"""In a body, of all kinds; more than this get 413. Parsing them stops the event loop for less than
half a second. A prompt as token ids has one for each token."""
MAX_NESTS = 50_000
"""Of them, lists and objects: each takes ten times as long."""
MAX_QUOTES = 1_000_000
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_PARALLEL_CALLS = 16
"""In one answer, where calls are required."""
MAX_ECHO_LOGITS = 2**28
"""Tokens of all prompts times vocabulary, where `echo` asks for log-probabilities: 1 GiB in fp32.
"""
MAX_SIDE_JOBS = 16
"""Requests of each model that wait for something else than an answer (tokens, a prompt's
log-probabilities); more get 503."""
BACKLOG = 128
"""Connections that the system accepts before the server has looked at them."""
SPARE_FILES = 256 + BACKLOG
"""Open files that a server needs beside its connections: libraries, models, sockets of engines."""


def reserve_connections(wanted: int) -> int:
    """Raise this process's limit on open files; returns the connections that fit under it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(soft - SPARE_FILES, soft // 2)

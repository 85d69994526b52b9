"""Metrics of the HTTP API in Prometheus' text format, version 0.0.4.

Format: prometheus.io/docs/instrumenting/exposition_formats. Kept by the event loop alone.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import ClassVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


LabelKey = tuple[tuple[str, str], ...]


class MetricFamily:
    """One metric with its help; values by label."""

    kind: ClassVar[str]

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.values: dict[LabelKey, float] = {}

    def forget(self, label: str, value: str) -> None:
        """Drop every value that has this label."""
        for key in [key for key in self.values if (label, value) in key]:
            del self.values[key]

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.samples()

    def samples(self) -> Iterator[str]:
        for key, value in self.values.items():
            yield format_sample(self.name, dict(key), value)


class Counter(MetricFamily):
    """A number that only grows."""

    kind = "counter"

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        self.values[key] = self.values.get(key, 0) + amount


class Gauge(MetricFamily):
    """A number that is set when the page is asked for."""

    kind = "gauge"

    def set(self, amount: float, **labels: str) -> None:
        self.values[tuple(labels.items())] = amount


class Histogram(MetricFamily):
    """How many observations were at most so large; `values` are their sums."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, help)
        self._bounds = bounds
        self._counts: dict[LabelKey, list[int]] = {}

    def forget(self, label: str, value: str) -> None:
        for key in [key for key in self._counts if (label, value) in key]:
            del self._counts[key]
        super().forget(label, value)

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self.values[key] = self.values.get(key, 0.0) + value

    def samples(self) -> Iterator[str]:
        for key, counts in self._counts.items():
            labels = dict(key)
            bounds = (*(f"{bound:g}" for bound in self._bounds), "+Inf")
            for bound, total in zip(bounds, accumulate(counts), strict=True):
                yield format_sample(f"{self.name}_bucket", {**labels, "le": bound}, total)
            yield format_sample(f"{self.name}_sum", labels, self.values[key])
            yield format_sample(f"{self.name}_count", labels, sum(counts))


def format_sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """One line: a name, its labels, a number."""
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    pairs = ",".join(f'{key}="{text.translate(escapes)}"' for key, text in labels.items())
    number = f"{value:d}" if isinstance(value, int) else repr(value)
    return f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"


class Metrics:
    """Every metric that `/metrics` reports."""

    def __init__(self) -> None:
        self.requests = Counter(
            "tightfit_http_requests_total",
            "Answered HTTP requests by path and status; 499 where the client had gone.",
        )
        self.request_seconds = Histogram(
            "tightfit_http_request_seconds",
            "From a request's head to the last byte of its answer.",
            SECONDS,
        )
        self.answers = Counter(
            "tightfit_answers_total",
            "Answers by model and end: stop, length, cancelled or failed.",
        )
        self.prompt_tokens = Counter("tightfit_prompt_tokens_total", "Prompt tokens read.")
        self.cached_tokens = Counter(
            "tightfit_cached_prompt_tokens_total", "Prompt tokens found in the cache."
        )
        self.cached_prompts = Counter(
            "tightfit_prompts_found_in_cache_total", "Prompts of which a part was in the cache."
        )
        self.new_tokens = Counter("tightfit_generated_tokens_total", "Tokens computed.")
        self.first_token_seconds = Histogram(
            "tightfit_time_to_first_token_seconds",
            "From handing a request to the engine to its first token, the queue included.",
            SECONDS,
        )
        self.token_seconds = Histogram(
            "tightfit_seconds_per_token",
            "Mean time between the tokens of an answer, the first left out.",
            TOKEN_SECONDS,
        )
        self.answer_seconds = Histogram(
            "tightfit_answer_seconds",
            "From handing a request to the engine to the end of its answer, the queue included.",
            SECONDS,
        )
        self.slots = Gauge("tightfit_slots", "Answers that are computed at once at most.")
        self.weight_bytes = Gauge("tightfit_weight_bytes", "Of a model, in memory.")
        self.prefix_bytes = Gauge(
            "tightfit_prefix_cache_limit_bytes", "That earlier requests' keys and values may take."
        )
        self.resident_bytes = Gauge(
            "process_resident_memory_bytes", "Resident memory of the server's process."
        )
        self.started = Gauge(
            "process_start_time_seconds", "When the server began, in seconds since 1970."
        )
        self.started.set(time.time())
        self.running = Gauge("tightfit_answers_running", "Answers being computed.")
        self.waiting = Gauge("tightfit_answers_waiting", "Answers that wait for a slot.")
        self.info = Gauge("tightfit_model_info", "1, with what is loaded as labels.")

    def forget_model(self, name: str) -> None:
        """Drop the values of an adapter that is gone: names that come and go must not add up."""
        for family in self._families():
            family.forget("model", name)

    def _families(self) -> list[MetricFamily]:
        return [value for value in vars(self).values() if isinstance(value, MetricFamily)]

    def render(self) -> str:
        """The whole page."""
        families = self._families()
        return "\n".join(line for family in families for line in family.lines()) + "\n"

"""Metrics of the HTTP API in Prometheus' text format, version 0.0.4.

Format: prometheus.io/docs/instrumenting/exposition_formats. Kept by the event loop alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Labels = Mapping[str, str]


class MetricFamily:
    """One metric with its help; values by label."""

    def __init__(self, name: str, help: str, kind: str) -> None:
        self.name, self.help, self.kind = name, help, kind

    def lines(self) -> Iterable[str]:
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.samples()

    def samples(self) -> Iterable[str]:
        raise NotImplementedError


class Counter(MetricFamily):
    """A number that only grows."""

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help, "counter")
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0) + amount

    def samples(self) -> Iterable[str]:
        return (format_sample(self.name, dict(key), value) for key, value in self._values.items())


class Gauge(MetricFamily):
    """A number that is asked for when the page is."""

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help, "gauge")
        self.values: list[tuple[Labels, float]] = []

    def samples(self) -> Iterable[str]:
        return (format_sample(self.name, labels, value) for labels, value in self.values)


class Histogram(MetricFamily):
    """How many observations were at most so large."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, help, "histogram")
        self._bounds = bounds
        self._counts: dict[tuple[tuple[str, str], ...], list[int]] = {}
        self._sums: dict[tuple[tuple[str, str], ...], float] = {}

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[key] = self._sums.get(key, 0.0) + value

    def samples(self) -> Iterable[str]:
        for key, counts in self._counts.items():
            labels, total = dict(key), 0
            for bound, count in zip((*self._bounds, None), counts, strict=True):
                total += count
                upto = "+Inf" if bound is None else f"{bound:g}"
                yield format_sample(f"{self.name}_bucket", {**labels, "le": upto}, total)
            yield format_sample(f"{self.name}_sum", labels, self._sums[key])
            yield format_sample(f"{self.name}_count", labels, total)


def format_sample(name: str, labels: Labels, value: float) -> str:
    """One line: a name, its labels, a number."""
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    number = f"{value:d}" if isinstance(value, int) else repr(value)
    return f"{name}{{{pairs}}} {number}" if pairs else f"{name} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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
        self.running = Gauge("tightfit_answers_running", "Answers being computed.")
        self.waiting = Gauge("tightfit_answers_waiting", "Answers that wait for a slot.")
        self.info = Gauge("tightfit_model_info", "1, with what is loaded as labels.")

    def render(self) -> str:
        """The whole page."""
        families = [value for value in vars(self).values() if isinstance(value, MetricFamily)]
        return "\n".join(line for family in families for line in family.lines()) + "\n"

"""Small parts of the HTTP API: metrics, names, usage, the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tightfit.api.serve import choose_key
from tightfit.core.errors import UsageError
from tightfit.engines.protocol import Done, FinishReason
from tightfit.runtime.model_files import Artefact, ArtefactKind
from tightfit.serving.http.metrics import Counter, Histogram, Metrics, format_sample
from tightfit.serving.http.server import name_models
from tightfit.serving.http.writers import count_usage, format_event, write_usage

LINE = re.compile(
    r"^[a-zA-Z_:][a-zA-Z0-9_:]*"
    r'(\{[a-zA-Z_]\w*="([^"\\\n]|\\[\\n"])*"(,[a-zA-Z_]\w*="([^"\\\n]|\\[\\n"])*")*\})?'
    r" (-?\d+(\.\d+)?(e[+-]?\d+)?|NaN|[+-]Inf)$"
)
"""A sample by Prometheus' description of its text format."""


def test_histogram_counts_up_to_every_bound() -> None:
    found = Histogram("h", "help", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        found.observe(value, m="x")

    assert list(found.samples()) == [
        'h_bucket{m="x",le="1"} 2',
        'h_bucket{m="x",le="2"} 3',
        'h_bucket{m="x",le="+Inf"} 4',
        'h_sum{m="x"} 12.0',
        'h_count{m="x"} 4',
    ]


def test_counter_adds_by_label() -> None:
    found = Counter("c", "help")
    found.add(code="200")
    found.add(2, code="200")
    found.add(code="404")

    assert list(found.lines()) == [
        "# HELP c help",
        "# TYPE c counter",
        'c{code="200"} 3',
        'c{code="404"} 1',
    ]


def test_labels_are_escaped() -> None:
    assert format_sample("a", {"m": 'x"y\\z\n'}, 1) == r'a{m="x\"y\\z\n"} 1'


def test_every_line_of_the_page_is_in_the_format() -> None:
    metrics = Metrics()
    metrics.requests.add(path='/"odd\\', code="200")
    metrics.request_seconds.observe(1e-7, path="/")
    metrics.new_tokens.add(12, model="m")
    page = metrics.render()

    assert page.endswith("\n")
    samples = [line for line in page.splitlines() if not line.startswith("#")]
    assert len(samples) > 10
    assert [line for line in samples if not LINE.match(line)] == []


def _artefact(name: str, kind: ArtefactKind = ArtefactKind.MODEL) -> Artefact:
    return Artefact(name=name, kind=kind, path=Path(name), tokenizer=Path(name))


def test_models_are_called_by_alias_folder_and_hub_id(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    artefacts = [
        _artefact(f"{folder}/"),
        _artefact("org/model"),
        _artefact("a/b.Q4_0.gguf", ArtefactKind.GGUF),
    ]

    assert name_models(artefacts, ["first"]) == (
        ("first", "mine"),
        ("model", "org/model"),
        ("b.Q4_0", "a/b.Q4_0.gguf"),
    )


def test_two_models_of_one_name_need_aliases() -> None:
    artefacts = [_artefact("one/model"), _artefact("two/model")]

    with pytest.raises(UsageError, match="`model`") as reported:
        name_models(artefacts, [])
    assert "--name" in reported.value.remedy
    assert name_models(artefacts, ["a", "b"]) == (("a", "one/model"), ("b", "two/model"))
    with pytest.raises(UsageError, match="3 names for 2 models"):
        name_models(artefacts, ["a", "b", "c"])


def test_an_alias_wins_over_anothers_folder() -> None:
    artefacts = [_artefact("one/model"), _artefact("two/other")]

    assert name_models(artefacts, ["other", "x"]) == (
        ("other", "model", "one/model"),
        ("x", "two/other"),
    )


def _done(*, prompt: int, new: int, cached: int) -> Done:
    return Done(
        reason=FinishReason.STOP,
        text="",
        num_prompt_tokens=prompt,
        num_new_tokens=new,
        num_cached_tokens=cached,
        submitted_s=0,
        first_token_s=0,
        finished_s=0,
    )


def test_usage_counts_a_prompt_once_and_only_what_was_cached_before() -> None:
    answers = [
        _done(prompt=10, new=1, cached=4),
        _done(prompt=10, new=2, cached=9),
        _done(prompt=20, new=4, cached=0),
        _done(prompt=20, new=8, cached=19),
    ]

    assert write_usage(count_usage(answers, num_per_prompt=2)) == {
        "prompt_tokens": 30,
        "completion_tokens": 15,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_an_event_is_one_line_whatever_the_text_holds() -> None:
    event = format_event({"text": "a\n\ndata: [DONE]\r\u2028\x00"})

    assert event.endswith("\n\n")
    assert len(event[:-2].splitlines()) == 1


def test_the_key_is_asked_for_given_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIGHTFIT_API_KEY", raising=False)
    assert choose_key(None, is_loopback=True) == (None, None)
    key, made = choose_key(None, is_loopback=False)
    assert key is not None
    assert key == made
    assert len(key) >= 32
    assert choose_key(None, is_loopback=False)[0] != key
    assert choose_key("mine", is_loopback=True) == ("mine", None)
    monkeypatch.setenv("TIGHTFIT_API_KEY", "from-env")
    assert choose_key(None, is_loopback=True) == ("from-env", None)
    assert choose_key("mine", is_loopback=False) == ("mine", None)
    with pytest.raises(UsageError):
        choose_key("schlüssel", is_loopback=True)

"""Whole datasets encoded: stores, splits, cache, and every error at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="un-skip with: pip install 'tightfit[data]'")

from chat_models import byte_level, make_model, save_model

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.files import cache_folder
from tightfit.core.objectives import Objective
from tightfit.core.settings import TrainOn
from tightfit.core.strategy import DataSource
from tightfit.data import readers
from tightfit.data.encode import EncodedDataset, EncodeRequest, encode_dataset
from tightfit.data.profile import profile_dataset, profile_from_store
from tightfit.data.token_store import TokenStore, epoch_rows
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "chatml")


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))
    return path


def pairs(num: int, start: int = 0) -> list[Any]:
    return [
        {"prompt": f"question {i} " + "x " * (i % 7), "completion": f"answer {i} " + "y" * (i % 11)}
        for i in range(start, start + num)
    ]


def encode(folder: Path, *sources: Path | DataSource, **options: Any) -> EncodedDataset:
    as_sources = [s if isinstance(s, DataSource) else DataSource(path=str(s)) for s in sources]
    settings = {"seq_len": 256, "cache": folder.parent / "cache", **options}
    return encode_dataset(EncodeRequest(sources=as_sources, model_folder=folder, **settings))


def texts(store: TokenStore, folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(store.row(i).tokens.tolist()) for i in range(len(store))]


def list_segments(
    store: TokenStore, index: int, tokenizer: ChatTokenizer
) -> list[tuple[str, bool]]:
    """A row as stretches of text that are trained or not."""
    row = store.row(index)
    tokens, flags = row.tokens.tolist(), row.trained.tolist()
    ends = [at for at in range(1, len(flags)) if flags[at] != flags[at - 1]] + [len(flags)]
    segments: list[tuple[str, bool]] = []
    start, before = 0, ""
    for end in ends:
        if store.description.is_encoder_decoder:  # two texts, not one
            segments.append((tokenizer.decode(tokens[start:end]), flags[start]))
        else:  # differences of decoded prefixes, so that blanks at the seams stay
            text = tokenizer.decode(tokens[:end])
            segments.append((text[len(before) :], flags[start]))
            before = text
        start = end
    return segments


def test_rows_masks_and_places(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*pairs(3), "", *pairs(2, start=3)])

    encoded = encode(folder, path)

    store = encoded.train
    assert len(store) == 5
    assert encoded.eval is None
    assert store.place(3) == f"{path} line 5"
    assert list_segments(store, 3, load_tokenizer(folder)) == [
        ("<|im_start|>user\nquestion 3 x x x <|im_end|>\n<|im_start|>assistant\n", False),
        ("answer 3 yyy<|im_end|>", True),
        ("\n", False),
    ]
    assert store.num_trained.tolist() == [int(store.row(i).trained.sum()) for i in range(5)]
    assert store.lengths.tolist() == [len(store.row(i).tokens) for i in range(5)]
    about = store.description
    assert about.num_tokens == int(store.lengths.sum())
    assert about.num_trained_tokens == int(store.num_trained.sum())
    assert about.num_rows_with_stop == 5
    assert about.pad_token_id not in about.stop_token_ids
    assert encoded.report.template == "tokenizer"
    assert encoded.report.formats == "prompt-completion"


def test_held_out_rows_by_seed_with_twins_together(folder: Path, tmp_path: Path) -> None:
    rows = [row for row in pairs(100) for _ in range(2)]
    path = write(tmp_path / "a.jsonl", rows)

    def sides(seed: int) -> tuple[Counter[str], Counter[str]]:
        encoded = encode(folder, path, eval_fraction=0.1, seed=seed)
        assert encoded.eval is not None
        return Counter(texts(encoded.train, folder)), Counter(texts(encoded.eval, folder))

    train, held = sides(1)
    assert (len(train), len(held)) == (90, 10)
    assert set(train.values()) == set(held.values()) == {2}
    assert not set(train) & set(held)
    assert sides(1) == (train, held)
    assert sides(2)[1] != held


def test_separate_evaluation_data_and_what_is_in_both(folder: Path, tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", pairs(10))
    held = write(tmp_path / "b.jsonl", pairs(5, start=8))

    encoded = encode(folder, train, DataSource(path=str(held), split="eval"))

    assert encoded.eval is not None
    assert (len(encoded.train), len(encoded.eval)) == (10, 5)
    [finding] = [f for f in encoded.report.findings if f.kind == "in-both"]
    assert finding.shown == (f"{train} line 9", f"{train} line 10")
    assert encoded.eval.place(0) == f"{held} line 1"


def test_every_error_at_once(folder: Path, tmp_path: Path) -> None:
    rows = [
        *pairs(2),
        "{broken",
        {"prompt": "no answer key"},
        {"prompt": "p", "completion": 5},
        {"prompt": "p", "completion": ["", {}]},
        "[1, 2]",
        {"prompt": "p", "completion": " "},
        *pairs(1),
    ]
    path = write(tmp_path / "a.jsonl", rows)

    with pytest.raises(InvalidInputError) as caught:
        encode(folder, path)
    problem = caught.value.problem
    assert problem.startswith("3 rows cannot be trained on")
    for line in (3, 4, 7):
        assert f"{path} line {line}" in problem
    report = encode(folder, path, skip_invalid=True).report
    kinds = {finding.kind: finding.num_rows for finding in report.findings}
    assert kinds == {"unreadable": 3, "empty-answer": 2, "duplicate": 1}
    assert report.num_dropped == 5
    [twin] = [f for f in report.findings if f.kind == "duplicate"]
    assert twin.shown == (f"{path} line 9: same as {path} line 1",)


def test_many_errors_are_counted_not_listed(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*pairs(1), *["{"] * 500])

    with pytest.raises(InvalidInputError) as caught:
        encode(folder, path)
    assert "500 rows" in caught.value.problem
    assert "and 480 more" in caught.value.problem
    assert caught.value.problem.count(str(path)) == 20


def test_wrong_encodings_are_named(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "cafÃ©", "completion": "x"},
        {"prompt": "a\ufffdb", "completion": "x"},
        '{"prompt": "half \\ud83d of it", "completion": "x"}',
        '{"prompt": "nul \\u0000", "completion": "x"}',
        {"prompt": "Ã is a letter, Â too, café", "completion": "x"},
    ]
    path = write(tmp_path / "a.jsonl", rows)

    report = encode(folder, path).report

    found = {finding.kind: finding.shown[0] for finding in report.findings}
    assert {kind: shown.split(":")[0] for kind, shown in found.items()} == {
        "mojibake": f"{path} line 1",
        "replacement-character": f"{path} line 2",
        "surrogate": f"{path} line 3",
        "nul": f"{path} line 4",
    }
    assert all(finding.num_rows == 1 for finding in report.findings)


def test_plain_text_is_cut_into_pieces(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama-3")
    path = tmp_path / "a.txt"
    path.write_text("short text\n" + "hello the lazy dog " * 100 + "\n<|begin_of_text|>twice")
    tokenizer = load_tokenizer(folder)

    encoded = encode(folder, DataSource(path=str(path), text_rows="line"), seq_len=64)

    rows = texts(encoded.train, folder)
    assert rows[0] == "<|begin_of_text|>short text<|eot_id|>"
    assert "".join(rows[1:-1]) == (
        "<|begin_of_text|>" + "hello the lazy dog " * 99 + "hello the lazy dog<|eot_id|>"
    )
    assert rows[-1] == "<|begin_of_text|>twice<|eot_id|>"
    assert encoded.train.lengths.max() == 64
    assert all(encoded.train.row(i).trained.all() for i in range(len(encoded.train)))
    assert encoded.report.num_truncated == 0
    assert encoded.report.template == "none"
    assert encoded.train.place(len(encoded.train) - 1) == f"{path} line 3"
    assert tokenizer.eos_id in encoded.train.description.stop_token_ids


def test_a_document_has_one_begin_and_one_end_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "model", "llama-3")
    (tmp_path / "books").mkdir()
    text = "the lazy dog\n\n" * 300
    (tmp_path / "books" / "a.txt").write_text(text)
    (tmp_path / "books" / "b.md").write_text("# hello\n\nyou")
    monkeypatch.setattr(readers, "MAX_PART_CHARS", 1000)
    profile = profile_dataset(tmp_path / "books", seq_len=64, model=str(folder))

    encoded = encode(folder, tmp_path / "books", seq_len=64)

    rows = texts(encoded.train, folder)
    assert "".join(rows[:-1]) == f"<|begin_of_text|>{text.removesuffix(chr(10))}<|eot_id|>"
    assert rows[-1] == "<|begin_of_text|># hello\n\nyou<|eot_id|>"
    # Parts are counted like documents of their own, each with a mark.
    assert profile.num_tokens == pytest.approx(encoded.train.description.num_tokens, abs=8)
    assert profile.num_rows == pytest.approx(len(rows), abs=8)
    assert profile.num_lost_tokens == profile.num_truncated == 0


@pytest.mark.parametrize("seq_len", range(3, 30))
def test_no_token_of_a_text_is_left_out(tmp_path: Path, seq_len: int) -> None:
    folder = make_model(tmp_path / "model", "llama-3")
    path = write(tmp_path / "a.jsonl", [{"text": "hello the lazy dog"}])
    tokenizer = load_tokenizer(folder)

    store = encode(folder, path, seq_len=seq_len).train

    rows = [store.row(number).tokens.tolist() for number in range(len(store))]
    if len(rows) > 1 and rows[-1][0] == rows[-2][-1] and len(rows[-1]) == 2:
        rows[-1] = rows[-1][1:]  # a last token alone has the one before it beside it
    text = "<|begin_of_text|>hello the lazy dog<|eot_id|>"
    assert tokenizer.decode([token for row in rows for token in row]) == text
    assert all(len(store.row(number).tokens) > 1 for number in range(len(store)))


def test_encoder_decoder_pairs(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "t5",
        byte_level(["<pad>", "</s>"]),
        {"eos_token": "</s>", "pad_token": "<pad>"},
        config={"is_encoder_decoder": True, "model_type": "t5"},
    )
    path = write(tmp_path / "a.jsonl", [{"dialogue": "A: hello </s>\nB: you", "summary": "They."}])

    encoded = encode(folder, path)
    short = encode(folder, path, seq_len=6)

    tokenizer = load_tokenizer(folder)
    assert list_segments(encoded.train, 0, tokenizer) == [
        ("Summarize this:\n\nA: hello </s>\nB: you</s>", False),
        ("They.</s>", True),
    ]
    row = encoded.train.row(0)
    assert row.tokens.tolist().count(tokenizer.eos_id) == 2
    assert encoded.train.num_trained[0] == row.trained.sum()
    cut = short.train.row(0)
    assert cut.tokens[~cut.trained].tolist()[-1] == tokenizer.eos_id
    assert (~cut.trained).sum() == 6 < (~row.trained).sum()
    assert cut.tokens[cut.trained].tolist() == row.tokens[row.trained].tolist()
    assert profile_from_store(short.train).max_tokens == 6


def test_the_second_time_it_is_found(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(20))
    first = encode(folder, path, eval_fraction=0.2)

    again = encode(folder, path, eval_fraction=0.2)

    assert not first.is_cached
    assert again.is_cached
    assert again.report == first.report
    assert texts(again.train, folder) == texts(first.train, folder)


@pytest.mark.parametrize("change", ["data", "tokenizer", "template", "options", "weight"])
def test_any_change_encodes_anew(change: str, folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(20))
    encode(folder, path)
    options: dict[str, Any] = {}
    source = DataSource(path=str(path))
    if change == "data":
        stamp = path.stat().st_mtime_ns
        path.write_text(path.read_text().replace("answer 3", "answer 4"))
        os.utime(path, ns=(stamp, stamp))
    elif change == "tokenizer":
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "x": 1}))
    elif change == "template":
        options["template"] = "plain"
    elif change == "options":
        options["train_on"] = TrainOn.ALL
    else:
        source = DataSource(path=str(path), weight=2)

    assert not encode(folder, source, **options).is_cached


def test_a_damaged_cache_is_replaced(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(20))
    first = encode(folder, path)
    expected = texts(first.train, folder)
    blob = first.train.folder.parent / "tokens.i32"
    blob.write_bytes(blob.read_bytes()[:-40])

    again = encode(folder, path)

    assert not again.is_cached
    assert texts(again.train, folder) == expected
    assert [p.name for p in blob.parent.parent.iterdir()] == [again.report.key]


def test_two_processes_at_once(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(300))
    program = (
        "import sys; from pathlib import Path\n"
        "from tightfit.core.strategy import DataSource\n"
        "from tightfit.data.encode import EncodeRequest, encode_dataset\n"
        "data, model, cache = sys.argv[1:]\n"
        "made = encode_dataset(EncodeRequest(sources=[DataSource(path=data)], seq_len=64,\n"
        "    model_folder=Path(model), cache=Path(cache)))\n"
        "print(made.train.folder, len(made.train), int(made.train.lengths.sum()))\n"
    )
    cache = tmp_path / "shared"
    command = [sys.executable, "-c", program, str(path), str(folder), str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate()[0] for process in running}

    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(said) == 1
    assert len(list((cache / "tokens").iterdir())) == 1


def test_an_interrupted_encoding_leaves_nothing_to_be_found(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(3000))

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    request = EncodeRequest(
        sources=[DataSource(path=str(path))], model_folder=folder, seq_len=64, cache=tmp_path / "c"
    )
    with pytest.raises(KeyboardInterrupt):
        encode_dataset(request, progress=stop)
    assert list((tmp_path / "c" / "tokens").iterdir()) == []


def test_progress_is_told(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(100))
    seen: list[Any] = []
    request = EncodeRequest(
        sources=[DataSource(path=str(path))], model_folder=folder, seq_len=64, cache=tmp_path / "c"
    )

    encode_dataset(request, progress=seen.append)

    assert (seen[-1].num_rows, seen[-1].fraction) == (100, 1.0)


def test_nothing_to_train_is_refused(folder: Path, tmp_path: Path) -> None:
    empty = write(tmp_path / "a.jsonl", [{"prompt": "p", "completion": ""}])
    long = write(tmp_path / "b.jsonl", [{"prompt": "word " * 500, "completion": "x"}])

    with pytest.raises(InvalidInputError, match="No row has an answer"):
        encode(folder, empty)
    with pytest.raises(InvalidInputError, match="cut off at 64 tokens") as caught:
        encode(folder, long, seq_len=64)
    assert "--seq-len" in caught.value.remedy


@pytest.mark.parametrize("role", ["user", "nobody"])
def test_a_template_that_writes_no_answer_is_refused(
    folder: Path, tmp_path: Path, role: str
) -> None:
    """A stop token is added to each row, so that something would be trained: to say nothing."""
    template = tmp_path / "mute.jinja"
    template.write_text(
        "hello {% for m in messages %}{% if m.role == '" + role + "' %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )

    with pytest.raises(InvalidInputError, match="none of the answers"):
        encode(folder, write(tmp_path / "a.jsonl", pairs(5)), template=str(template))


def test_an_untrained_stop_token_is_refused(folder: Path, tmp_path: Path) -> None:
    long = write(tmp_path / "b.jsonl", [{"prompt": "p", "completion": "word " * 500}])

    with pytest.raises(InvalidInputError, match="never learn to stop"):
        encode(folder, long, seq_len=64)
    assert len(encode(folder, long, seq_len=64, train_on=TrainOn.ALL).train) == 1
    nameless = save_model(tmp_path / "nameless", byte_level(["<pad>"]), {})
    with pytest.raises(InvalidInputError, match="names no `eos_token`"):
        encode(nameless, write(tmp_path / "c.jsonl", pairs(2)), template="plain")


def test_a_base_model_gets_the_plain_template_and_is_told(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "base", byte_level(), {"eos_token": "<|endoftext|>"})
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "x"}])

    encoded = encode(folder, path)

    assert texts(encoded.train, folder) == ["p\nx<|endoftext|>\n"]
    assert encoded.report.template == "plain"
    assert any("no chat template" in note for note in encoded.report.notes)


def test_weights_of_sources(folder: Path, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.jsonl", pairs(40, start=100 * n)) for n in range(3)]
    sources = [DataSource(path=str(p), weight=w) for p, w in zip(paths, (2, 0.5, 1), strict=True)]

    store = encode(folder, *sources).train

    first, second = (epoch_rows(store, seed=3, epoch=e, shuffle=True) for e in (0, 1))
    assert len(first) == len(second) == 80 + 20 + 40
    assert first.tolist() == epoch_rows(store, seed=3, epoch=0, shuffle=True).tolist()
    counts = np.bincount(first, minlength=120)
    assert set(counts[:40].tolist()) == {2}
    assert sorted(counts[40:80].tolist()) == [0] * 20 + [1] * 20
    assert set(counts[80:].tolist()) == {1}
    half = [{i for i in rows.tolist() if 40 <= i < 80} for rows in (first, second)]
    assert half[0] != half[1]
    assert first.tolist() != sorted(first.tolist())
    ordered = epoch_rows(store, seed=3, epoch=0, shuffle=False)
    assert ordered.tolist() == sorted(first.tolist())


def test_profile_from_a_store_counts_what_is_there(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*pairs(30), {"prompt": "p", "completion": "word " * 99}])

    store = encode(folder, DataSource(path=str(path), weight=2), seq_len=64).train
    profile = profile_from_store(store)

    assert profile.is_exact
    assert profile.num_rows == 62
    assert profile.num_tokens == 2 * int(store.lengths.sum())
    assert profile.num_trained_tokens == 2 * int(store.num_trained.sum())
    assert profile.max_tokens == 64
    assert profile.num_truncated == 2
    assert sum(rows for _, rows in profile.histogram) == 62


def test_profile_of_weighted_parts(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(100))
    sources = [
        DataSource(path=str(path), take="10", weight=3),
        DataSource(path=f"{path}[50:60]"),
        DataSource(path=str(path), split="eval"),
    ]

    profile = profile_dataset(sources, seq_len=64, model=str(folder))

    assert profile.num_rows == 40
    tenfold = profile_dataset([DataSource(path=str(path), weight=0.5)], seq_len=64)
    assert 30 <= tenfold.num_rows <= 70


def test_a_full_or_forbidden_disk_is_a_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", pairs(2))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SetupError) as caught:
        encode(folder, path, cache=blocked)
    assert "TIGHTFIT_CACHE" in caught.value.remedy

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tightfit.data.token_store.StoreWriter.write_store", full)
    with pytest.raises(SetupError, match=r"No space left on device; .* free"):
        encode(folder, path)
    shutil.rmtree(folder.parent / "cache")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("TIGHTFIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/tightfit")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/u")
    assert cache_folder() == Path("/home/u/.cache/tightfit")


@pytest.mark.parametrize("kind", ["answers", "all", "pairs", "encoder-decoder"])
def test_what_other_lengths_cut_is_what_encoding_at_them_cuts(kind: str, tmp_path: Path) -> None:
    is_seq2seq = kind == "encoder-decoder"
    folder = make_model(tmp_path / "model", "chatml")
    words = [(5, 5), (700, 40), (300, 900), (30, 2500), (1500, 3)]
    answers = ("chosen", "rejected") if kind == "pairs" else ("completion",)
    rows = [
        {"prompt": f"{n} " + "x " * a} | {name: name[0] + " y" * b for name in answers}
        for n, (a, b) in enumerate(words)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = {"is_encoder_decoder": is_seq2seq, "skip_invalid": True}
    options |= {"train_on": TrainOn.ALL} if kind == "all" else {}
    options |= {"objective": Objective.DPO} if kind == "pairs" else {}

    report = encode(folder, path, seq_len=600, **options).report

    assert report.cuts[-1].num_truncated == 0
    assert report.whole_percentiles["p99"] == report.longest_row_tokens
    for cut in report.cuts:
        found = encode(folder, path, seq_len=cut.seq_len, **options).report
        counts = {issue.kind: issue.num_rows for issue in found.findings}
        without = counts.get("answer-cut-off", 0)
        assert cut.num_without_answer == without
        assert cut.num_truncated == counts.get("truncated", 0) + without
        if not without:  # a row that is left out loses all of its tokens
            assert cut.num_lost_tokens == found.num_lost_tokens
    assert len({cut.num_truncated for cut in report.cuts}) > 2

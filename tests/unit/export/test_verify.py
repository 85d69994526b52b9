"""The parity check: an untouched copy passes, and every planted error is caught and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from merge_cases import ADAPTERS, load_adapted, make_adapter, make_base
from safetensors.torch import load_file, save_file

from small_models import make_llama
from tightfit.cli.app import main
from tightfit.core.errors import InvalidInputError
from tightfit.core.findings import Z99, Status, estimate_share
from tightfit.export.formats import LIMITS, StepKind
from tightfit.export.merge import MergeRequest, merge_adapter
from tightfit.export.verify.scores import (
    ScoreStore,
    compare_scores,
    estimate_mean,
    recognise_step,
    summarise,
)
from tightfit.export.verify.verdict import Comparison, Verdict
from tightfit.export.verify.verify import VerifyRequest, verify_models
from tightfit.runtime.model_files import find_artefact

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
PROMPTS = ("How many singers are there?", "The quick brown fox")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an adapter on it with all that a run leaves, and the merged model."""
    home = tmp_path_factory.mktemp("verify")
    base = make_llama(home / "base")
    adapter = make_adapter(home / "adapter", base, **ADAPTERS["plain"])
    for path in base.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "generation")):
            shutil.copyfile(path, adapter / path.name)
    artefact = find_artefact(str(adapter))
    merge_adapter(MergeRequest(artefact=artefact, target=home / "merged"))
    return home


def check(reference: Path, *others: Path, **settings: Any) -> Verdict:
    given: dict[str, Any] = {"num_tokens": 700, "prompts": PROMPTS, "device": "cpu"}
    request = VerifyRequest(
        reference=find_artefact(str(reference)),
        others=tuple(find_artefact(str(other)) for other in others),
        **(given | settings),
    )
    return verify_models(request)


def only(verdict: Verdict) -> Comparison:
    (row,) = verdict.rows
    return row


def texts(row: Comparison) -> str:
    return "\n".join(finding.detail for finding in row.findings)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    made = {name: value.contiguous() for name, value in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def test_merged_is_the_adapter(home: Path) -> None:
    row = only(check(home / "adapter", home / "merged"))

    assert row.is_good, texts(row)
    assert row.kind is StepKind.EXACT
    assert row.max_abs_logit_diff is not None
    assert row.max_abs_logit_diff <= 1e-4
    assert row.top1_fraction == 1.0
    assert row.num_same_answers == row.num_prompts == 2
    assert row.template_same
    assert row.tokenizer_same
    assert row.specials_same
    assert row.stops_like_reference


def test_figures_agree_with_torch(home: Path) -> None:
    """KL, top-1 and perplexity by torch's own functions, on the base against the adapter."""
    text = home / "text.txt"
    text.write_text("How many singers are older than the average album of every band? " * 40)
    row = only(check(home / "adapter", home / "base", text=text, num_tokens=400))

    tokenizer = find_artefact(str(home / "base")).tokenizer
    from tightfit.data.tokenizer import load_tokenizer

    ids = torch.tensor([load_tokenizer(tokenizer).encode(text.read_text())[:400]])
    from merge_cases import load_plain

    with torch.no_grad():
        one = load_adapted(home / "base", home / "adapter")(ids).logits[0].log_softmax(-1).double()
        two = load_plain(home / "base").eval()(ids).logits[0].log_softmax(-1).double()
    kl = torch.nn.functional.kl_div(two, one, log_target=True, reduction="batchmean")
    loss = torch.nn.functional.nll_loss(two[:-1], ids[0, 1:])

    assert row.mean_kl == pytest.approx(float(kl), rel=1e-3)
    assert row.top1_fraction == pytest.approx(
        float((one.argmax(-1) == two.argmax(-1)).double().mean())
    )
    assert row.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
    assert not row.is_good, "a base is not its adapter"


def _swap_rope_halves(tensors: dict[str, torch.Tensor]) -> None:
    """The other layout of rotary pairs, as between Meta's files and transformers'."""
    for name, value in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads is not None:
            rows, width = value.shape
            halves = value.view(heads, rows // heads // 2, 2, width)
            tensors[name] = halves.transpose(1, 2).reshape(rows, width)


def _zero_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"].zero_()


def _transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].T


def _negate_one_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] *= -1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_swap_rope_halves, "rows in another order"),
        (_zero_a_layer, "down_proj.weight: all zero"),
        (_transpose, "o_proj.weight: transposed"),
        (_negate_one_value, "Scores differ"),
    ],
)
def test_changed_weights(
    home: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], names: str
) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(other, change)

    row = only(check(home / "adapter", other))

    assert not row.is_good
    assert names in texts(row)
    assert row.template_same
    assert row.tokenizer_same


def test_permuted_rows_are_told_from_the_first_place(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(other, _swap_rope_halves)

    assert "first place of each text is right" in texts(only(check(home / "merged", other)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
        # Only beyond the model's own length would the scores show this one.
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    ],
)
def test_wrong_rope(home: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_json(other / "config.json", rope_parameters=rope)

    row = only(check(home / "adapter", other))

    assert not row.is_good
    assert "Rope settings differ" in texts(row)


def test_dropped_end_of_turn_in_the_generation_config(home: Path, tmp_path: Path) -> None:
    """Our own engine also asks the tokenizer; other programs read this file alone."""
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_json(other / "generation_config.json", eos_token_id=0)

    row = only(check(home / "adapter", other))

    assert not row.is_good
    assert row.specials_same is False
    assert "run on past it" in texts(row)


def test_another_end_of_turn_in_the_tokenizer(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_json(other / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit_json(other / "generation_config.json", eos_token_id=0)
    edit_json(other / "config.json", eos_token_id=0)

    row = only(check(home / "adapter", other))

    assert not row.is_good
    assert row.specials_same is False
    assert "eos token is `<|endoftext|>`" in texts(row)
    assert "no longer end" in texts(row)


def test_template_edited_after_training(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    path = other / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant\n", "assistant:\n"))

    row = only(check(home / "adapter", other))

    assert not row.is_good
    assert row.template_same is False
    assert row.top1_fraction == 1.0
    assert any("chat_template.jinja" in str(finding.remedy) for finding in row.findings)


def test_tokenizer_with_other_merges(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    path = other / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["merges"] = document["model"]["merges"][5:]
    path.write_text(json.dumps(document))

    row = only(check(home / "adapter", other))

    assert not row.is_good
    assert row.tokenizer_same is False


def test_one_swapped_word_of_the_vocabulary(home: Path, tmp_path: Path) -> None:
    """An error that no sample text need meet."""
    other = shutil.copytree(home / "merged", tmp_path / "other")
    path = other / "tokenizer.json"
    document = json.loads(path.read_text())
    words = document["model"]["vocab"]
    one, two = [word for word in words if len(word) == 1][-2:]
    words[one], words[two] = words[two], words[one]
    path.write_text(json.dumps(document))

    row = only(check(home / "adapter", other))

    assert row.tokenizer_same is False


def test_truncated_file(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    path = other / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    code = main(["verify", str(home / "merged"), str(other), "--tokens", "300", "--json"])

    out = json.loads(capsys.readouterr().out)
    assert code == 8
    assert not out["is_good"]
    assert "cut short" in out["rows"][0]["findings"][0]["detail"]


def test_not_a_number(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(other, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))

    row = only(check(home / "adapter", other, steps={str(other): StepKind.Q2}))

    assert not row.is_good
    assert "not finite" in texts(row)
    assert row.mean_kl is None


def test_uniform_scores(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(other, lambda tensors: tensors["model.norm.weight"].zero_())

    row = only(check(home / "adapter", other, steps={str(other): StepKind.Q2}))

    assert "as likely as any other" in texts(row)


def test_other_precision_passes_as_another_format(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(
        other,
        lambda tensors: tensors.update({n: v.to(torch.bfloat16) for n, v in tensors.items()}),
    )

    row = only(check(home / "adapter", other, steps={}))

    assert (row.format, row.kind) == ("bf16", StepKind.FORMAT)
    assert row.top1_fraction is not None
    assert row.top1_fraction > 0.9


def test_several_at_once_and_kept_in_order(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(other, _zero_a_layer)

    verdict = check(home / "adapter", home / "merged", other, num_tokens=300)

    assert [row.is_good for row in verdict.rows] == [True, False]
    assert not verdict.is_good
    with pytest.raises(Exception, match="other is not adapter") as caught:
        verdict.raise_if_broken()
    assert caught.value.exit_code == 8  # type: ignore[attr-defined]


def test_a_text_too_short_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Hm.")

    with pytest.raises(InvalidInputError, match="too few tokens"):
        check(home / "adapter", home / "merged", text=tmp_path / "short.txt")


class _Scores:
    """An engine that answers with given rows."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def logits(self, tokens: Any) -> np.ndarray:
        return self._rows[: len(tokens)]


def test_padded_vocabularies_are_compared_on_the_common_tokens() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 50)).astype(np.float32) * 3
    padded = np.concatenate([rows, np.full((64, 14), 9.0, np.float32)], axis=1)
    windows = (tuple(int(t) for t in rng.integers(0, 50, 64)),)
    store = ScoreStore(windows, 50)
    store.scores[:] = rows

    found = compare_scores(_Scores(padded), store, lambda _: None)  # type: ignore[arg-type]

    assert found.num_common == 50
    assert np.abs(found.kl).max() < 1e-12
    assert found.is_same.all()


def test_near_ties_do_not_count() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(256, 40)).astype(np.float32)
    order = rows.argsort(1)
    best, second = order[:, -1], order[:, -2]
    place = np.arange(256)
    rows[place, second] = rows[place, best] - 1e-6
    nudged = rows.copy()
    nudged[place, second] += 2e-6
    store = ScoreStore((tuple(range(40)) * 6 + tuple(range(16)),), 40)
    store.scores[:] = rows

    found = compare_scores(_Scores(nudged), store, lambda _: None)  # type: ignore[arg-type]
    summary = summarise(found, noise=1e-4)

    assert summary.top1.value == 0.0
    assert summary.settled_top1.value == 1.0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_intervals_hold_what_they_should(share: float) -> None:
    """99 of 100 samples of a known share have it in their interval, give or take."""
    rng = np.random.default_rng(2)
    inside = 0
    for _ in range(400):
        found = estimate_share(int((rng.random(300) < share).sum()), 300, z=Z99)
        inside += found.low <= share <= found.high
    assert inside >= 388


def test_mean_intervals_hold_for_neighbours_that_lean_together() -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(300):
        noise = rng.normal(size=2048 + 3)
        values = 0.1 + (noise[:-3] + noise[1:-2] + noise[2:-1] + noise[3:]) / 2
        found = estimate_mean(values)
        inside += found.low <= 0.1 <= found.high
    assert inside >= 285


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("fp32", StepKind.EXACT),
        ("bf16", StepKind.FORMAT),
        ("F16", StepKind.FORMAT),
        ("BF16", StepKind.FORMAT),
        ("Q8_0", StepKind.Q8),
        ("Q6_K", StepKind.Q6),
        ("Q5_K_M", StepKind.Q5),
        ("Q4_K_M", StepKind.Q4),
        ("IQ4_XS", StepKind.Q4),
        ("Q3_K_M", StepKind.Q3),
        ("Q2_K", StepKind.Q2),
        ("IQ1_S", StepKind.Q2),
        ("gptq-8", StepKind.Q8),
        ("gptq-4", StepKind.GPTQ4),
        ("gptq-3", StepKind.Q3),
        ("nf4", StepKind.NF4),
        ("int8", StepKind.INT8),
    ],
)
def test_kinds_are_recognised(other: str, kind: StepKind) -> None:
    found = recognise_step("fp32", other, is_same_engine=other.islower())

    assert found is kind
    assert set(LIMITS) == set(StepKind)


def test_the_worst_finding_comes_first(home: Path, tmp_path: Path) -> None:
    other = shutil.copytree(home / "merged", tmp_path / "other")
    edit_weights(other, _swap_rope_halves)

    order = [finding.status for finding in only(check(home / "adapter", other)).findings]

    assert order == sorted(order, key=list(Status).index, reverse=True)


def test_an_encoder_decoder_is_judged_by_values_and_answers(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "t5")
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["q", "v", "wi", "wo"])
    artefact = find_artefact(str(adapter))
    merge_adapter(MergeRequest(artefact=artefact, target=tmp_path / "merged"))
    other = shutil.copytree(tmp_path / "merged", tmp_path / "other")
    edit_weights(other, lambda tensors: tensors["shared.weight"].mul_(-1))

    verdict = check(adapter, tmp_path / "merged", other, prompts=None)

    assert [row.is_good for row in verdict.rows] == [True, False], verdict.rows
    assert verdict.rows[0].num_positions == 0

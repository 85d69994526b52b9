"""One batch of TRL's own through its trainers and through our objective: the same loss, rewards
and gradients, in fp32.

TRL tokenizes, masks and pads; ours gets the tensors of its batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tightfit.core.objectives import Objective as ObjectiveKind
from tightfit.core.settings import Loss, Method
from tightfit.core.strategy import Strategy, Training
from tightfit.training.batches import IGNORED
from tightfit.training.preference import PreferenceObjective
from tightfit.training.rewards import describe_rewards
from tiny_jobs import make_model

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["how", "many", "singers", "are", "older", "than", "the", "album", "of", "every", "band"]
NUM_ROWS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder, a model, and a reference that differs from it."""
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path_factory.mktemp("model"), hidden_size=64)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype="float32")
        for _ in range(2)
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return folder, policy, reference


def draw_rows(*, is_labelled: bool = False) -> list[dict[str, Any]]:
    rng = random.Random(3)

    def text(most: int, least: int = 1) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))

    rows = []
    for number in range(NUM_ROWS):
        row: dict[str, Any] = {"prompt": text(4)}
        if is_labelled:
            row |= {"completion": " " + text(6), "label": number % 3 > 0}
        else:
            row |= {"chosen": " " + text(6, 4), "rejected": " " + text(3)}
        rows.append(row)
    return rows


def make_trainer(
    make: Any, config: Any, models: tuple[Path, Any, Any], rows: Any, out: Path, **settings: Any
) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer

    folder, policy, reference = models
    args = config(
        output_dir=str(out),
        per_device_train_batch_size=NUM_ROWS,
        gradient_checkpointing=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        **settings,
    )
    has_reference = "CPO" not in make.__name__ and "ORPO" not in make.__name__
    return make(
        model=copy.deepcopy(policy),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **({"ref_model": copy.deepcopy(reference)} if has_reference else {}),
    )


def make_ours(
    kind: ObjectiveKind, models: tuple[Path, Any, Any], *, loss: Loss, **learning: Any
) -> PreferenceObjective:
    folder, policy, reference = models
    training = Training(model_path=str(folder), learning_rate=1e-3, **learning)
    strategy = Strategy(objective=kind, method=Method.FULL, loss=loss)
    ours = PreferenceObjective(copy.deepcopy(policy), strategy, training)
    if ours.reference is not None:
        ours.reference = copy.deepcopy(reference).requires_grad_(False)
    return ours.train()


def as_batch(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Ours, of one answer per row."""
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        "answer_ids": torch.arange(len(labels))[:, None].expand(labels.shape),
        "answer_lengths": (labels[:, 1:] != IGNORED).sum(1),
    }


def interleave(tensor: Tensor) -> Tensor:
    """Chosen rows then rejected ones, as pairs."""
    return torch.stack(tensor.chunk(2), dim=1).flatten(0, 1)


def as_pairs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
    return as_batch(*map(interleave, (batch["input_ids"], batch["attention_mask"], labels)))


def compare_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    assert largest > 0
    for name, parameter in ours.named_parameters():
        grad, other = parameter.grad, expected[name].grad
        assert grad is not None
        assert other is not None, name
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5 * largest)


def check(
    ours: PreferenceObjective,
    batch: dict[str, Tensor],
    theirs: Any,
    compute: Callable[[], Tensor],
    metrics: Callable[[], dict[str, float]],
) -> None:
    expected = compute()
    torch.autograd.backward(expected)
    loss = ours(**batch) / NUM_ROWS
    torch.autograd.backward(loss)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    compare_gradients(ours.model, theirs)
    found, wanted = describe_rewards(ours.take().tolist()), metrics()
    names = {"chosen": "reward_chosen", "rejected": "reward_rejected", "margins": "reward_margin"}
    for name, own in names.items():
        assert getattr(found, own) == pytest.approx(wanted[f"rewards/{name}"], rel=1e-4, abs=1e-6)
    if found.reward_accuracy is not None:
        assert found.reward_accuracy == pytest.approx(wanted["rewards/accuracies"])
    if found.kl is not None:
        assert found.kl == pytest.approx(wanted["kl"], rel=1e-4)
        assert found.kl > 0


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *((ObjectiveKind.DPO, loss) for loss in (Loss.PLAIN, Loss.CHUNKED, Loss.FUSED)),
        (ObjectiveKind.IPO, Loss.FUSED),
    ],
)
def test_pairs_with_a_reference(
    kind: ObjectiveKind, loss: Loss, models: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    from trl import DPOConfig, DPOTrainer

    name = "sigmoid" if kind is ObjectiveKind.DPO else "ipo"
    trainer = make_trainer(DPOTrainer, DPOConfig, models, draw_rows(), tmp_path, loss_type=[name])
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    check(
        make_ours(kind, models, loss=loss),
        as_pairs(batch),
        trainer.model,
        lambda: trainer.compute_loss(trainer.model, dict(batch)),
        lambda: {name: values[-1] for name, values in trainer._metrics["train"].items()},
    )


@pytest.mark.parametrize("kind", [ObjectiveKind.ORPO, ObjectiveKind.SIMPO])
def test_pairs_without_a_reference(
    kind: ObjectiveKind, models: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """All tokens but the first are the answer's: TRL's ORPO learns those of the prompt as well."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = draw_rows()
    if kind is ObjectiveKind.ORPO:
        trainer = make_trainer(ORPOTrainer, ORPOConfig, models, rows, tmp_path)
        learning: dict[str, Any] = {}
    else:
        how = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 1.4}
        trainer = make_trainer(
            CPOTrainer, CPOConfig, models, rows, tmp_path, label_smoothing=0.1, **how
        )
        learning = {"beta": 2.5, "simpo_gamma": 1.4, "label_smoothing": 0.1}
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    for side in ("chosen", "rejected"):
        is_token = batch[f"{side}_attention_mask"] == 1
        batch[f"{side}_labels"] = batch[f"{side}_input_ids"].masked_fill(~is_token, IGNORED)
        batch[f"{side}_labels"][:, 0] = IGNORED
    joined = trainer.concatenated_inputs(
        batch, is_encoder_decoder=False, padding_value=0, device=torch.device("cpu")
    )
    names = ("input_ids", "attention_mask", "labels")
    ours = as_batch(*(interleave(joined[f"concatenated_{name}"]) for name in names))
    ours["nll_weight"] = torch.tensor(NUM_ROWS / float(ours["answer_lengths"][0::2].sum()))
    seen: dict[str, float] = {}

    def compute() -> Tensor:
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch, train_eval="train")
        seen.update(metrics)
        total: Tensor = loss
        return total

    check(
        make_ours(kind, models, loss=Loss.FUSED, **learning),
        ours,
        trainer.model,
        compute,
        lambda: seen,
    )


def test_labelled_answers(models: tuple[Path, Any, Any], tmp_path: Path) -> None:
    from trl import KTOConfig, KTOTrainer

    folder, policy, reference = models
    models = (folder, reference, policy)  # the other way round the divergence is cut off at 0
    rows = draw_rows(is_labelled=True)
    weights = {"desirable_weight": 1.0, "undesirable_weight": 2.0}
    trainer = make_trainer(KTOTrainer, KTOConfig, models, rows, tmp_path, **weights)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    labels, mismatched_labels = (
        batch[f"{which}input_ids"].masked_fill(batch[f"{which}completion_mask"] == 0, IGNORED)
        for which in ("", "KL_")
    )
    mismatched = as_batch(batch["KL_input_ids"], batch["KL_attention_mask"], mismatched_labels)
    ours = make_ours(ObjectiveKind.KTO, models, loss=Loss.FUSED, **weights)
    with torch.no_grad():
        kl = (ours(**mismatched) / NUM_ROWS).clamp(min=0)
    given = as_batch(batch["input_ids"], batch["attention_mask"], labels)
    check(
        ours,
        given | {"kl": kl, "is_good": batch["label"].bool()},
        trainer.model,
        lambda: trainer.compute_loss(trainer.model, dict(batch)),
        lambda: {name: values[-1] for name, values in trainer._metrics["train"].items()},
    )

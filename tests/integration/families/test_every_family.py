"""The whole job for every family: plan, train, stop and resume, merge, verify, export.

A record without a row in `tiny_configs` fails in `test_model_counts_oracle`. What a family cannot
do is refused before a run starts: the refusals are listed here, with their words.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from small_models import make_tokenizer
from tightfit.api.convert import convert
from tightfit.api.merge import merge
from tightfit.api.options.training import TrainOptions
from tightfit.api.plan import NoPlanError
from tightfit.api.train import OpenRun, open_run
from tightfit.api.verify import verify
from tightfit.core.errors import EXIT_REQUEUE, InvalidInputError
from tightfit.data.token_store import TokenStore
from tightfit.models.config import read_config
from tightfit.models.families.registry import find_family
from tightfit.runs.metrics import EvalRecord, read_records
from tightfit.runs.run_folder import RunFolder
from tightfit.training.batches import choose_collate
from tightfit.training.worker import Worker
from tiny_configs import TINY, VISION, text_type, tiny_config, whole_config

transformers: Any = pytest.importorskip("transformers", reason="pip install 'tightfit[train]'")
pytest.importorskip("peft", reason="pip install 'tightfit[train]'")
# Before a run hides it from the imports of runs that need none of it.
pytest.importorskip("bitsandbytes", reason="pip install 'tightfit[qlora]'")
pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
pytestmark = [
    # GPT-BigCode's modelling file uses torch.jit.script, which torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

METHODS = ("lora", "full", "qlora", "experts")
"""`experts`: LoRA on a mixture's experts too."""
RESUMED = ("lora", "full", "experts")
"""`qlora` saves and restores what `lora` does, on a base that is quantized anew at each start."""
NUM_STEPS = 4
STOPPED_AFTER = 2
PROMPTS = ("add 3 and 3", "List three fruits.", "What is older?", "Why does ice float?")
LEAST_SAME_ANSWERS = 2
"""Of llama.cpp. One of some fifty tokens may be a near tie, and what follows differs."""
REFUSED = {
    ("falcon", "qlora"): "bitsandbytes packs none of falcon's layers",
}
"""Methods that the planner refuses, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model folder and rows to train on."""

    model: Path
    train: Path
    eval: Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of everything here, the tool's own caches too."""
    home = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(home / "cache"))
        patch.setenv("TIGHTFIT_LEDGER", str(home / "ledger.sqlite"))
        yield home
    gc.unfreeze()  # what each worker froze


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, home: Path) -> Iterator[Made]:
    """One family's model; gone with its runs when the next one comes."""
    folder = home / request.param
    yield make_family(folder, request.param)
    shutil.rmtree(folder)


def make_family(folder: Path, model_type: str) -> Made:
    """Random weights whose scores are spread wide enough to tell tokens apart."""
    tokenizer = make_tokenizer(folder / "model")
    marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "decoder_start_token_id": 3}
    settings = whole_config(model_type, vocab_size=len(tokenizer))
    settings.get("text_config", settings).update(marks)
    config = transformers.AutoConfig.for_model(**settings)
    auto = choose_auto(config)
    if model_type in VISION:
        auto = transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4 if parameter is head else 0.12)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        # Answers are words: llama.cpp names no token that is a part of a character, and ends at
        # `<|endoftext|>`, whatever the model's own end is.
        parts = [n for n in range(len(tokenizer)) if not tokenizer.decode([n]).isascii()]
        head[[0, *parts]] = 0
    model.save_pretrained(folder / "model")
    for name, numbers in (("train", range(8)), ("eval", range(8, 11))):
        rows = [{"prompt": f"add {n} and {n}", "completion": f"that is {2 * n}"} for n in numbers]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return Made(model=folder / "model", train=folder / "train.jsonl", eval=folder / "eval.jsonl")


def choose_auto(config: Any) -> Any:
    is_pair = config.is_encoder_decoder
    return transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM


def list_cases() -> list[tuple[str, str]]:
    return [
        (model_type, method)
        for model_type in (*TINY, *VISION)
        for method in METHODS
        if method != "experts" or adapts_experts(model_type)
    ]


def adapts_experts(model_type: str) -> bool:
    config = tiny_config(text_type(model_type))
    spec = read_config(config, name=model_type, source="a tiny config")
    parts = [part for block in spec.blocks for part in block.linears]
    return any(part.lora_rank_factor and not part.is_module for part in parts)


def plan(made: Made, method: str) -> OpenRun:
    """A planned run that has not started."""
    strategy = {"compute": "fp32", "micro_batch": 2, "checkpointing": False}
    recipe: dict[str, Any] = {
        "model": str(made.model),
        "data": str(made.train),
        "on": "cpu",
        "method": "lora" if method == "experts" else method,
        "seq_len": 64,
        "max_steps": NUM_STEPS,
        "effective_batch": 2,
        "packing": False,
        "learning_rate": 5e-3,
        "log_to": [],
        "output": str(made.model.with_name(method)),
        "strategy": strategy | ({} if method == "qlora" else {"weights": "fp32"}),
    }
    if method == "experts":
        recipe["lora"] = {"targets": ["all-linear", "experts"]}
    file = made.model.with_name(f"{method}.yaml")
    file.write_text(json.dumps(recipe))
    opened = open_run(TrainOptions(job=str(file), eval=str(made.eval)))
    assert isinstance(opened, OpenRun)
    return opened


def train(run: RunFolder, *, stop_after: int | None = None) -> None:
    """To the end, or until a signal would come in that step."""
    calls = itertools.count(1)
    code = Worker(run, lambda: stop_after is not None and next(calls) >= stop_after).train()
    assert code == (0 if stop_after is None else EXIT_REQUEUE)


def read_artefact(run: RunFolder) -> dict[str, torch.Tensor]:
    folder = run.adapter_path if run.adapter_path.is_dir() else run.model_path
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def measure_loss(folder: Path, run: RunFolder) -> float:
    """Of the held-back rows, as plain transformers computes it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = (
        choose_auto(config)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    stored = run.read_tokens().eval
    assert stored is not None
    store = TokenStore(Path(stored))
    collate = choose_collate(store.description, is_packed=False)
    total, count = 0.0, 0
    for index in range(len(store)):
        batch = collate([[store.row(index)]])
        labels = batch["labels"] if config.is_encoder_decoder else batch["labels"][:, 1:]
        trained = int((labels != -100).sum())
        with torch.no_grad():
            total += float(model(**batch, use_cache=False).loss) * trained
        count += trained
    return total / count


def last_eval(run: RunFolder) -> EvalRecord:
    records = read_records(run.metrics_path)
    return [record for record in records if isinstance(record, EvalRecord)][-1]


@pytest.mark.parametrize(("made", "method"), list_cases(), indirect=["made"])
def test_train_resume_merge_verify(made: Made, method: str) -> None:
    model_type = json.loads((made.model / "config.json").read_text())["model_type"]
    if (model_type, method) in REFUSED:
        with pytest.raises(NoPlanError, match=REFUSED[model_type, method]):
            plan(made, method)
        return
    run = plan(made, method).run
    copy = Path(shutil.copytree(run.path, f"{run.path}-resumed")) if method in RESUMED else None

    train(run)
    if copy is not None:
        check_resumed(run, RunFolder(path=copy))
    folder = run.model_path
    if method != "full":
        folder = Path(merge(str(run.path), verify=False).path)
        file = write_gguf(model_type, folder) if method == "lora" else None
        compare(run.path, folder, file)
    if method != "qlora":  # whose base was rounded in training, and is not in the merged model
        assert measure_loss(folder, run) == pytest.approx(last_eval(run).loss, rel=1e-4)


def check_resumed(whole: RunFolder, other: RunFolder) -> None:
    """The same run, stopped on the way, ends with the same tensors."""
    train(other, stop_after=STOPPED_AFTER)
    assert other.read_state().step == STOPPED_AFTER
    train(other)
    expected, found = read_artefact(whole), read_artefact(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def write_gguf(model_type: str, merged: Path) -> Path | None:
    """The file, or None for a family that is refused."""
    if find_family(model_type).gguf is None:
        words = f"of the family {re.escape(model_type)}, which cannot be written as GGUF"
        with pytest.raises(InvalidInputError, match=words):
            convert(str(merged), to="gguf")
        return None
    return Path(convert(str(merged), to="gguf", dtype="f32").path)


def compare(reference: Path, merged: Path, file: Path | None) -> None:
    """The same scores on a page of text; of llama.cpp the same answers too."""
    prompts = reference.with_name("prompts.txt")
    prompts.write_text("\n".join(PROMPTS))
    others = [str(merged), *([] if file is None else [str(file)])]
    verdict = verify(str(reference), others, tokens=256, prompts=str(prompts))
    verdict.raise_if_broken()
    if file is not None:
        assert verdict.rows[1].num_same_answers >= LEAST_SAME_ANSWERS

"""What is to be scored: a run, an adapter or a model, and what it is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.strategy import Method
from tightfit.core.training import TrainOn
from tightfit.ledger.run_folder import RunFolder
from tightfit.runtime.model_files import locate_model

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the weights lie, and how the data is to be read for them."""

    name: str
    base: Path
    """The base model; the model itself where nothing was tuned."""
    adapter: Path | None = None
    tuned: Path | None = None
    """A whole tuned model."""
    tokenizer: Path
    template: str | None = None
    train_on: TrainOn = TrainOn.ANSWERS
    seq_len: int = DEFAULT_SEQ_LEN
    weights: Dtype | None = None
    """As the run loaded its base model. None: whatever suits the device."""
    compute: Dtype | None = None
    double_quant: bool = True
    run: RunFolder | None = None
    max_positions: int | None = None
    """Longest sequence the model can read; None where its positions are relative."""

    @property
    def is_tuned(self) -> bool:
        return self.adapter is not None or self.tuned is not None


def find_target(name: str) -> Target:
    """The run folder, adapter folder or model that `name` means."""
    target = _find(name)
    most = _read_max_positions(target.base)
    seq_len = target.seq_len if most is None else min(target.seq_len, most)
    return replace(target, max_positions=most, seq_len=seq_len)


def _find(name: str) -> Target:
    path = Path(name).expanduser()
    run = RunFolder(path=path)
    if run.is_run():
        return _from_run(run)
    if (path / "adapter_config.json").is_file():
        return _from_adapter(path)
    folder = locate_model(name)
    return Target(name=name, base=folder, tokenizer=folder)


def _read_max_positions(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # loading the model says what is wrong with it
    if config.get("model_type") == "t5":  # its `n_positions` is no limit
        return None
    stated = config.get("max_position_embeddings", config.get("n_positions"))
    return stated if isinstance(stated, int) and stated > 0 else None


def _from_run(run: RunFolder) -> Target:
    plan = run.read_plan()
    if plan.training is None:
        raise InvalidInputError(
            f"{run.path} holds a plan that was never prepared to run.",
            remedy=f"tightfit train {run.plan_path}",
        )
    strategy, training = plan.strategy, plan.training
    is_adapter = strategy.method is Method.LORA
    tuned = run.adapter_path if is_adapter else run.model_path
    if not (tuned / ("adapter_config.json" if is_adapter else "config.json")).is_file():
        raise NotFoundError(
            f"{run.path} has not left a tuned {'adapter' if is_adapter else 'model'} yet.",
            remedy="finish the run with the command that started it, then try again",
        )
    base = locate_model(training.model_path)
    return Target(
        name=str(run.path),
        base=base,
        adapter=tuned if is_adapter else None,
        tuned=None if is_adapter else tuned,
        tokenizer=base,
        template=training.template,
        train_on=training.train_on,
        # The plan's is that of the longest row it trained on; what is scored may be longer.
        seq_len=max(strategy.seq_len, DEFAULT_SEQ_LEN, plan.data.seq_len if plan.data else 0),
        weights=strategy.weights,
        compute=strategy.compute,
        double_quant=strategy.double_quant,
        run=run,
    )


def _from_adapter(folder: Path) -> Target:
    parent = RunFolder(path=folder.parent)
    if folder.name == parent.adapter_path.name and parent.is_run():
        return _from_run(parent)
    base = locate_model(_base_name(folder))
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return Target(
        name=str(folder),
        base=base,
        adapter=folder,
        tokenizer=folder if has_tokenizer else base,
    )


def _base_name(adapter: Path) -> str:
    path = adapter / "adapter_config.json"
    try:
        name = json.loads(path.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InvalidInputError(
            f"{path} does not name the adapter's base model.",
            remedy='add "base_model_name_or_path": "FOLDER OR HUB ID" to it',
        ) from fault
    return str(name)

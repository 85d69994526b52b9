"""What is to be scored: a run, an adapter or a model, and what it is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.core.training import TrainOn
from tightfit.ledger.run_folder import RunFolder
from tightfit.runtime.artefacts import Artefact, ArtefactKind, find_artefact
from tightfit.runtime.model_files import locate_model

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An artefact, and how the data is to be read for it."""

    artefact: Artefact
    base: Path | None = None
    """The model it was tuned from; None where nothing was tuned."""
    tokenizer: Path
    template: str | None = None
    train_on: TrainOn = TrainOn.ANSWERS
    seq_len: int = DEFAULT_SEQ_LEN
    max_positions: int | None = None
    """Longest sequence the model can read; None where its positions are relative or unknown."""

    @property
    def name(self) -> str:
        return self.artefact.name

    @property
    def run(self) -> RunFolder | None:
        return self.artefact.run


def find_target(name: str) -> Target:
    """The run folder, adapter folder or model that `name` means."""
    artefact = find_artefact(name)
    target = Target(
        artefact=artefact,
        base=artefact.base,
        tokenizer=artefact.tokenizer,
        template=artefact.template,
    )
    if artefact.run is not None:
        target = _as_trained(target, artefact.run)
    most = _read_max_positions(artefact.base or artefact.path)
    seq_len = target.seq_len if most is None else min(target.seq_len, most)
    return replace(target, max_positions=most, seq_len=seq_len)


def _as_trained(target: Target, run: RunFolder) -> Target:
    """With the run's own base model, template and reading of the data."""
    plan = run.read_plan()
    assert plan.training is not None  # or it would be no artefact
    base = target.base or locate_model(plan.training.model_path)
    # The plan's length is that of the longest row it trained on; what is scored may be longer.
    longest = max(plan.strategy.seq_len, plan.data.seq_len if plan.data else 0)
    return replace(
        target,
        base=base,
        tokenizer=base,
        template=plan.training.template,
        train_on=plan.training.train_on,
        seq_len=max(longest, DEFAULT_SEQ_LEN),
    )


def is_engines(artefact: Artefact) -> bool:
    """Whether only an engine can run it; the others are scored as plain torch modules."""
    return artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER)


def _read_max_positions(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # loading the model says what is wrong with it
    if config.get("model_type") == "t5":  # its `n_positions` is no limit
        return None
    stated = config.get("max_position_embeddings", config.get("n_positions"))
    return stated if isinstance(stated, int) and stated > 0 else None

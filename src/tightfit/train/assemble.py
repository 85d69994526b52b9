"""Putting a run together: data, engine, checkpoint, checks; what the loop then drives."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.training import MEMORY_VARIABLE, Training
from tightfit.data.token_store import TokenStore
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan
from tightfit.runtime.attention import needs_padding_mask
from tightfit.train.build import build_engine
from tightfit.train.checkpoint import find_checkpoint, list_damaged, read_progress
from tightfit.train.diary import Diary
from tightfit.train.evaluation import Evaluation
from tightfit.train.feed import Feed
from tightfit.train.loader import Loader, choose_collate, to_device
from tightfit.train.loop import Loop
from tightfit.train.place import Place
from tightfit.train.rehearsal import rehearse
from tightfit.train.signals import StopRequest


def assemble(
    run: RunFolder, plan: Plan, training: Training, place: Place, asked: StopRequest
) -> Loop:
    """Everything up to the first step, a rehearsal on the longest batch included."""
    strategy = plan.strategy
    folders = run.read_tokens()
    store = _open_store(folders.train)
    _check_vocabulary(store, plan, training)
    feed = Feed(
        store,
        effective_batch=plan.effective_batch,
        seq_len=strategy.seq_len,
        is_packed=strategy.packing,
        seed=training.seed,
        shuffle=training.shuffle,
    )
    num_steps = training.max_steps or feed.count_steps(plan.num_epochs)
    engine = build_engine(plan, place)
    has_mask = needs_padding_mask(engine.model.config)
    collate = choose_collate(store.description, is_packed=strategy.packing, has_mask=has_mask)
    loader = Loader(feed, collate, micro_batch=strategy.micro_batch, place=place)
    step, damaged = _resume(run, engine)
    rehearse(engine, to_device(loader.longest(), place), place)
    diary = Diary(run, plan, place)
    diary.open(step=step, num_steps=num_steps, damaged=damaged)
    return Loop(
        plan=plan,
        training=training,
        run=run,
        place=place,
        engine=engine,
        feed=feed,
        loader=loader,
        evaluation=_evaluation(folders.eval, plan, place, has_mask=has_mask),
        diary=diary,
        is_asked_to_stop=lambda: asked.is_made,
        num_steps=num_steps,
        step=step,
        saved_step=step if step else -1,
    )


def cap_memory(device: torch.device) -> None:
    """Obey a limit below what the machine has, so that others can use the rest."""
    text = os.environ.get(MEMORY_VARIABLE)
    if not text:
        return
    limit = int(text)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _resume(run: RunFolder, engine: Any) -> tuple[int, list[str]]:
    """Load the newest whole checkpoint; the number of steps it holds, and what was passed over."""
    folder = find_checkpoint(run)
    if folder is None:
        return 0, []
    engine.load_state(folder)
    step = read_progress(folder).step
    return step, list_damaged(run, after_step=step)


def _check_vocabulary(store: TokenStore, plan: Plan, training: Training) -> None:
    """A tokenizer of another model: on a GPU a token too high would end in an assertion."""
    highest = store.find_highest_token()
    if highest >= plan.model.vocab_size:
        raise InvalidInputError(
            f"The tokenizer in {training.model_path} wrote token {highest:,}, and the model knows "
            f"{plan.model.vocab_size:,}.",
            remedy="put the model's own tokenizer files there, or enlarge its embeddings",
        )


def _evaluation(
    folder: str | None, plan: Plan, place: Place, *, has_mask: bool
) -> Evaluation | None:
    if folder is None:
        return None
    store = _open_store(folder)
    collate = choose_collate(store.description, is_packed=False, has_mask=has_mask)
    return Evaluation(store, collate, micro_batch=plan.strategy.micro_batch, place=place)


def _open_store(folder: str) -> TokenStore:
    try:
        return TokenStore(Path(folder))
    except OSError as fault:
        raise NotFoundError(
            f"The encoded data of this run is gone: {folder}.",
            remedy="start it again with tightfit train, which encodes it anew",
        ) from fault

"""Where a submitted run will lie, and where it is prepared until it may lie there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.cli.flags.submit import SubmitFlags
from tightfit.cli.training.place import Place, cannot_make, claim_folder, name_folder
from tightfit.cli.training.plan import Ready
from tightfit.cli.training.recipe import Wish
from tightfit.data.token_store import TokenStore
from tightfit.ledger.run_folder import RunFolder

_TOKENS = "tokens"
"""What `data/encode.py` calls the folder that it makes in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """A run's folder, and the one to prepare it in."""

    run: RunFolder
    cache: Path | None
    """Where data is encoded: the run's own folder, or one beside it while an old run is there.
    None: in this user's cache, as nothing is to be written."""


@contextmanager
def open_workplace(
    flags: SubmitFlags, wish: Wish, place: Place, *, home: Path
) -> Iterator[Workplace]:
    """`home` holds runs that were given no folder. What is new in it goes again on a failure."""
    method = wish.recipe.method.value
    if flags.dry_run:
        folder = place.folder or name_folder(wish, method, home=home)
        yield Workplace(run=RunFolder(path=folder.absolute()), cache=None)
    elif place.folder is None:
        with _claimed(claim_folder(wish, method, home=home).absolute()) as run:
            yield Workplace(run=run, cache=run.path)
    elif flags.fresh and place.run.is_run():
        run = RunFolder(path=place.folder.absolute())
        with _beside(run.path) as cache:
            yield Workplace(run=run, cache=cache)
    else:
        with _made(place.folder.absolute()) as run:
            yield Workplace(run=run, cache=run.path)


@contextmanager
def _claimed(folder: Path) -> Iterator[RunFolder]:
    run = RunFolder(path=folder)
    try:
        yield run
    finally:
        if not run.is_run():  # the next attempt claims another: nobody would find its tokens
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """On the same disk, so that what it holds can be moved in an instant."""
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", dir=folder.parent))
    except OSError as fault:
        raise cannot_make(folder, fault) from fault
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _made(folder: Path) -> Iterator[RunFolder]:
    """Before any work, so that a folder that cannot be is not found out in the middle of it."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise cannot_make(folder, fault) from fault
    try:
        yield RunFolder(path=folder)
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty: encoded data is found again
                folder.rmdir()


def move_tokens(ready: Ready, source: Path, target: Path) -> Ready:
    """The same data, moved from one folder that was a cache to another."""
    (source / _TOKENS).rename(target / _TOKENS)

    def reopen(store: TokenStore) -> TokenStore:
        return TokenStore(target / store.folder.relative_to(source))

    held = ready.encoded
    held_out = None if held.eval is None else reopen(held.eval)
    return replace(ready, encoded=replace(held, train=reopen(held.train), eval=held_out))

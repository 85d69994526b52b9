"""Import the libraries that train a model in less time than they take by themselves."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tightfit.core.strategy import Strategy
from tightfit.planning.needs import BITSANDBYTES


@contextmanager
def quick_imports(strategies: Sequence[Strategy]) -> Iterator[None]:
    """Around the imports of a process that will run nothing but these strategies.

    peft imports bitsandbytes wherever it is installed, which takes two seconds: where no strategy
    wants it, it seems not to be. The garbage collector would go through the libraries again and
    again, and copy what it goes through in processes that are forked off: it never looks at them.
    """
    if not any(BITSANDBYTES.is_wanted(strategy) for strategy in strategies):
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

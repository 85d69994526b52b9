"""From the flags that `cli/flags/engine_options.py` declares to what engines take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.cli import choices
from tightfit.cli.flags.engine_options import WEIGHTS
from tightfit.cli.terminal.harmless import shorten
from tightfit.core.errors import UsageError

if TYPE_CHECKING:
    from tightfit.core.dtypes import Dtype
    from tightfit.engines.open import EngineRequest
    from tightfit.engines.protocol import Sampling
    from tightfit.runtime.artefacts import Artefact


def engine_request(flags: object, artefact: Artefact) -> EngineRequest:
    """What the flags say of engine, device and size. Fields that a verb does not have: not said.

    Fields: `engine`, `device`, `weights`, `context`, `parallel`, `threads`, `hosts`, `settings`.
    """
    from tightfit.engines.llama.rpc_hosts import read_hosts
    from tightfit.engines.open import EngineRequest

    _let_segments_grow()
    return EngineRequest(
        artefact=artefact,
        engine=_said(flags, "engine") or "auto",
        weights=_read_weights(_said(flags, "weights")),
        device=_said(flags, "device") or "auto",
        context=_said(flags, "context"),
        slots=_said(flags, "parallel"),
        threads=_said(flags, "threads"),
        hosts=read_hosts(_said(flags, "hosts")),
        template=read_template(_said(flags, "settings") or ()),
    )


def _let_segments_grow() -> None:
    """Spare a GPU the gaps between blocks of changing sizes. Read by torch when CUDA starts.

    The older of two names, for the reason told in `launch/command.py`.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def sampling(flags: object) -> Sampling:
    """What the flags say of choosing tokens; the rest as `Sampling` has it.

    Fields: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
    `seed`, `stop`.
    """
    from tightfit.engines.protocol import Sampling

    names = (
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
    )
    stated = {name: value for name in names if (value := _said(flags, name)) is not None}
    return Sampling(**stated, stop=tuple(_said(flags, "stop") or ()))


def read_template(settings: Sequence[str]) -> str | None:
    """The template of `--set template=NAME|FILE`, the only thing that can be set here."""
    template = None
    for text in settings:
        key, _, value = text.partition("=")
        if key.strip() != "template" or not value.strip():
            raise UsageError(
                f"`--set {shorten(text)}`: only the template can be set here.",
                remedy="--set template=NAME or a Jinja file",
            )
        template = value.strip()
    return template


def _said(flags: object, name: str) -> Any:
    """A flag's value; None where it was not given or the verb has no such flag."""
    return getattr(flags, name, None)


def _read_weights(word: str | None) -> Dtype | None:
    from tightfit.core.dtypes import Dtype

    if word is None:
        return None
    known = choices.read_word(word, WEIGHTS, option="--weights")
    return None if known == "auto" else Dtype(known)

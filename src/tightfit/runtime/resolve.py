"""A model's name to its ModelSpec, where torch may be asked: a family without a reader is read from
the module tree that transformers makes of its config."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.core.child_process import ChildProcess, Message
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import cache_folder, write_atomic
from tightfit.core.import_path import module_words
from tightfit.core.reading import read_json_file
from tightfit.models import resolve
from tightfit.models.families import parts
from tightfit.models.families.parts import ConfigFields
from tightfit.models.families.registry import EXPERT_KEYS, read_generic
from tightfit.models.spec import ModelSpec
from tightfit.trace.tracer import CPU_ENVIRONMENT, list_versions

WORKER = "tightfit.runtime.module_tree"
TIMEOUT_SECONDS = 60.0
"""Import 3 s, 100 layers one more, 10,000 layers 36 s, on one core."""
_BOUNDS = (
    (parts.HIDDEN, parts.MAX_WIDTH),
    (parts.LAYERS, parts.MAX_LAYERS),
    (parts.HEADS + parts.KV_HEADS + EXPERT_KEYS, parts.MAX_COUNT),
    (parts.INNER, parts.MAX_INNER_WIDTH),
    (parts.VOCAB, parts.MAX_VOCAB),
)


def resolve_model(name: str) -> ModelSpec:
    """As `models.resolve.resolve_model`, with module trees for families without a reader."""
    return resolve.resolve_model(name, read_unknown=read_unknown)


def read_unknown(f: ConfigFields) -> ModelSpec:
    """From the module tree on the meta device, else generically, with a warning."""
    # Without a `model_type` transformers knows no more than we do.
    is_named = bool(f.text("model_type", default=""))
    if not is_named or not {"torch", "transformers"} <= set(list_versions()):
        return read_generic(f)
    for keys, most in _BOUNDS:
        for key in keys:
            if type(value := f.values.get(key)) is int and value > most:
                f.size(key, most=most)  # raises
    answer = _ask(json.dumps(f.values, sort_keys=True, default=str))
    problem = str(answer.get("problem", ""))
    if not problem:
        try:
            spec = ModelSpec.model_validate({**answer["spec"], "name": f.name, "source": f.source})
        except (KeyError, TypeError, ValidationError):
            problem = "its module tree cannot be read"
        else:
            f.warnings += spec.warnings
            return spec
    try:
        spec = read_generic(f)
    except InvalidInputError as error:
        if not answer.get("is_known"):
            raise
        raise InvalidInputError(
            f"{f.source}: transformers cannot make a model of it: {problem}.",
            remedy="correct the config, or name a model that `tightfit models` lists",
        ) from error
    if answer.get("is_known"):
        f.warnings.append(f"transformers cannot make a model of the config: {problem}.")
    return spec


@lru_cache(maxsize=16)
def _ask(config: str) -> Message:
    """The worker's answer, from the cache where it has one."""
    try:
        path = _cache_path(config)
        found = read_json_file(path)
        if isinstance(found, dict):
            return found
    except (OSError, UserError, ValueError):
        pass
    answer = _run({"config": json.loads(config)})
    if "spec" in answer:
        try:
            path = _cache_path(config)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(answer))
        except (OSError, UserError):  # it can be asked again
            pass
    return answer


def _run(job: Mapping[str, Any]) -> Message:
    try:
        child = ChildProcess(
            [sys.executable, *module_words(WORKER, str(os.getpid()))],
            env={**os.environ, **CPU_ENVIRONMENT},
            limit_seconds=TIMEOUT_SECONDS,
        )
    except OSError as error:
        return {"problem": f"no process can be started: {error}"}
    with child:
        child.send(job)
        child.close_stdin()
        for message in child:
            return message
        code = child.wait() or 0
        why = f"it took more than {TIMEOUT_SECONDS:.0f} s, or too much memory"
        if code >= 0:
            why = child.last_line or f"the process ended with {code}"
        return {"problem": why, "is_known": True}


def _cache_path(config: str) -> Path:
    """The key covers all that a tree depends on: config, library versions and our own code."""
    code = Path(__file__).with_name("module_tree.py").read_text("utf-8")
    key = json.dumps([config, list_versions(), code], sort_keys=True)
    return cache_folder() / "module-trees" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

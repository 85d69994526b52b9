"""What a tuned model speaks with: tokenizer, the template it was trained on, where it stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tightfit.core.errors import UserError
from tightfit.core.files import write_atomic
from tightfit.data.encode_cache import REPORT_FILE
from tightfit.data.report import DataReport
from tightfit.data.token_store import TokenStore
from tightfit.ledger.run_folder import RunFolder
from tightfit.runtime.companion_files import copy_companions


def write_companions(run: RunFolder, base: Path, folder: Path) -> None:
    """The base's files, changed only where training changed what they say.

    A template that was named instead of the tokenizer's own goes along; a pad token
    that was also the trained stop token is replaced; every stop token ends generation.
    """
    copy_companions(base, folder)
    try:
        store = TokenStore(Path(run.read_tokens().train))
        report = DataReport.model_validate_json((store.folder.parent / REPORT_FILE).read_bytes())
    except (UserError, OSError, ValueError):
        return  # the encoding is gone: the base's own words are the best there are
    if report.template not in ("tokenizer", "none") and report.template_text:
        write_atomic(folder / "chat_template.jinja", report.template_text)
    stops = store.description.stop_token_ids
    _settle_pad(folder / "tokenizer_config.json", report)
    _settle_stops(folder / "generation_config.json", stops, report.pad_token_id)


def _settle_pad(path: Path, report: DataReport) -> None:
    settings = _read(path)
    pad = settings.get("pad_token")
    named = pad.get("content") if isinstance(pad, dict) else pad
    if not settings or (named is not None and named not in report.stop_tokens):
        return
    _write(path, settings | {"pad_token": report.pad_token})


def _settle_stops(path: Path, stops: tuple[int, ...], pad: int) -> None:
    settings = _read(path)
    held = settings.get("eos_token_id", [])
    known = held if isinstance(held, list) else [held]
    merged = list(dict.fromkeys([*known, *stops]))
    is_told = set(stops) <= set(known) and settings.get("pad_token_id") not in (None, *stops)
    if is_told or not merged:
        return
    eos: Any = merged if len(merged) > 1 else merged[0]
    _write(path, settings | {"eos_token_id": eos, "pad_token_id": pad})


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, settings: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

"""The first plan for every family, run on this GPU: it starts, and the loss falls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tightfit
from small_models import FAMILIES, SENTENCES, make_family


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_plan_trains(family: str, method: str, tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", family)
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": SENTENCES[n % 3], "completion": SENTENCES[(n + 1) % 3]} for n in range(64)]
    data.write_text("\n".join(map(json.dumps, rows)))

    trained = tightfit.train(
        str(model),
        data=data,
        method=method,
        template="chatml",
        seq_len=256,
        lr=5e-3,
        max_steps=12,
        output=tmp_path / "run",
    )

    report = trained.report
    assert trained.artefact is not None
    assert report is not None
    assert report.first_loss is not None
    assert report.last_loss is not None
    assert report.last_loss < 0.9 * report.first_loss, report.strategy

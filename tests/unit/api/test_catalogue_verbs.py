"""doctor, models and hardware from Python: keywords in, typed results out."""

from __future__ import annotations

import pytest

from tightfit.api.catalogue import doctor, hardware, models
from tightfit.core.errors import NotFoundError, UsageError


def test_models() -> None:
    one = models("Llama-2-7b")
    assert not one.is_search
    assert one.models[0].num_params == 6_738_415_616  # Meta's own count
    found = models("qwen")
    assert found.is_search
    assert len(found.models) > 5
    assert len(models().models) > len(found.models)
    with pytest.raises(NotFoundError):
        models("no-such-model")


def test_hardware() -> None:
    record = hardware("T4").record
    assert record is not None
    assert record.gpu.compute_capability == (7, 5)
    assert len(hardware("a100").gpus) > 1
    cluster = hardware(on="2n x 4xV100-32GB").cluster
    assert cluster is not None
    assert cluster.num_gpus == 8
    with pytest.raises(UsageError, match="--each"):
        hardware(each=True)


def test_doctor() -> None:
    checkup = doctor()
    assert checkup.exit_code in (0, 6)
    assert any(finding.name == "Python" for finding in checkup.findings)

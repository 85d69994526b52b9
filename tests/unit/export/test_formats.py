"""Every export format's record. `tests/integration/extending` adds one and uses it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from small_models import make_llama
from tightfit.core.errors import UsageError
from tightfit.export import formats
from tightfit.export.formats import (
    LIMITS,
    ExportFormat,
    find_format,
    list_formats,
    register_format,
)
from tightfit.export.quantize.job import (
    QuantizeJob,
    QuantizeRequest,
    QuantizeSource,
    find_quantize_source,
)
from tightfit.export.verify.scores import recognise_step


def make_job(source: QuantizeSource, folder: Path) -> QuantizeJob:
    request = QuantizeRequest(model=str(source.path), formats=(), device="cpu")
    return QuantizeJob(request, source, folder)


@pytest.mark.parametrize("record", list_formats(), ids=lambda record: record.name)
def test_every_format_has_limits_and_a_writer_that_can_forecast_it(
    record: ExportFormat, tmp_path: Path
) -> None:
    model = make_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=256)
    source = find_quantize_source(str(model), [record])
    job = make_job(source, tmp_path)

    found = job.forecast(record)

    assert found.disk_bytes < source.spec.num_params * 4 + 10**6
    assert found.host_bytes > found.disk_bytes
    assert record.step in LIMITS
    assert recognise_step("bf16", record.engine_name, is_same_engine=True) is record.step


def test_fewer_bits_of_one_writer_take_less_disk(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=256)
    source = find_quantize_source(str(model), [formats.Q8_0])
    job = make_job(source, tmp_path)

    sizes = {record: job.forecast(record).disk_bytes for record in list_formats()}

    for (one, one_bytes), (two, two_bytes) in itertools.permutations(sizes.items(), 2):
        if one.writer == two.writer and one.bits < two.bits:
            assert one_bytes < two_bytes, (one.name, two.name)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        register_format(formats.Q8_0)


def test_formats_load_no_library() -> None:
    """`--help` and completion read the names."""
    code = (
        "import sys, tightfit.export.formats; "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_format_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UsageError, match="q4_k_m"):
        find_format("q4_k_n")

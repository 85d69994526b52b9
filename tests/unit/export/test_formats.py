"""Every export format's record, and a new format made with nothing but a record and a writer."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_models import make_llama
from tightfit.core.errors import UsageError
from tightfit.export import formats
from tightfit.export.formats import (
    LIMITS,
    ExportFormat,
    StepKind,
    find_format,
    list_formats,
    read_formats,
    register_format,
)
from tightfit.export.quantize.job import (
    QuantizeJob,
    QuantizeMeasurement,
    QuantizeSettings,
    find_quantize_source,
)
from tightfit.export.quantize.quantize import QuantizeRequest, quantize_model
from tightfit.export.quantize.summary import QuantizeForecast, QuantizeStatus, QuantizeSummary
from tightfit.export.verify.judge import recognise_step


@pytest.mark.parametrize("record", list_formats(), ids=lambda record: record.name)
def test_every_format_has_limits_and_a_writer_that_can_forecast_it(
    record: ExportFormat, tmp_path: Path
) -> None:
    model = make_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=256)
    source = find_quantize_source(str(model), [record])
    job = QuantizeJob(source, tmp_path, QuantizeSettings(device="cpu"), None)

    found = job.forecast(record)

    assert found.disk_bytes < source.spec.num_params * 4 + 10**6
    assert found.host_bytes > found.disk_bytes
    assert record.step in LIMITS
    assert recognise_step("bf16", record.engine_name, is_same_engine=True) is record.step


def test_fewer_bits_of_one_writer_take_less_disk(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=256)
    source = find_quantize_source(str(model), [formats.Q8_0])
    job = QuantizeJob(source, tmp_path, QuantizeSettings(device="cpu"), None)

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


class CopyWriter:
    """A toy: the weights as they are."""

    def __init__(self, job: QuantizeJob) -> None:
        self._job = job

    def forecast(self, wanted: ExportFormat) -> QuantizeForecast:
        del wanted
        return QuantizeForecast(host_bytes=1, disk_bytes=self._job.source.size_bytes, seconds=1)

    def write(self, wanted: ExportFormat, path: Path) -> QuantizeMeasurement:
        path.mkdir()
        for file in self._job.source.path.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        return QuantizeMeasurement(seconds=0.1, peak_host_bytes=1, notes=(wanted.name,))

    def scratch_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.fixture
def toy() -> Iterator[ExportFormat]:
    record = ExportFormat(
        name="toy-16",
        writer=f"{__name__}:CopyWriter",
        bits=16,
        step=StepKind.FORMAT,
        engine_name="toy-16",
    )
    yield register_format(record)
    del formats._REGISTRY[record.name]


def test_a_new_format_is_a_record_and_a_writer(toy: ExportFormat, tmp_path: Path) -> None:
    model = make_llama(tmp_path / "tiny")

    summary = quantize_model(
        QuantizeRequest(model=str(model), formats=read_formats(["toy-16"]), out=tmp_path / "out")
    )

    (row,) = summary.rows
    assert (row.target, row.standing) == (toy, QuantizeStatus.MADE)
    assert (tmp_path / "out" / "config.json").is_file()
    assert QuantizeSummary.model_validate_json(summary.model_dump_json()) == summary
    assert '"target":"toy-16"' in summary.model_dump_json()


def test_an_unknown_format_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UsageError, match="q4_k_m"):
        find_format("q4_k_n")

"""A real tiny model: a farm's answers are those of `generate`, byte for byte."""

from __future__ import annotations

from pathlib import Path

from small_models import make_llama
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.engines.open import EngineRequest
from tightfit.farming.heartbeat import read_statuses
from tightfit.farming.results import collect_output
from tightfit.farming.statistics import sum_farm
from tightfit.farming.submit import FarmJob, open_farm
from tightfit.farming.worker import run_worker
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.generate.journal import open_journal
from tightfit.serving.generate.prompts import Prompt
from tightfit.serving.generate.run import GenerateJob, describe_settings, run_engine
from tightfit.serving.generate.statistics import BottleneckKind


def test_a_farm_answers_as_generate_does(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    make_llama(model)
    prompts = [
        Prompt(index=n, place=f"line {n}", messages=(Message("user", "how many " * (1 + n % 5)),))
        for n in range(20)
    ]
    sampling = Sampling(max_new_tokens=6, temperature=0.9, seed=5)
    job = GenerateJob(prompts=prompts, sampling=sampling, num_samples=2)
    request = EngineRequest(artefact=find_artefact(str(model)), device="cpu")
    settings = describe_settings(request, job)
    whole = tmp_path / "whole.jsonl"
    with open_journal(whole, settings, seed=5) as journal:
        run_engine(request, job, journal)
        journal.finish(is_complete=True)

    out = tmp_path / "farmed.jsonl"
    order = FarmJob(
        out=out, job=job, request=request, settings=settings, num_workers=3, lease_seconds=60
    )
    folder, farm, _ = open_farm(order)
    assert run_worker(folder) == 0
    collected = collect_output(folder, farm, out)

    assert out.read_bytes() == whole.read_bytes()
    assert out.read_bytes().count(b"\n") == 40
    statistics = sum_farm(
        collected.heads,
        read_statuses(folder),
        farm=farm,
        num_failed=0,
        commits_s=collected.commits_s,
        began_s=0.0,
    )
    (node,) = statistics.nodes
    (status,) = read_statuses(folder)
    assert status.usage is not None
    assert (status.state, status.usage.num_slots) == ("ended", 8)
    # The weights once for each pass, at least; five tokens follow the first of each answer.
    weights = (model / "model.safetensors").stat().st_size
    assert status.usage.traffic.bytes_moved > 0.5 * weights * 40 * 5 / 8
    assert node.bytes_per_second == status.usage.traffic.average_bytes_per_second
    assert node.bandwidth_fraction is not None
    assert 0 < node.bandwidth_fraction < 1
    assert node.bottleneck in {kind.value for kind in BottleneckKind}
    assert node.sentence

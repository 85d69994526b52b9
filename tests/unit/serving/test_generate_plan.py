"""The prediction before loading: what is refused, and that what is proposed instead fits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError
from tightfit.core.units import GIB
from tightfit.engines.open import EngineChoice, EngineRequest
from tightfit.estimation.inference import InferenceJob, estimate_inference
from tightfit.estimation.result import Verdict
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.runtime.model_files import Artefact, ArtefactKind
from tightfit.serving.generate.prediction import InferencePrediction, require_fit

LLAMA = resolve_model("Llama-2-7b")
CARD = resolve_hardware("RTX-4090").groups[0].node.gpu


def predict(capacity: int, *, slots: int, columns: int = 2048) -> InferencePrediction:
    job = InferenceJob(
        weight_bytes=2 * LLAMA.num_params,
        compute=Dtype.BF16,
        num_slots=slots,
        num_columns=columns,
        prompt_tokens=512,
        new_tokens=256,
        pass_tokens=2048,
    )
    return InferencePrediction(
        choice=EngineChoice(engine="transformers", device="cuda", why="because."),
        spec=LLAMA,
        gpu=CARD,
        job=job,
        estimate=estimate_inference(LLAMA, job, CARD),
        capacity_bytes=capacity,
        weight_file_bytes=None,
    )


def request(kind: ArtefactKind = ArtefactKind.MODEL) -> EngineRequest:
    here = Path("llama")
    return EngineRequest(artefact=Artefact(name="llama", kind=kind, path=here, tokenizer=here))


def test_what_fits_passes() -> None:
    require_fit(predict(80 * GIB, slots=8), request())


@pytest.mark.parametrize(
    ("capacity", "slots", "remedy"),
    [(23 * GIB, 32, r"--parallel (\d+)"), (12 * GIB, 2, r"--weights nf4(?: --parallel 1)?")],
)
def test_a_refusal_proposes_the_least_change_that_fits(
    capacity: int, slots: int, remedy: str
) -> None:
    prediction = predict(capacity, slots=slots)

    with pytest.raises(DoesNotFitError) as caught:
        require_fit(prediction, request())

    found = re.match(remedy, caught.value.remedy)
    assert found is not None, caught.value.remedy
    if found.lastindex:
        fewer = int(found[1])
        job = replace(prediction.job, num_slots=fewer)
        twice = replace(prediction.job, num_slots=2 * fewer)
        assert judge(prediction, job) is Verdict.FITS
        assert judge(prediction, twice) is not Verdict.FITS


def judge(prediction: InferencePrediction, job: InferenceJob) -> Verdict:
    return replace(prediction, job=job, estimate=estimate_inference(LLAMA, job, CARD)).verdict


def test_packing_is_not_proposed_for_what_is_packed() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        require_fit(predict(12 * GIB, slots=2), request(ArtefactKind.GGUF))
    assert "nf4" not in caught.value.remedy
    assert "--no-check" in caught.value.remedy

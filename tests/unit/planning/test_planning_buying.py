"""The buying guide: cheapest first, every offer does the job, prices add up."""

from __future__ import annotations

import time

import pytest
from planning_cases import SHORT_ROWS, make_request

from machine_pace import allow
from tightfit.core.errors import DoesNotFitError
from tightfit.estimation.result import Verdict
from tightfit.hardware.catalogue import find_gpu, list_gpus
from tightfit.planning.buying import buying_guide
from tightfit.planning.plan import find_price


def test_offers_fit_and_are_sorted_by_price() -> None:
    offers = buying_guide(make_request())
    assert len(offers) >= 15
    prices = [offer.price for offer in offers]
    assert prices == sorted(prices)
    assert len({offer.gpu.name for offer in offers}) == len(offers)
    for offer in offers:
        assert offer.plan.estimate.verdict in (Verdict.FITS, Verdict.TIGHT)
        assert offer.plan.strategy.world_size == offer.num_gpus
        assert offer.usd_per_run is None
        assert offer.usd_per_month == pytest.approx(offer.usd_per_hour * 730)


def test_known_data_prices_the_run() -> None:
    offer = buying_guide(make_request(profile=SHORT_ROWS, num_epochs=3))[0]
    epoch = offer.plan.estimate.time.seconds_per_epoch
    assert epoch is not None
    assert offer.usd_per_run == pytest.approx(offer.usd_per_hour * 3 * epoch / 3600)
    assert offer.plan.cost is not None
    assert offer.plan.cost.usd_per_run == offer.usd_per_run


def test_big_model_needs_several_small_cards() -> None:
    offers = buying_guide(
        make_request("Llama-2-70b"), gpus=[find_gpu("RTX 3090"), find_gpu("MI300X")]
    )
    counts = {offer.gpu.name: offer.num_gpus for offer in offers}
    assert counts["GeForce RTX 3090"] > 1
    assert counts["AMD MI300X"] == 1


def test_stages_are_there_for_the_chart() -> None:
    offer = buying_guide(make_request(), gpus=[find_gpu("A100-80GB")])[0]
    assert list(offer.stages)[:4] == ["load", "forward", "backward", "optimizer"]
    assert {"eval", "save"} <= offer.stages.keys()
    assert max(offer.stages.values()) <= offer.gpu.memory_bytes


def test_one_cloud_alone_changes_the_price() -> None:
    gpu = find_gpu("A100-80GB")
    dearest = max(gpu.prices, key=lambda price: price.usd_per_gpu_hour)
    offer = buying_guide(make_request(), gpus=[gpu], clouds=[dearest.cloud])[0]
    assert offer.usd_per_hour == pytest.approx(dearest.usd_per_gpu_hour)
    assert dearest.cloud in offer.price_source


def test_the_cheapest_cloud_sets_the_price() -> None:
    priced = [gpu for gpu in list_gpus() if gpu.prices]
    assert len(priced) >= 15
    for gpu in priced:
        price = find_price(gpu)
        assert price is not None
        assert price.usd_per_gpu_hour == min(found.usd_per_gpu_hour for found in gpu.prices)


def test_nothing_to_buy_says_what_is_missing() -> None:
    with pytest.raises(DoesNotFitError, match=r"up to 1 GPUs .* short\)") as error:
        buying_guide(make_request("Llama-3.1-405B"), max_gpus=1)
    assert "--method qlora" in error.value.remedy


def test_what_no_money_buys_is_told_as_such() -> None:
    with pytest.raises(DoesNotFitError, match="1024 learned positions"):
        buying_guide(make_request("gpt2", seq_len=4096))


def test_layout_of_the_own_cluster_does_not_bind_the_guide() -> None:
    request = make_request(fixed={"gpus_per_node": 4, "sharding": "zero3", "lora_rank": 64})
    offers = buying_guide(request, gpus=[find_gpu("H200")])
    assert offers[0].num_gpus == 1
    assert offers[0].plan.strategy.lora_rank == 64


def test_whole_catalogue_in_three_seconds() -> None:
    started = time.process_time()
    buying_guide(make_request())
    assert time.process_time() - started < allow(3.0)

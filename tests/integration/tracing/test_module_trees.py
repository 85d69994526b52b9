"""Every causal family of the installed transformers: its spec by the module tree, and a plan."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from module_trees import count_real, list_types, our_linears, real_linears, try_build
from tightfit.hardware.resolve import parse_hardware
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.runtime.module_tree import read_tree

ALL = sorted([*list_types(with_reader=True), *list_types(with_reader=False)])
MOST_WITHOUT_DEFAULTS = 20
"""Families whose default config makes no model, or which need a package that is not here."""


@pytest.mark.filterwarnings("ignore")
def test_every_causal_family_is_counted_exactly_and_planned() -> None:
    skipped, wrong = [], []
    cluster = parse_hardware("2n x 8xH200")
    for model_type in ALL:
        built = try_build(model_type)
        if built is None:
            skipped.append(model_type)
            continue
        spec = read_tree(*built).model_copy(update={"name": model_type, "source": "here"})
        if spec.num_params != count_real(built[0]):
            wrong.append(f"{model_type}: {spec.num_params} of {count_real(built[0])}")
        if our_linears(spec) - real_linears(built[0]):
            wrong.append(f"{model_type}: matrices that are not there")
        request = JobRequest(spec=spec, method="lora", seq_len=64)
        assert search(request, cluster, num_plans=1).plans
    assert not wrong
    assert len(ALL) > 150
    assert len(skipped) <= MOST_WITHOUT_DEFAULTS, skipped


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_experts_are_those_that_peft_makes() -> None:
    """`all-linear`, where some of the matrices are bare parameters."""
    num_compared = 0
    for model_type in ALL:
        if (built := try_build(model_type)) is None:
            continue
        spec = read_tree(*built)
        parts = [(block.num_layers, part) for block in spec.blocks for part in block.linears]
        if all(part.is_module for _, part in parts):
            continue
        options = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
        try:
            adapted = get_peft_model(built[0], options, autocast_adapter_dtype=False)
        except ValueError:  # families that peft refuses
            continue
        wraps_experts = any(isinstance(module, ParamWrapper) for module in adapted.modules())
        made = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
        ours = sum(
            count * part.lora_rank_factor * part.copies * (part.in_features + part.out_features)
            for count, part in parts
            if part.is_module or wraps_experts
        )
        assert ours == pytest.approx(made, rel=1e-3), model_type
        num_compared += 1
    assert num_compared > 10

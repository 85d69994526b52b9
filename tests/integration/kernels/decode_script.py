"""Prints how far the kernels of a decoding step are from plain torch."""

from __future__ import annotations

import json

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tightfit.runtime import decoding
from tightfit.runtime.decoding import SlotScores
from tightfit.runtime.kernels import decode_triton

COLUMNS = 200
LENGTHS = torch.tensor([0, 3, 63, 64, 150])
"""Of an empty slot, of less than a tile, of a tile and one more, and of several."""
SINKS = torch.linspace(-2, 3, 12)
CASES: dict[str, tuple[tuple[int, int, int, int], SlotScores]] = {
    "plain": ((8, 8, 64, 64), SlotScores(scale=0.125)),
    "grouped, softcap": ((8, 2, 40, 40), SlotScores(scale=0.3, softcap=5.0)),
    "window, sinks": ((12, 4, 32, 48), SlotScores(scale=0.2, window=70, sinks=SINKS)),
}
"""Heads, key heads and both widths."""


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def main() -> None:
    torch.manual_seed(0)
    report: dict[str, float] = {}
    num_rows = len(LENGTHS)
    for name, ((heads, key_heads, width, value_width), scores) in CASES.items():
        keys = torch.randn(num_rows + 1, key_heads, COLUMNS, width)
        values = torch.randn(num_rows + 1, key_heads, COLUMNS, value_width)
        # As a fused projection hands them on: not contiguous.
        query, key = torch.split(
            torch.randn(num_rows, heads + key_heads, width), [heads, key_heads], 1
        )
        value = torch.randn(num_rows, key_heads, value_width)
        wanted = keys.clone(), values.clone()
        decoding.write_slots(key, value, *wanted, LENGTHS)
        decode_triton.write_slots(key, value, keys, values, LENGTHS)
        report[f"{name}: written"] = sum(map(distance, (keys, values), wanted))
        held = keys[:num_rows], values[:num_rows]
        found = decode_triton.attend_slots(query, *held, LENGTHS, scores)
        report[name] = distance(found, decoding.attend_slots(query, *held, LENGTHS, scores))
    query, key = torch.split(torch.randn(num_rows, 12, 1, 24), [8, 4], dim=1)
    angles = torch.randn(num_rows, 1, 12).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    wanted_pair = apply_rotary_pos_emb(query, key, cos, sin)
    found_pair = decode_triton.rotate(query, key, cos, sin)
    report["rotated"] = sum(map(distance, found_pair, wanted_pair))
    for out, width, has_bias in ((37, 1100, True), (8200, 40, False)):
        x, weight = torch.randn(1, 1, width), torch.randn(out, width)
        bias = torch.randn(out) if has_bias else None
        wanted_row = torch.nn.functional.linear(x, weight, bias)
        found_row = decode_triton.multiply_row(x, weight, bias)
        report[f"row of {out}"] = distance(found_row, wanted_row)
    print(json.dumps(report))


main()

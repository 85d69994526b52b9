"""The transformers engine on a GPU: recorded steps and packed weights against plain generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_batches import FAMILIES, ask, generate, make_model, make_prompts, open_batch
from small_models import make_tokenizer
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.protocol import Request
from tightfit.engines.transformers.engine import open_rows


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("t5", "bart")])
def test_a_changing_batch_answers_as_each_prompt_alone(family: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    make_tokenizer(tmp_path)
    prompter = Prompter(load_tokenizer(tmp_path))
    model = make_model(family).cuda()
    requests = [
        Request(prompt=prompt, sampling=Sampling(max_new_tokens=3 + 7 * (n % 5)))
        for n, prompt in enumerate(make_prompts(14))
    ]
    stops = set(prompter.stop_ids)
    with torch.device("cuda"):  # where `generate` makes its prompt
        expected = [generate(model, r.prompt, r.sampling, stops) for r in requests]
    rows: Any = open_rows(model, most_rows=4)
    with open_batch(rows) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    assert [collector.tokens(n) for n in range(len(requests))] == expected

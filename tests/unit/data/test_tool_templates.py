"""Tools, calls, results and reasoning through published templates: transformers' tokens, our masks.

`TIGHTFIT_FUZZ_CASES=1000 pytest tests/unit/data/test_tool_templates.py` makes 1,000 conversations
for each template.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="un-skip with: pip install 'tightfit[train]'")
pytest.importorskip("trl", reason="un-skip with: pip install -e '.[dev]'")

from hostile_trials import count_cases
from tightfit.core.settings import TrainOn
from tightfit.data.call_syntax import find_syntax
from tightfit.data.encode_rows import mask_tokens
from tightfit.data.formats import FORMATS, Conversation
from tightfit.data.readers import Row
from tightfit.data.templates import ChatRenderer, Prompter, RenderedRow, choose_template
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer
from tool_chats import FAMILIES, ChatMaker, plant_family

NUM_CASES = count_cases(12)
DROPPING = {"mistral": "the system text", "gpt-oss": "the reasoning before a call"}


@cache
def model(name: str) -> tuple[Any, ChatTokenizer]:
    from transformers import AutoTokenizer

    folder = plant_family(Path(mkdtemp()) / name, FAMILIES[name])
    return AutoTokenizer.from_pretrained(folder, local_files_only=True), load_tokenizer(folder)


def read(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Conversation:
    """As from a data file, with arguments as OpenAI writes them: as text."""
    given = json.loads(json.dumps(messages))
    for message in given:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments)
    row = Row({"messages": given, "tools": json.dumps(tools)}, Path("a.jsonl"), 1, "line")
    return FORMATS["chat"].to_conversation(row)


def render(name: str, chat: Conversation) -> list[RenderedRow]:
    tokenizer = model(name)[1]
    renderer = ChatRenderer(tokenizer, choose_template(None, tokenizer), train_on=TrainOn.ANSWERS)
    return renderer.rows(*chat)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_transformers_own_and_only_answers_and_calls_are_trained(name: str) -> None:
    theirs, tokenizer = model(name)
    family = FAMILIES[name]
    unseal = tokenizer.control.unseal
    syntax = find_syntax(family.text())
    prompter = Prompter(tokenizer)
    for seed in range(NUM_CASES):
        maker = ChatMaker(seed, family)
        tools = maker.tools() if seed % 8 else []
        messages = maker.messages(tools)
        asked = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: asked[-1] + 1]

        rows = render(name, read(messages, tools))

        answers = [(row, span) for row in rows for span in row.spans]
        assert len(answers) == len(asked), seed
        trained_words: list[str] = []
        for (row, span), at in zip(answers, asked, strict=True):
            ends = at + 1 if len(rows) > 1 else len(messages)
            prompt = theirs.apply_chat_template(
                messages[:at], tools=tools or None, add_generation_prompt=True, tokenize=False
            )
            until = theirs.apply_chat_template(
                messages[: at + 1], tools=tools or None, tokenize=False
            )
            whole = theirs.apply_chat_template(
                messages[:ends], tools=tools or None, return_dict=False
            )
            # The answer follows transformers' own prompt and ends where a stop token ends it.
            assert unseal(row.text[: span.start]) == prompt, seed
            answer = unseal(row.text[span.start : span.end])
            if until.startswith(prompt):
                assert until[len(prompt) :].startswith(answer), seed
            else:  # the finished turn leaves out what its prompt says
                assert name in DROPPING, seed
                assert until.rstrip().endswith(answer), seed
            assert any(answer.endswith(stop) for stop in family.stops), (seed, answer)
            assert not any(stop in answer[:-9] for stop in family.stops), (seed, answer)
            # Its tokens are transformers' own, and each is trained or not as a whole.
            [encoding] = tokenizer.encode_sealed([row.text])
            if until.startswith(prompt):
                assert encoding.ids == whole[: len(encoding.ids)], seed
                assert not "".join(map(theirs.decode, whole[len(encoding.ids) :])).strip(), seed
            else:
                text = prompt + answer
                assert encoding.ids == theirs(text, add_special_tokens=False)["input_ids"], seed
            trained, num_across = mask_tokens(encoding.offsets, row.spans)
            assert num_across == 0
            words = tokenizer.decode(
                [i for i, flag in zip(encoding.ids, trained, strict=True) if flag]
            )
            assert not maker.read & set(re.findall(r"[klmnp]\d{4}x", words)), seed
            trained_words += re.findall(r"[klmnp]\d{4}x", answer)
            # What a server would read of it.
            ids = [i for i in tokenizer.encode(answer) if i not in tokenizer.stop_ids]
            text = prompter.decode(ids, prompter.call_control)
            parsed = syntax.parse(text)
            expected = [call["function"] for call in messages[at].get("tool_calls", ())]
            assert [call.name for call in parsed.calls] == [call["name"] for call in expected]
            assert [call.arguments for call in parsed.calls] == [
                call["arguments"] for call in expected
            ], (seed, text)
        assert set(trained_words) == maker.learnt, seed

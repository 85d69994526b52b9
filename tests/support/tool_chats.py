"""Conversations with tools, made from a seed, and small models with published chat templates.

Each text of a conversation holds a word that occurs nowhere else, so that a test can tell from
decoded tokens which text was trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIALS = [
    "<pad>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
    "<|constrain|>", "<|call|>", "<|return|>", "<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>",
    "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>",
    "<channel|>", "<|think|>",
]  # fmt: skip
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
"""Tokens of their own that count as text, as in Qwen's tokenizers."""

# In the format of Mistral-7B-Instruct-v0.3: tools before the last question, ids of nine characters.
MISTRAL = """
{{- bos_token }}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if loop.last and turns != messages %}
{{- '[INST] ' + messages[0].content + '\\n\\n' + m.content + '[/INST]' }}
{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""
# In the format of Hermes-3's `tool_use` template: arguments before the name, results with theirs.
HERMES_3 = """
{{- bos_token }}
{%- if tools %}
{{- '<|im_start|>system\\nYou call functions. Here are they: <tools> ' }}
{%- for tool in tools %}{{- (tool | tojson) + ('' if loop.last else '\\n') }}{%- endfor %}
{{- ' </tools>For each call, write:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-dict>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls is defined %}
{{- '<|im_start|>assistant' }}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"arguments": ' + (call.function.arguments | tojson) + ', "name": "' }}
{{- call.function.name + '"}\\n</tool_call> ' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if m.name is not defined %}{{- raise_exception('a result needs a name') }}{%- endif %}
{{- '<|im_start|>tool\\n<tool_response>\\n{"name": "' + m.name + '", "content": ' }}
{{- (m.content | tojson) + '}\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A chat template with tools, and what it can write."""

    template: str
    """A name of TRL's package, or the text."""
    bos: str
    eos: str
    stops: tuple[str, ...]
    thought: str | None = None
    """The field it takes reasoning in."""
    has_parallel: bool = True
    has_text_beside_calls: bool = True

    def text(self) -> str:
        if "{" in self.template:
            return self.template
        found = find_spec("trl")
        assert found is not None
        assert found.submodule_search_locations
        folder = Path(next(iter(found.submodule_search_locations))) / "chat_templates"
        return (folder / f"{self.template}.jinja").read_text(encoding="utf-8")


CHATML: Any = {"bos": "<|endoftext|>", "eos": "<|im_end|>", "stops": ("<|im_end|>",)}
LLAMA: Any = {
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "stops": ("<|eot_id|>", "<|eom_id|>"),
    "has_parallel": False,
    "has_text_beside_calls": False,
}
FAMILIES = {
    "llama-3.1": Family(template="llama3_1", **LLAMA),
    "llama-3.2": Family(template="llama3_2", **LLAMA),
    "qwen-2.5": Family(template="qwen2_5", **CHATML),
    "qwen-3": Family(template="qwen3", thought="reasoning_content", **CHATML),
    "mistral": Family(
        template=MISTRAL, bos="<s>", eos="</s>", stops=("</s>",), has_text_beside_calls=False
    ),
    "gemma-4": Family(
        template="gemma4_v5",
        bos="<bos>",
        eos="<turn|>",
        stops=("<turn|>", "<|tool_response>"),
        thought="reasoning_content",
        has_text_beside_calls=False,
    ),
    "gpt-oss": Family(
        template="gptoss",
        bos="<|endoftext|>",
        eos="<|return|>",
        stops=("<|return|>", "<|call|>"),
        thought="thinking",
        has_parallel=False,
        has_text_beside_calls=False,
    ),
    "hermes-3": Family(template=HERMES_3, has_text_beside_calls=False, **CHATML),
}


def make_tokenizer() -> Any:
    """Byte-level BPE with the control tokens of every family."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the tool returns what the user has asked for"], trainer)
    tokenizer.add_tokens([AddedToken(word) for word in WORDS])
    return tokenizer


def plant_family(folder: Path, family: Family) -> Path:
    """A model folder with a tokenizer and the family's template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "pad_token": "<pad>",
        "chat_template": family.text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [tokenizer.token_to_id(stop) for stop in family.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


class ChatMaker:
    """Conversations of one family in transformers' form, with the words that are to be learnt."""

    def __init__(self, seed: int, family: Family) -> None:
        self._random = Random(seed)
        self._family = family
        self._num_words = 0
        self.learnt: set[str] = set()
        self.read: set[str] = set()

    def tools(self) -> list[dict[str, Any]]:
        return [self._tool(number) for number in range(self._random.randint(1, 4))]

    def messages(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        random = self._random
        made = []
        if random.random() < 0.5:
            made.append({"role": "system", "content": self._said("be brief", self.read)})
        for _ in range(random.randint(1, 3)):
            made.append({"role": "user", "content": self._said("what is", self.read)})
            for _ in range(random.choice([0, 1, 1, 2]) if tools else 0):
                made += self._calls(tools)
            answer = {"role": "assistant", "content": self._said("it is", self.learnt)}
            made.append(self._thinking(answer))
        if tools and random.random() < 0.3:  # ends with a call
            made.append({"role": "user", "content": self._said("and what", self.read)})
            made += self._calls(tools)[:1]
        return made

    def _calls(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        random = self._random
        count = random.choice([1, 1, 2, 3]) if self._family.has_parallel else 1
        calls = [self._call(random.choice(tools)) for _ in range(count)]
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        if self._family.has_text_beside_calls and random.random() < 0.3:
            message["content"] = self._said("I look", self.learnt)
        results = [
            {
                "role": "tool",
                "content": random.choice(
                    [self._said("found", self.read), json.dumps({"a": [1, self._word(self.read)]})]
                ),
                "name": call["function"]["name"],
                "tool_call_id": call["id"],
            }
            for call in calls
        ]
        return [self._thinking(message), *results]

    def _thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        field = self._family.thought
        if field is None or self._random.random() < 0.5:
            return message
        return {**message, field: self._said("so", self.learnt)}

    def _tool(self, number: int) -> dict[str, Any]:
        names = self._random.sample(["city", "day", "count", "is_new", "tags", "place"], 3)
        kinds = ["string", "integer", "number", "boolean", "array", "object"]
        properties: dict[str, Any] = {
            name: {"type": kind, "description": self._said(name, self.read)}
            for name, kind in zip(names, self._random.sample(kinds, 3), strict=True)
        }
        for schema in properties.values():
            if schema["type"] == "array":
                schema["items"] = {"type": "string"}
        return {
            "type": "function",
            "function": {
                "name": f"{self._random.choice(['get', 'find', 'book'])}_thing_{number}",
                "description": self._said("does", self.read),
                "parameters": {"type": "object", "properties": properties, "required": names[:1]},
            },
        }

    def _call(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        values: dict[str, Callable[[], Any]] = {
            "string": lambda: self._said("in", self.learnt),
            "integer": lambda: self._random.randint(-9, 10**6),
            "number": lambda: self._random.choice([0.5, -2.25, 1e-7]),
            "boolean": lambda: self._random.random() < 0.5,
            "array": lambda: [self._word(self.learnt), "ü 🙂"],
            "object": lambda: {"of": self._word(self.learnt), "none": None},
        }
        properties = function["parameters"]["properties"]
        kept = [name for name in properties if self._random.random() < 0.8]
        arguments = {name: values[properties[name]["type"]]() for name in kept}
        self._num_words += 1
        return {
            "id": f"call{self._num_words:05}",
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }

    def _said(self, text: str, words: set[str]) -> str:
        ending = self._random.choice(["", ".", " été", " 日本", '\n"so"', " \\ {x}", " </b>"])
        return f"{text} {self._word(words)}{ending}"

    def _word(self, words: set[str]) -> str:
        self._num_words += 1
        word = f"{self._random.choice('klmnp')}{self._num_words:04}x"
        words.add(word)
        return word

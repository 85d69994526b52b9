"""Questions that one of eight tools answers, as rows with `tools` and `messages`.

    python examples/tool_calls/make_data.py demo-out/tool_calls

The test asks in words and about things that training never uses. Each row lists three of the
tools; of some rows none of them fits, and the answer says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

NUM_TRAIN, NUM_TEST = 160, 40
TOOLS_PER_ROW = 3
UNFIT_FRACTION = 0.1
NO_TOOL = "None of these functions can do that."

TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Weather of a city", {"city": "string"}),
    "convert_currency": (
        "Convert an amount of money",
        {"amount": "integer", "source": "string", "target": "string"},
    ),
    "set_timer": ("Start a timer", {"minutes": "integer"}),
    "play_music": ("Play songs of an artist", {"artist": "string"}),
    "send_message": ("Send a text to a person", {"person": "string", "text": "string"}),
    "find_recipe": ("Find a recipe for a dish", {"dish": "string"}),
    "book_table": ("Reserve a restaurant table", {"restaurant": "string", "people": "integer"}),
    "translate": ("Translate a word", {"word": "string", "language": "string"}),
}
# Per tool: phrasings of training, then those of the test.
PHRASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "get_weather": (
        ("What is the weather in {city}?", "Is it raining in {city} today?",
         "Tell me the weather in {city}.", "How warm is it in {city}?"),
        ("Do I need an umbrella in {city}?", "I travel to {city}, how is the weather there?"),
    ),
    "convert_currency": (
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
         "What are {amount} {source} worth in {target}?"),
        ("I have {amount} {source}, what does that make in {target}?",
         "Change {amount} {source} into {target} for me."),
    ),
    "set_timer": (
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
         "Wake me in {minutes} minutes."),
        ("Remind me when {minutes} minutes are over.", "I need a timer, {minutes} minutes please."),
    ),
    "play_music": (
        ("Play something by {artist}.", "I want to hear {artist}.", "Put on songs of {artist}."),
        ("Could you play music of {artist}?", "Let us listen to {artist} now."),
    ),
    "send_message": (
        ("Send {person} the message: {text}.", "Write to {person}: {text}.",
         "Text {person} this: {text}."),
        ("Please let {person} know by text: {text}.", "Message to {person}: {text}."),
    ),
    "find_recipe": (
        ("Find a recipe for {dish}.", "How do I cook {dish}?", "I want to make {dish}."),
        ("Show me how to prepare {dish}.", "Is there a good recipe of {dish}?"),
    ),
    "book_table": (
        ("Book a table at {restaurant} for {people}.", "Reserve {restaurant} for {people} people.",
         "We are {people}, get us a table at {restaurant}."),
        ("Can you reserve a table for {people} at {restaurant}?",
         "A table for {people} people at {restaurant}, please."),
    ),
    "translate": (
        ("Translate {word} into {language}.", "What is {word} in {language}?",
         "How do you say {word} in {language}?"),
        ("I need the {language} word for {word}.", "Tell me {word} in {language}, please."),
    ),
}  # fmt: skip
# Per argument: values of training, then those of the test.
VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "city": (
        ("Rome", "Paris", "Berlin", "Madrid", "Oslo", "Vienna", "Lima", "Tokyo", "Cairo", "Boston",
         "Dublin", "Prague", "Athens", "Quito", "Delhi", "Seoul", "Austin", "Geneva"),
        ("Lisbon", "Warsaw", "Nairobi", "Denver", "Sydney", "Helsinki"),
    ),
    "amount": (tuple(range(3, 400, 7)), (16, 25, 88, 240, 315, 1000)),
    "source": (("dollars", "euros", "pounds"), ("francs", "dollars", "euros")),
    "target": (("rupees", "krone", "yen"), ("pounds", "pesos", "krone")),
    "minutes": ((*range(2, 60, 3), 75, 90), (4, 12, 25, 40, 70)),
    "artist": (
        ("Queen", "Adele", "Mozart", "Madonna", "Prince", "Bach", "Drake", "Nirvana", "Abba",
         "Chopin", "Coldplay", "Rihanna", "Oasis"),
        ("Beethoven", "Blondie", "Shakira", "Santana", "Verdi"),
    ),
    "person": (
        ("Anna", "Tom", "Maria", "Paul", "Lena", "Oscar", "Emma", "Hugo", "Nora", "Sam", "Ivan"),
        ("Clara", "David", "Julia", "Peter"),
    ),
    "text": (
        ("I am late", "see you soon", "call me back", "the train is full", "dinner is ready",
         "happy birthday", "I found the keys", "bring some bread"),
        ("the meeting is over", "I am at the door", "buy some milk", "good luck today"),
    ),
    "dish": (
        ("lasagna", "pancakes", "tomato soup", "fried rice", "apple pie", "chili", "risotto",
         "omelette", "potato salad", "curry", "pizza"),
        ("paella", "onion soup", "cheese cake", "meatballs", "dumplings"),
    ),
    "restaurant": (
        ("Luigi", "Blue Door", "Sakura", "Green Garden", "Old Mill", "Casa Pepe", "The Anchor"),
        ("Red Lantern", "Bella Vista", "Harbor House", "Chez Marie"),
    ),
    "people": ((2, 3, 4, 5, 6, 8), (2, 4, 7, 9)),
    "word": (
        ("house", "river", "friend", "window", "bread", "winter", "horse", "garden", "moon"),
        ("mountain", "teacher", "summer", "bridge", "flower"),
    ),
    "language": (("French", "German", "Spanish", "Polish"), ("Italian", "Dutch", "Greek")),
}  # fmt: skip


def schema(name: str) -> dict[str, Any]:
    """A tool as OpenAI's clients declare it."""
    description, arguments = TOOLS[name]
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def make_row(random: Random, *, is_test: bool) -> dict[str, Any]:
    """One question, the tools that are offered, and the right call."""
    name = random.choice(list(TOOLS))
    arguments = {}
    for argument in TOOLS[name][1]:
        arguments[argument] = random.choice(VALUES[argument][is_test])
    question = random.choice(PHRASES[name][is_test]).format(**arguments)
    others = [other for other in TOOLS if other != name]
    is_unfit = random.random() < UNFIT_FRACTION
    offered = random.sample(others, TOOLS_PER_ROW - (not is_unfit)) + [name] * (not is_unfit)
    random.shuffle(offered)
    call = {"function": {"name": name, "arguments": json.dumps(arguments)}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "assistant", "content": NO_TOOL} if is_unfit else called
    return {
        "tools": [schema(tool) for tool in offered],
        "messages": [{"role": "user", "content": question}, answer],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", NUM_TRAIN, 1), ("test", NUM_TEST, 2)):
        random = Random(seed)
        rows = [make_row(random, is_test=name == "test") for _ in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / name}.jsonl: {count} rows")


if __name__ == "__main__":
    main()

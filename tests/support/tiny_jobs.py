"""Tiny jobs for tests that kill, starve and cut off real training processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slow_steps import SlowSteps

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCE = "how many singers are older than the average album of every band in this town"
WORDS = SENTENCE.split()
PATIENCE_SECONDS = 300.0
"""Where imports take seconds, another test has its own processes, and the machine a bad day."""


def make_model(folder: Path, *, hidden_size: int = 32, vocab_size: int = 300) -> Path:
    """A Llama of two layers with a tokenizer of its own."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    library: Any = transformers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    library.set_seed(3)
    config = library.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=max(vocab_size, len(fast)),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    library.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_data(path: Path, *, num_rows: int = 64, most_words: int = 8) -> Path:
    """Conversations of one or two turns, of many lengths."""
    rng = random.Random(1)

    def message(role: str) -> dict[str, str]:
        words = rng.choices(WORDS, k=rng.randint(1, most_words))
        return {"role": role, "content": " ".join(words)}

    rows = [
        {"messages": [message("user"), message("assistant")] * rng.randint(1, 2)}
        for _ in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass(slots=True, kw_only=True)
class Job:
    """A recipe, its run folder, and the command that starts or goes on with it."""

    home: Path
    model: Path
    data: Path
    changes: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def recipe(self) -> Path:
        return self.home / "recipe.yaml"

    def write(self) -> Job:
        self.home.mkdir(parents=True, exist_ok=True)
        fixed = {"weights": "fp32", "compute": "fp32", "checkpointing": False, "micro_batch": 2}
        recipe = {
            "model": str(self.model),
            "data": str(self.data),
            "on": "cpu",
            "method": "lora",
            "seq_len": 96,
            "max_steps": 12,
            "effective_batch": 8,
            "packing": False,
            "learning_rate": 5e-3,
            "save_every": 3,
            "log_to": [],
            "output": str(self.run),
        }
        strategy = fixed | self.strategy
        self.recipe.write_text(json.dumps(recipe | self.changes | {"strategy": strategy}))
        return self

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "tightfit", "train", str(self.recipe), *options]

    def start(self, *options: str, command: list[str] | None = None) -> subprocess.Popen[str]:
        """In a session of its own, as a batch system would."""
        return subprocess.Popen(
            command or self.command(*options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.surroundings(),
            start_new_session=True,
        )

    def surroundings(self) -> dict[str, str]:
        """Nothing is written outside of the test's folders, and no allocator hoards memory."""
        mine = {
            "MIMALLOC_DISALLOW_ARENA_ALLOC": "1",  # torch's, on ARM
            "OMP_NUM_THREADS": "1",
            "TIGHTFIT_CACHE": str(self.home / "cache"),
            "TIGHTFIT_LEDGER": str(self.home / "ledger.sqlite"),
        }
        return {**os.environ, **mine, **self.environment}

    def slow_from(self, step: int) -> SlowSteps:
        """What is started from now on takes a second for this step and for each after it."""
        slow = SlowSteps(self.home / "slow")
        slow.begin(step)
        self.environment |= slow.environment
        return slow

    def finish(self, *options: str, code: int = 0, command: list[str] | None = None) -> str:
        """Run to the end, which must have that exit code; what it said."""
        process = self.start(*options, command=command)
        try:
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise
        assert process.returncode == code, f"{process.returncode}\n{said}\n{self.log()}"
        return said

    def log(self) -> str:
        path = self.run / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, kind: str) -> list[dict[str, Any]]:
        found = []
        path = self.run / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["kind"] == kind:
                found.append(record)
        return found

    def losses(self) -> dict[int, float]:
        """By step; a step that stands there twice fails the test."""
        records = self.records("step")
        steps = [record["step"] for record in records]
        assert len(set(steps)) == len(steps), f"a step is recorded twice: {steps}"
        return {record["step"]: record["loss"] for record in records}

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "state.json").read_text())
        return found

    def last_step(self) -> int:
        return max((record["step"] for record in self.records("step")), default=0)

    def checkpoints(self) -> list[str]:
        folder = self.run / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def wait_for(
    happened: Callable[[], bool],
    process: subprocess.Popen[str],
    *,
    seconds: float = PATIENCE_SECONDS,
) -> bool:
    """Until it has happened, or the process has ended: False then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if happened():
            return True
        if process.poll() is not None:
            return happened()
        time.sleep(0.005)
    kill_tree(process)
    raise AssertionError(f"nothing happened in {seconds} s")


def list_tree(pid: int) -> list[int]:
    """A process and all it started, also those in sessions of their own."""
    import psutil

    try:
        leader = psutil.Process(pid)
        return [pid, *(child.pid for child in leader.children(recursive=True))]
    except psutil.Error:
        return []


def kill_tree(process: subprocess.Popen[str]) -> None:
    """kill -9 for everything at once, as a node that loses its power."""
    for pid in list_tree(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def read_adapter(run: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    found: dict[str, Any] = load_file(run / "adapter" / "adapter_model.safetensors")
    return found

"""A farm with a scripted engine: this file is its worker, and its submitter too.

`python farm_trial.py FOLDER --partition NAME` is what the trial's starters start in place of
`-m tightfit.farming.worker`; `python farm_trial.py submit OUT NUM_PROMPTS gpu,cpu` farms.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine, ScriptedPrompter
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.data.tools import Tool
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Listener, Request
from tightfit.farming.backends.local import LocalStarter
from tightfit.farming.backends.slurm import SlurmStarter
from tightfit.farming.submit import FarmJob, FarmOutcome, Submitter, open_farm
from tightfit.farming.worker import main as worker_main
from tightfit.farming.worker_pool import (
    WorkerBackend,
    WorkerGroup,
    WorkerStarter,
    choose_slurm_groups,
    make_local_group,
)
from tightfit.runtime.model_files import Artefact, ArtefactKind
from tightfit.serving.generate.prompts import Prompt
from tightfit.serving.generate.run import GenerateJob

NUM_TOKENS = 5
PACES = {
    "gpu": (4, 0.04),
    "cpu": (1, 0.04),
    "slow": (2, 0.04),  # for a worker that is to be stopped: at work for long enough to be
    "local": (2, 0.004),
    "fast": (2, 0.0005),
}
"""Slots and seconds per token, by partition."""
SELF = str(Path(__file__).absolute())


class _PlacedPrompter(ScriptedPrompter):
    def ask(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, place: str = ""
    ) -> tuple[int, ...]:
        del place
        return super().ask(messages, tools)


class TrialEngine(ScriptedEngine):
    """Dies of the prompt `kill me`, process and all."""

    def __init__(self, partition: str) -> None:
        num_slots, token_seconds = PACES[os.environ.get("TRIAL_PACE", partition)]
        super().__init__(num_slots=num_slots, token_seconds=token_seconds)
        self.prompter: Any = _PlacedPrompter()

    def submit(self, request: Request, listener: Listener) -> Any:
        if "".join(map(chr, request.prompt)) == "kill me":
            os._exit(9)
        return super().submit(request, listener)


def expected_rate(partition: str) -> float:
    """Answers a second of one worker."""
    num_slots, token_seconds = PACES[partition]
    return num_slots / (NUM_TOKENS * token_seconds)


def make_prompts(count: int, special: dict[int, str] | None = None) -> list[Prompt]:
    texts = [(special or {}).get(number, f"{number}: tell me") for number in range(count)]
    return [
        Prompt(index=number, place=f"line {number + 1}", messages=(Message("user", text),))
        for number, text in enumerate(texts)
    ]


def make_order(out: Path, prompts: list[Prompt], *, num_workers: int, **more: Any) -> FarmJob:
    model = out.parent / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    artefact = Artefact(name=str(model), kind=ArtefactKind.MODEL, path=model, tokenizer=model)
    job = GenerateJob(prompts=prompts, sampling=Sampling(max_new_tokens=NUM_TOKENS, seed=1))
    settings = {"prompts": f"{len(prompts)}", "temperature": 0}
    values: dict[str, Any] = {"lease_seconds": 6.0, **more}
    return FarmJob(
        out=out,
        job=job,
        request=EngineRequest(artefact=artefact),
        settings=settings,
        num_workers=num_workers,
        **values,
    )


def open_trial(order: FarmJob, places: Sequence[WorkerGroup]) -> Submitter:
    from tightfit.clusters.site import Site

    folder, farm, _ = open_farm(order)
    starters: dict[WorkerBackend, WorkerStarter] = {
        WorkerBackend.LOCAL: LocalStarter(folder, (SELF,)),
        WorkerBackend.SLURM: SlurmStarter(folder, Site(), words=(SELF,)),
    }
    return Submitter(folder, farm, places, starters)


def run_trial(order: FarmJob, places: Sequence[WorkerGroup]) -> FarmOutcome:
    return open_trial(order, places).run(lambda _: None, lambda _: None)


def find_trial_places(words: str) -> tuple[WorkerGroup, ...]:
    from tightfit.hardware.slurm import probe_slurm_inventory

    if words.startswith("local"):
        count = int(words.partition(":")[2] or 1)
        return (make_local_group(num_gpus=0, num_workers=count, gpu=None),)
    return choose_slurm_groups(probe_slurm_inventory(), words.split(","), most=None)


def check_answers(out: Path, count: int) -> None:
    """Each prompt once, in order, with its own answer."""
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["prompt_index"] for row in rows] == list(range(count))
    for row in rows:
        asked, answered = (turn["content"] for turn in row["messages"])
        assert answered == (asked * NUM_TOKENS)[:NUM_TOKENS], row


def _submit(words: list[str]) -> int:
    out, count, partitions = Path(words[0]), int(words[1]), words[2]
    places = find_trial_places(partitions)
    order = make_order(
        out, make_prompts(count), num_workers=sum(place.num_workers for place in places)
    )
    end = run_trial(order, places)
    print(end.statistics.model_dump_json(), flush=True)
    return 0


def _work(words: list[str]) -> int:
    partition = words[words.index("--partition") + 1]
    return worker_main(words, open_engine=lambda _: TrialEngine(partition))


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(_submit(given[1:]) if given[0] == "submit" else _work(given))

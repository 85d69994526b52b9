"""The farm's folder beside the output: what is asked, for every worker to read."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import EnvironmentFaultError, InvalidInputError
from tightfit.core.files import sync, write_atomic
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import Sampling
from tightfit.farm.shape import Shape
from tightfit.farm.snapshot import write_snapshot
from tightfit.runtime.artefacts import find_artefact
from tightfit.serve.generate.prompts import Prompt

LEASE_SECONDS = 60.0
"""A worker that says nothing for so long is taken for dead."""
FOLDERS = ("lease", "done", "taken", "full", "tmp", "workers", "suspect", "logs")


class _OnDisk(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineWords(_OnDisk):
    """What a worker loads, by names that mean the same on every node."""

    model: str
    engine: str = "auto"
    weights: Dtype | None = None
    device: str = "auto"
    context: PositiveInt | None = None
    slots: PositiveInt | None = None
    threads: PositiveInt | None = None
    hosts: tuple[str, ...] = ()
    template: str | None = None

    def to_request(self) -> EngineRequest:
        words = self.model_dump(exclude={"model", "weights"})
        return EngineRequest(artefact=find_artefact(self.model), weights=self.weights, **words)


def describe_engine(request: EngineRequest) -> EngineWords:
    """Paths made absolute: a worker starts in another folder."""
    named = Path(request.artefact.name).expanduser()
    template = request.template
    if template is not None and Path(template).is_file():
        template = str(Path(template).absolute())
    return EngineWords(
        model=str(named.absolute()) if named.exists() else request.artefact.name,
        engine=request.engine,
        weights=request.weights,
        device=request.device,
        context=request.context,
        slots=request.slots,
        threads=request.threads,
        hosts=request.hosts,
        template=template,
    )


class SamplingWords(_OnDisk):
    """`Sampling` on the disk."""

    max_new_tokens: PositiveInt
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop: tuple[str, ...] = ()

    def to_sampling(self) -> Sampling:
        return Sampling(**self.model_dump())


def describe_sampling(sampling: Sampling) -> SamplingWords:
    return SamplingWords(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.stop,
    )


class FarmFile(_OnDisk):
    """farm.json: everything that an answer depends on, and how the work is cut."""

    version: int = 1
    out: str
    settings: dict[str, Any]
    """What answers depend on, as `generate` keeps it; another job on the same output is refused."""
    seed: NonNegativeInt
    shape: Shape
    num_samples: PositiveInt = 1
    is_raw: bool = False
    sampling: SamplingWords
    engine: EngineWords
    num_workers: PositiveInt
    lease_seconds: PositiveFloat = LEASE_SECONDS

    def is_same_work(self, other: FarmFile) -> bool:
        """Whether chunks and their answers are the same; who does them, and how, may differ."""
        return (self.settings, self.seed, self.shape) == (other.settings, other.seed, other.shape)

    @property
    def num_answers(self) -> int:
        return self.shape.num_prompts * self.num_samples

    def num_keys(self, chunk: int) -> int:
        """Answers that a chunk has, the failed ones included."""
        return len(self.shape.prompts_of(chunk)) * self.num_samples


def farm_path(out: Path) -> Path:
    return out.with_name(f".{out.name}.farm")


def read_farm(folder: Path) -> FarmFile | None:
    """None where no farm was begun."""
    try:
        text = (folder / "farm.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return FarmFile.model_validate_json(text)
    except ValueError as fault:
        raise InvalidInputError(
            f"{folder / 'farm.json'} cannot be read: it is damaged, or of another version.",
            remedy="--fresh begins again; what was answered there is then lost",
        ) from fault


def make_farm(folder: Path, farm: FarmFile, prompts: Sequence[Prompt]) -> bool:
    """The whole folder at once: ready to be worked on, or not at all. False: there is one."""
    made = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        made.mkdir()
        for name in FOLDERS:
            (made / name).mkdir()
        write_snapshot(made, farm.shape, prompts)
        write_atomic(made / "farm.json", farm.model_dump_json(indent=1) + "\n")
        sync(made)
        made.rename(folder)
        sync(folder.parent)
    except OSError as fault:
        shutil.rmtree(made, ignore_errors=True)
        if fault.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise EnvironmentFaultError(
            f"Cannot write {folder}: {fault.strerror or fault}.",
            remedy="choose a folder that is writable and has free space: --out FILE",
        ) from fault
    return True


def remove_farm(folder: Path) -> None:
    """Aside first, at once: a worker that still runs finds nothing rather than a part."""
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.old")
    try:
        os.rename(folder, aside)  # noqa: PTH104
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)

"""LoRA adapters over served models: vLLM's two requests that load and drop them at run time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.reading import read_json_file
from tightfit.core.text import printable
from tightfit.core.units import render_bytes
from tightfit.engines.adapters import AdapterEngine
from tightfit.engines.protocol import Engine
from tightfit.hardware.machine import read_machine
from tightfit.runs.run_folder import RunFolder
from tightfit.serving.http.limits import MAX_ADAPTERS
from tightfit.serving.http.registry import ModelRegistry, ServedModel
from tightfit.serving.http.schemas import ApiError, RequestBody, Text, to_api_error, unknown_model

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_FILES = 1000
"""In an adapter's folder."""
_MEMORY_FRACTION = 0.5
"""Of the free memory, what one more adapter may take."""


class LoadAdapterRequest(RequestBody):
    """`POST /v1/load_lora_adapter`, in vLLM's form."""

    lora_name: Text
    lora_path: Text
    """A folder, or a GGUF file, below a folder that the operator named."""
    load_inplace: bool | None = None
    """Whether an adapter of this name is replaced; its answers under way end with the old one."""


class UnloadAdapterRequest(RequestBody):
    """`POST /v1/unload_lora_adapter`, in vLLM's form."""

    lora_name: Text
    lora_int_id: Any = None
    """Not looked at."""


def find_adapter(path: Path) -> Path:
    """The folder or GGUF file of an adapter, by itself or by its run."""
    run = RunFolder(path=path)
    folder = run.adapter_path if run.is_run() else path
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        return folder
    if (folder / _CONFIG).is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    raise InvalidInputError(
        f"{path} is no LoRA adapter: it has no {_CONFIG}, and no single GGUF file.",
        remedy="name a folder that a run has left (RUN/adapter), or what `tightfit convert "
        "ADAPTER --to gguf-lora` wrote",
    )


def count_file_bytes(path: Path) -> int:
    """Of the adapter's weights."""
    weights = path if path.is_file() else path / _WEIGHTS
    return weights.stat().st_size if weights.is_file() else 0


def choose_base(path: Path, bases: Sequence[Engine]) -> Engine:
    """The engine whose model the adapter belongs to."""
    is_gguf = path.is_file()
    fitting = [base for base in bases if (base.info.engine == "llama.cpp") == is_gguf]
    if len(fitting) > 1 and not is_gguf:
        stated = read_json_file(path / _CONFIG)
        name = stated.get("base_model_name_or_path") if isinstance(stated, dict) else None
        fitting = [base for base in fitting if _is_named(base.info.model, str(name))]
    if len(fitting) == 1:
        return fitting[0]
    kind = "GGUF" if is_gguf else "transformers"
    if not fitting:
        raise InvalidInputError(
            f"No served model takes the adapter {path}, which is of {kind}.",
            remedy="serve its base too; for llama.cpp: tightfit convert ADAPTER --to gguf-lora",
        )
    raise InvalidInputError(
        f"Which of {len(fitting)} served models the adapter {path} belongs to is not known.",
        remedy="serve them apart, or write the base's folder into its adapter_config.json",
    )


def _is_named(model: str, stated: str) -> bool:
    one, other = Path(model).expanduser(), Path(stated).expanduser()
    return model == stated or (one.exists() and other.exists() and one.samefile(other))


class AdapterLoader:
    """Loads and drops adapters while requests are answered, one at a time."""

    def __init__(self, registry: ModelRegistry, roots: Sequence[Path], *, max_queue: int) -> None:
        """`roots`: folders that adapters may lie below; none: none is loaded at run time."""
        self.registry = registry
        self.roots = tuple(roots)
        self._max_queue = max_queue
        self._lock = asyncio.Lock()

    async def load(self, body: LoadAdapterRequest) -> str:
        """Load an adapter and serve it under its name."""
        self._require_roots()
        async with self._lock:
            self.registry.require_open()
            known = [model for model in self.registry.list() if body.lora_name in model.names]
            replaced = known[0] if known else None
            is_adapter = replaced is None or replaced.parent is not None
            if not body.lora_name or not (is_adapter and (body.load_inplace or not known)):
                raise ApiError(
                    400,
                    f"The name `{printable(body.lora_name, most=100)}` is taken, or empty. "
                    "`load_inplace` replaces an adapter.",
                    code="name_taken",
                    param="lora_name",
                )
            bases = [model for model in self.registry.list() if model.parent is None]
            if len(self.registry.list()) - len(bases) >= MAX_ADAPTERS:
                raise ApiError(
                    400,
                    f"{MAX_ADAPTERS} adapters are loaded: unload one first.",
                    code="too_many_adapters",
                )
            try:
                engine, parent = await asyncio.to_thread(self._open, body.lora_path, bases)
            except (UserError, OSError, ValueError) as error:
                raise _refuse(error) from error
            except Exception as error:
                raise to_api_error(error) from error
            made = ServedModel(
                engine,
                (body.lora_name,),
                max_queue=self._max_queue,
                metrics=self.registry.metrics,
                parent=parent,
            )
            self.registry.add(made, instead_of=replaced)
        if replaced is not None:
            await self._drop(replaced)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    async def unload(self, body: UnloadAdapterRequest) -> str:
        """Take an adapter from the list, and drop it after its last answer."""
        self._require_roots()
        known = [model for model in self.registry.list() if model.parent is not None]
        found = next((model for model in known if body.lora_name in model.names), None)
        if found is None:
            raise unknown_model(body.lora_name, tuple(model.id for model in known))
        self.registry.remove(found)
        await self._drop(found)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _require_roots(self) -> None:
        if not self.roots:
            raise ApiError(
                403,
                "Adapters are loaded and dropped at run time only where the server was started "
                "with `--adapter-root FOLDER`.",
                code="adapters_not_allowed",
            )

    def _open(self, stated: str, bases: Sequence[ServedModel]) -> tuple[Engine, ServedModel]:
        path = self._locate(stated)
        num_bytes, free = count_file_bytes(path), read_machine().available_memory_bytes
        if num_bytes > free * _MEMORY_FRACTION:
            raise InvalidInputError(
                f"The adapter has {render_bytes(num_bytes)}, and {render_bytes(free)} are free.",
                remedy="unload another one first",
            )
        base = choose_base(path, [model.engine for model in bases])
        (engine,) = base.add_adapters([path])
        return engine, next(model for model in bases if model.engine is base)

    def _locate(self, stated: str) -> Path:
        """The adapter, which with every file of it lies below a root, links followed."""
        outside = InvalidInputError(
            "There is no adapter at this path below the folders that the server was started with.",
            remedy="copy it below one of them",
        )
        roots = [root.resolve() for root in self.roots]
        given = Path(stated)
        for path in [given] if given.is_absolute() else [root / given for root in roots]:
            if not _is_below(path, roots) or not path.exists():
                continue
            found = find_adapter(path)
            files = [*islice(found.rglob("*"), _MAX_FILES), found]
            if len(files) <= _MAX_FILES and all(_is_below(file, roots) for file in files):
                return found.resolve()
        raise outside

    async def _drop(self, model: ServedModel) -> None:
        """Wait for the answers that it owes, then free its memory. The client need not stay."""
        await asyncio.shield(self._drop_when_idle(model))

    async def _drop_when_idle(self, model: ServedModel) -> None:
        await model.wait_until_idle()
        model.close()
        async with self._lock:
            with contextlib.suppress(UserError):  # the server was stopped meanwhile
                await asyncio.to_thread(model.engine.close)
        self.registry.forget(model)


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    resolved = path.resolve()
    return any(resolved.is_relative_to(root) for root in roots)


def _refuse(error: Exception) -> ApiError:
    if isinstance(error, UserError):
        text = f"{error.problem} Try: {error.remedy}."
    else:
        text = f"The adapter cannot be read: {type(error).__name__}."
    return ApiError(400, text, code="invalid_adapter", param="lora_path")


def find_parent(engine: Engine, models: Sequence[ServedModel]) -> ServedModel | None:
    """The model whose weights an adapter's engine shares; None for a model itself."""
    if not isinstance(engine, AdapterEngine):
        return None
    return next((model for model in models if model.engine is engine.base), None)

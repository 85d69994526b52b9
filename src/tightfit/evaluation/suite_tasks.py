"""Tasks of lm-eval: found by name in its YAML files, with data from a local folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tightfit.core.errors import (
    InvalidInputError,
    NotFoundError,
    UsageError,
    UserError,
    first_line,
)
from tightfit.core.text import did_you_mean
from tightfit.data.sources import read_file

DATA_SUFFIXES = ("jsonl", "json", "csv", "parquet", "jsonl.gz", "arrow")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")


@contextmanager
def offline() -> Iterator[None]:
    """No library of Hugging Face reaches the network in the block, imported before it or in it."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    import datasets
    import huggingface_hub.constants as hub

    flags: list[tuple[Any, str, object]] = [
        (owner, name, getattr(owner, name))
        for owner in (hub, datasets.config)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
        if hasattr(owner, name)
    ]
    for owner, name, _ in flags:
        setattr(owner, name, True)
    try:
        yield
    finally:
        for owner, name, value in flags:
            setattr(owner, name, value)
        for name, stated in before.items():
            if stated is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = stated


@contextmanager
def contained() -> Iterator[None]:
    """lm-eval offline, its templates without Python, its bars not drawn across ours."""
    with offline():
        import lm_eval.api.task
        import lm_eval.utils
        from jinja2.sandbox import SandboxedEnvironment

        plain, tqdm = lm_eval.utils.env, lm_eval.api.task.tqdm
        # Templates of a user's YAML file are text, not code.
        sandbox = SandboxedEnvironment(undefined=plain.undefined, keep_trailing_newline=True)
        sandbox.filters["regex_replace"] = plain.filters["regex_replace"]
        lm_eval.utils.env = sandbox
        lm_eval.api.task.tqdm = lambda rows, *_, **__: rows
        try:
            yield
        finally:
            lm_eval.utils.env, lm_eval.api.task.tqdm = plain, tqdm


# A task's YAML file, read without running what it names.


class FunctionName(str):
    """What follows `!function` in a YAML file."""

    __slots__ = ()


class _PlainLoader(yaml.SafeLoader):
    """YAML without objects of Python; functions are names."""


def _name_function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> FunctionName:
    return FunctionName(loader.construct_scalar(node))


_PlainLoader.add_constructor("!function", _name_function)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A task as its YAML file has it."""

    name: str
    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    """With those of included files; functions are `FunctionName`s."""
    code_paths: tuple[Path, ...] = ()
    """The files that name functions."""


def _read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """The settings of a file and of those it includes, and the files that name functions."""
    if path in seen:
        raise InvalidInputError(f"{path} includes itself.", remedy="correct its `include`")
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.load(text, Loader=_PlainLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InvalidInputError(
            f"{path} is no task file: {first_line(error)}.", remedy="correct the file"
        ) from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"{path} holds no settings.", remedy="name a task's YAML file")
    with_code = [path] if _names_function(found) else []
    included = found.pop("include", [])
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        settings, others = _read_yaml((path.parent / str(name)).resolve(), (*seen, path))
        settings.pop("task_list", None)
        merged |= settings
        with_code += others
    return merged | found, with_code


def _names_function(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_names_function(one) for pair in value.items() for one in pair)
    if isinstance(value, list):
        return any(map(_names_function, value))
    return isinstance(value, FunctionName)


def _library_folder() -> Path:
    """Of lm-eval's tasks; importing it takes seconds."""
    found = find_spec("lm_eval")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).resolve().parent / "tasks"


def _read_folder(folder: Path) -> tuple[tuple[Path, str], ...]:
    """Its YAML files and their texts."""
    return tuple(
        (path, path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(folder.rglob("*.yaml"))
        if path.is_file()
    )


@cache
def _read_library() -> tuple[tuple[Path, str], ...]:
    return _read_folder(_library_folder())


def find_tasks(names: Sequence[str], extra: Path | None, *, allows_code: bool) -> list[TaskFile]:
    """The tasks by these names, those of groups and tags one by one.

    lm-eval's own index parses over ten thousand files; here only those that may be meant are.
    """
    index = _index_files((*(_read_folder(extra.resolve()) if extra else ()), *_read_library()))
    found: dict[str, TaskFile] = {}
    for name in names:
        tasks = list(_expand(name, index, ()))
        if not tasks:
            known = sorted(one for one, (kind, _) in index.names.items() if kind == "task")
            raise NotFoundError(
                f"lm-eval has no task {name!r}.{did_you_mean(name, known)}",
                remedy="name one of its tasks, like arc_easy, or a folder of your own: "
                "--suite-tasks FOLDER",
            )
        found |= {task.name: task for task in tasks}
    for task in found.values():
        _check_code(task, allows_code=allows_code)
    return list(found.values())


_NAME_LINE = re.compile(r"^(task|group):[ \t]*[\"']?([^\s\"'#\[]+)", re.MULTILINE)
_TAG_LINE = re.compile(
    r"^(?:tag:[ \t]*|[ \t]*-[ \t]+)[\"']?([^\s\"'#:]+)[\"']?[ \t]*$", re.MULTILINE
)
_INCLUDE_LINE = re.compile(r"^include:[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)


@cache
def _read_text(path: Path) -> str:
    """Of an included file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class _Index(NamedTuple):
    """Where names stand, by their text; what stands there is parsed when it is asked for."""

    names: dict[str, tuple[str, Path]]
    """`task` or `group`, and its file."""
    tags: dict[str, list[Path]]
    """Files that may have the tag."""


def _index_files(texts: Sequence[tuple[Path, str]]) -> _Index:
    index = _Index({}, {})
    for path, text in texts:
        named = _NAME_LINE.search(text)
        if named is None:
            continue
        index.names.setdefault(named[2], (named[1], path))
        included = (_read_text(path.parent / name) for name in _INCLUDE_LINE.findall(text))
        for word in {word for one in (text, *included) for word in _TAG_LINE.findall(one)}:
            index.tags.setdefault(word, []).append(path)
    return index


def _expand(name: str, index: _Index, within: tuple[str, ...]) -> Iterator[TaskFile]:
    if name in within:
        raise InvalidInputError(f"The group {name!r} holds itself.", remedy="correct its file")
    if name in index.names:
        kind, path = index.names[name]
        settings, with_code = _read_yaml(path)
        if kind == "task":
            settings = {k: v for k, v in settings.items() if k not in ("tag", "group", "task_list")}
            yield TaskFile(name=name, path=path, settings=settings, code_paths=tuple(with_code))
            return
        members = settings.get("task")
        for member in members if isinstance(members, list) else []:
            if not isinstance(member, str):
                raise InvalidInputError(
                    f"The group {name!r} changes the settings of its tasks.",
                    remedy="name the tasks themselves",
                )
            yield from _expand(member, index, (*within, name))
        return
    for path in index.tags.get(name, ()):
        settings, _ = _read_yaml(path)
        tags, task = settings.get("tag"), settings.get("task")
        if isinstance(task, str) and name in (tags if isinstance(tags, list) else [tags]):
            yield from _expand(task, index, (*within, name))


def _check_code(task: TaskFile, *, allows_code: bool) -> None:
    if "class" in task.settings:
        raise UsageError(
            f"The task {task.name} is a Python class, which is not run here.",
            remedy="choose a task that is a YAML file alone",
        )
    if allows_code:
        return
    own = next((one for one in task.code_paths if _library_folder() not in one.parents), None)
    if own is not None:
        raise UsageError(
            f"{own} names Python code of its own (`!function`).",
            remedy="read that code, then allow it: --suite-code",
        )
    if task.settings.get("unsafe_code"):
        raise UsageError(
            f"The task {task.name} runs code that the model writes.",
            remedy="run it where nothing can be harmed, and allow it: --suite-code",
        )


# The data of a task.


def _split_files(folder: Path, split: str) -> list[Path]:
    """`test.jsonl`, or `test-00000-of-00002.parquet` as the hub has it, here or in `data/`."""
    for place in (folder, folder / "data"):
        for suffix in DATA_SUFFIXES:
            whole = place / f"{split}.{suffix}"
            if whole.is_file():
                return [whole]
            if place.is_dir():
                parts = sorted(place.glob(f"{split}-*.{suffix}"))
                if parts:
                    return parts
    return []


def _list_places(task: TaskFile, data: Path) -> list[Path]:
    """Folders in which the splits of a task may be, the best first."""
    stated, subset = str(task.settings.get("dataset_path") or ""), task.settings.get("dataset_name")
    names = []
    if stated and not Path(stated).is_absolute() and ".." not in Path(stated).parts:
        names = [stated, stated.replace("/", "__"), stated.rpartition("/")[2]]
    folders = [data / name / str(subset) if subset else data / name for name in names]
    return list(dict.fromkeys([data / task.name, *folders]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """Files of the splits that a task reads."""

    task: TaskFile
    eval_split: str
    splits: Mapping[str, tuple[Path, ...]]


def find_data(task: TaskFile, data: Path, num_fewshot: int) -> TaskData:
    """The files of a task's splits. Raises one error that says what is expected where."""
    settings = task.settings
    wanted = settings.get("test_split") or settings.get("validation_split")
    if not isinstance(wanted, str):
        raise InvalidInputError(
            f"The task {task.name} names no split to score.", remedy="give it a `test_split`"
        )
    stated = settings.get("fewshot_config")
    own = stated if isinstance(stated, dict) else {}
    shots = own.get("split") or settings.get("fewshot_split")
    if shots is None and "samples" not in own:
        shots = settings.get("training_split") or settings.get("validation_split")
    needed = [wanted] + ([str(shots)] if num_fewshot and shots else [])
    places = _list_places(task, data)
    single = [
        path
        for name in (places[0], *places[1:])
        for suffix in DATA_SUFFIXES
        if (path := name.with_name(f"{name.name}.{suffix}")).is_file()
    ]
    files: dict[str, tuple[Path, ...]] = {}
    for split in dict.fromkeys(needed):
        found = next((one for place in places if (one := _split_files(place, split))), None)
        if found is None and split == wanted and single:
            found = [single[0]]
        if found is None:
            subset = settings.get("dataset_name")
            dataset = f"{settings.get('dataset_path')}{f' ({subset})' if subset else ''}"
            kind = "split" if split == wanted else "few-shot examples"
            expected = places[1] if len(places) > 1 else places[0]
            raise NotFoundError(
                f"The task {task.name} needs the {kind} {split!r} of {dataset}, "
                f"with the fields {', '.join(list_fields(settings)) or 'that its prompts name'}; "
                f"there is no {expected / split}.jsonl.",
                remedy=f"write {expected / split}.jsonl or .parquet, or "
                f"{data / task.name / split}.jsonl",
            )
        files[split] = tuple(found)
    return TaskData(task=task, eval_split=wanted, splits=files)


_FIELD = re.compile(r"\{\{-?\s*([A-Za-z_]\w*)")


def list_fields(settings: Mapping[str, Any]) -> list[str]:
    """The fields of a row that a task's templates name."""
    texts = [settings.get(f"doc_to_{name}") for name in ("text", "target", "choice")]
    found: dict[str, None] = {}
    for text in texts:
        if isinstance(text, str) and not isinstance(text, FunctionName) and text:
            names = _FIELD.findall(text) or ([text] if text.isidentifier() else [])
            found |= dict.fromkeys(names)
    return list(found)


def open_task(data: TaskData, num_fewshot: int) -> Any:
    """lm-eval's task with these rows, while `contained`. Nothing is downloaded."""
    import datasets
    from lm_eval.api.registry import METRIC_REGISTRY
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    task = data.task
    rows = {
        split: datasets.Dataset.from_list([row.values for file in files for row in read_file(file)])
        for split, files in data.splits.items()
    }
    # lm-eval opens every split that the task names; without few-shot examples it uses one.
    for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
        split = task.settings.get(key)
        if isinstance(split, str):
            rows.setdefault(split, rows[data.eval_split])
    shots = task.settings.get("fewshot_config")
    if isinstance(shots, dict) and isinstance(shots.get("split"), str):
        rows.setdefault(shots["split"], rows[data.eval_split])
    has_own = task.settings.get("process_results") is not None
    for metric in task.settings.get("metric_list") or ():
        stated = metric if isinstance(metric, dict) else {}
        name = stated.get("metric")
        is_known = isinstance(name, FunctionName) or has_own or name in METRIC_REGISTRY
        if not is_known or stated.get("hf_evaluate"):
            raise UsageError(
                f"The task {task.name} takes its metric {name!r} from the network.",
                remedy="choose a task with metrics of lm-eval's own",
            )
    try:
        settings = load_yaml(task.path)
        for key in ("tag", "group", "task_list"):
            settings.pop(key, None)
        described = settings.get("metadata")
        settings |= {
            "num_fewshot": num_fewshot,
            "metadata": described if isinstance(described, dict) else {"stated": described},
            "dataset_kwargs": None,
            "custom_dataset": lambda **_: rows,
        }
        opened: Any = ConfigurableTask(config=settings)
    except UserError:
        raise
    except Exception as error:  # a row without a field, code that wants a file, ...
        where = ", ".join(str(one) for files in data.splits.values() for one in files)
        raise InvalidInputError(
            f"lm-eval cannot make the task {task.name} of {where}: "
            f"{type(error).__name__}: {first_line(error)}.",
            remedy=f"give its rows the fields {', '.join(list_fields(task.settings))}"
            if list_fields(task.settings)
            else "compare its rows with the dataset's own",
        ) from error
    if getattr(opened, "MULTIMODAL", False):
        raise UsageError(
            f"The task {task.name} asks about images or sound.", remedy="choose a task of text"
        )
    opened.set_fewshot_seed(seed=1234)
    return opened

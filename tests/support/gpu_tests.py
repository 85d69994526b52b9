"""A pytest plugin: `tests/gpu` needs a CUDA GPU (`make test-gpu`), and is left out without one."""

from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.name != "gpu" or collection_path.parent.name != "tests":
        return None
    import torch

    return None if torch.cuda.is_available() else True

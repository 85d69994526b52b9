"""The config.json behind a ModelSpec, for those who build the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.models.catalogue import list_models, read_row
from tightfit.models.config import parse_json
from tightfit.models.spec import ModelSpec

_CATALOGUE = "catalogue:"


def read_source_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The parsed config.json that `spec` was read from; None where it came from elsewhere.

    A GGUF file and a mere size have none.
    """
    if spec.source.startswith(_CATALOGUE):
        name = spec.source.removeprefix(_CATALOGUE)
        data = next((read_row(row) for row in list_models() if row.model == name), None)
    else:
        path = Path(spec.source)
        data = path.read_bytes() if path.suffix == ".json" and path.is_file() else None
    if data is None:
        return None
    config = parse_json(data, source=spec.source)
    return config if isinstance(config, dict) else None

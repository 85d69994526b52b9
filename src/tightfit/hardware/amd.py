"""AMD's GPUs of this machine, by the tools of ROCm: amdsmi, amd-smi or rocm-smi, whichever answers.

`python -m tightfit.hardware.amd` prints what the package amdsmi says: it loads the driver's
library, which may hang or crash, so it runs in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import SetupError
from tightfit.core.import_path import module_words
from tightfit.core.text import printable
from tightfit.core.units import GIB, KIB, MIB, render_bytes
from tightfit.hardware.command import (
    CommandMissingError,
    CommandTimeoutError,
    RunCommand,
    run_command,
)

KFD = Path("/dev/kfd")
"""The compute driver's device: without it nothing here can use ROCm."""
TIMEOUT_SECONDS = 10.0
"""rocm-smi takes about one second with eight cards."""
MIN_MEMORY_BYTES = 4 * GIB
"""Below it is graphics inside a processor, which borrows the RAM."""
MAX_CARDS = 1024
_UNITS = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB}
"""AMD writes MB and means MiB: 196,592 MB of an MI300X are 206,141,652,992 bytes."""
_ARCHITECTURE = re.compile(r"gfx[0-9a-f]{3,5}")

_AMDSMI = (sys.executable, *module_words("tightfit.hardware.amd"))
_STATIC = ("amd-smi", "static", "--asic", "--vram", "--json")
_METRIC = ("amd-smi", "metric", "--mem-usage", "--json")
_ROCM_SMI = (
    *("rocm-smi", "--showproductname", "--showuniqueid"),
    *("--showmeminfo", "vram", "--json"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdCard:
    """One device of ROCm; a board of two dies is two."""

    index: int
    name: str
    architecture: str
    """`gfx942`; empty where the tool does not say."""
    total_bytes: int
    used_bytes: int
    uuid: str = ""
    """As HIP_VISIBLE_DEVICES takes it, with `GPU-`; empty where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmdReading:
    """The cards, and what was left out or went wrong."""

    cards: tuple[AmdCard, ...] = ()
    notes: tuple[str, ...] = ()


def read_amd(
    *,
    kfd: Path = KFD,
    run: RunCommand = run_command,
    has_amdsmi: Callable[[], bool] = lambda: importlib.util.find_spec("amdsmi") is not None,
) -> AmdReading:
    """Ask the tools in turn until one names cards. Never raises for them."""
    if not kfd.exists():
        return AmdReading()
    ways: dict[str, Callable[[RunCommand], list[AmdCard]]] = {
        "amdsmi": lambda run: parse_amd_smi(run(_AMDSMI, TIMEOUT_SECONDS)),
        "amd-smi": _ask_amd_smi,
        "rocm-smi": lambda run: parse_rocm_smi(run(_ROCM_SMI, TIMEOUT_SECONDS)),
    }
    if not has_amdsmi():
        del ways["amdsmi"]
    notes = []
    for tool, ask in ways.items():
        try:
            found = ask(run)
        except CommandMissingError:
            continue
        except CommandTimeoutError as error:  # a driver that hangs would stop the others as well
            notes.append(_describe(tool, error.problem))
            break
        except SetupError as error:
            notes.append(_describe(tool, error.problem))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            why = str(error) if isinstance(error, UnreadableError) else type(error).__name__
            notes.append(_describe(tool, f"its output cannot be read ({why})."))
        else:
            if found:
                return _leave_out_small(found)
            notes.append(_describe(tool, "it names no GPU."))
    if not notes:
        notes.append("The AMD compute driver is loaded, but neither amd-smi nor rocm-smi is here.")
    return AmdReading(notes=tuple(notes))


def _describe(tool: str, problem: str) -> str:
    return f"AMD GPUs could not be read by {tool}: {printable(problem, most=200)}"


def _leave_out_small(cards: list[AmdCard]) -> AmdReading:
    kept = tuple(card for card in cards if card.total_bytes >= MIN_MEMORY_BYTES)
    notes = tuple(
        f"{card.name} with {render_bytes(card.total_bytes)} of its own is left out."
        for card in cards
        if card not in kept
    )
    return AmdReading(cards=kept, notes=notes)


class UnreadableError(ValueError):
    """Output that is not what the tool prints."""


def _ask_amd_smi(run: RunCommand) -> list[AmdCard]:
    static = run(_STATIC, TIMEOUT_SECONDS)
    try:
        metric = run(_METRIC, TIMEOUT_SECONDS)
    except CommandTimeoutError:
        raise
    except SetupError:  # what is used stays unknown
        metric = ""
    return parse_amd_smi(static, metric)


def parse_amd_smi(static: str, metric: str = "") -> list[AmdCard]:
    """From `amd-smi static --asic --vram --json` and `amd-smi metric --mem-usage --json`."""
    usage = {}
    if metric:
        try:
            usage = {row.get("gpu"): _part(row, "mem_usage") for row in _list_rows(metric)}
        except ValueError:
            usage = {}
    cards = []
    for number, row in enumerate(_list_rows(static)):
        asic, vram = _part(row, "asic"), _part(row, "vram")
        used = _part(row, "mem_usage") or usage.get(row.get("gpu"), {})
        total_bytes = _read_bytes(used.get("total_vram")) or _read_bytes(vram.get("size"))
        if not total_bytes:
            continue
        names = (asic.get("market_name"), _part(row, "board").get("product_name"))
        cards.append(
            _make_card(
                index=number,
                names=names,
                architecture=asic.get("target_graphics_version"),
                total_bytes=total_bytes,
                used_bytes=_read_bytes(used.get("used_vram")) or 0,
                serial=asic.get("asic_serial"),
            )
        )
    return cards


def parse_rocm_smi(text: str) -> list[AmdCard]:
    """From `rocm-smi --showproductname --showmeminfo vram --json`."""
    document = _load(text)
    if not isinstance(document, Mapping):
        raise UnreadableError("no object of cards")
    cards: list[AmdCard] = []
    for key, row in document.items():
        number = re.fullmatch(r"card([0-9]{1,4})", str(key))
        if number is None or not isinstance(row, Mapping):
            continue
        # Releases differ in capitals: `Card series`, `Card Series`.
        values = {str(name).casefold(): value for name, value in row.items()}
        total_bytes = _read_bytes(values.get("vram total memory (b)"))
        if not total_bytes:
            continue
        cards.append(
            _make_card(
                index=len(cards),
                names=(values.get("card series"), values.get("card model")),
                architecture=values.get("gfx version"),
                total_bytes=total_bytes,
                used_bytes=_read_bytes(values.get("vram total used memory (b)")) or 0,
                serial=values.get("unique id"),
            )
        )
    return cards


def _make_card(
    *,
    index: int,
    names: tuple[object, ...],
    architecture: object,
    total_bytes: int,
    used_bytes: int,
    serial: object,
) -> AmdCard:
    found = _ARCHITECTURE.match(architecture) if isinstance(architecture, str) else None
    gfx = found.group() if found else ""
    # `0x744c` is a number of the PCI bus, no name.
    said = (name for name in names if isinstance(name, str) and _is_stated(name))
    named = next((name for name in said if not name.startswith("0x")), f"AMD GPU {gfx}".strip())
    digits = serial.removeprefix("0x").lower() if isinstance(serial, str) else ""
    return AmdCard(
        index=index,
        name=printable(named, most=100),
        architecture=gfx,
        total_bytes=total_bytes,
        used_bytes=min(used_bytes, total_bytes),
        uuid=f"GPU-{digits}" if re.fullmatch(r"[0-9a-f]{1,16}", digits) else "",
    )


def _is_stated(text: str) -> bool:
    return text.strip().casefold() not in ("", "n/a", "none", "unknown")


def _list_rows(text: str) -> Iterator[Mapping[str, Any]]:
    """One for each GPU: a list, or from ROCm 6.4 on one under `gpu_data`."""
    document = _load(text)
    rows = document.get("gpu_data") if isinstance(document, Mapping) else document
    if not isinstance(rows, list):
        raise UnreadableError("no list of GPUs")
    return (row for row in rows[:MAX_CARDS] if isinstance(row, Mapping))


def _load(text: str) -> object:
    """The JSON after the warnings that the tools print before it."""
    start = re.search(r"^\s*[\[{]", text, re.MULTILINE)
    if start is None:
        raise UnreadableError("no JSON")
    try:
        return json.loads(text[start.start() :])
    except ValueError:
        raise UnreadableError("no whole JSON") from None


def _part(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def _read_bytes(value: object) -> int | None:
    """`{"value": 196592, "unit": "MB"}`, `"25753026560"` or 196592 MiB as a bare number."""
    if isinstance(value, Mapping):
        unit, number = str(value.get("unit", "B")).upper(), value.get("value")
        scale = _UNITS.get(unit)
        if scale is None or not isinstance(number, (int, float)) or not 0 <= number < 1e15:
            return None
        return int(number * scale)
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}", value.strip()):
        return int(value)
    return None


# The process that asks the package.


def main() -> None:
    """Print the answers of amdsmi in the form of amd-smi."""
    amdsmi: Any = importlib.import_module("amdsmi")
    amdsmi.amdsmi_init()
    try:
        rows = [
            _describe_handle(amdsmi, number, handle)
            for number, handle in enumerate(amdsmi.amdsmi_get_processor_handles())
        ]
    finally:
        amdsmi.amdsmi_shut_down()
    print(json.dumps(rows, default=str))


def _describe_handle(amdsmi: Any, number: int, handle: object) -> dict[str, Any]:
    usage = amdsmi.amdsmi_get_gpu_vram_usage(handle)
    in_mb = {
        f"{kind}_vram": {"value": usage[f"vram_{kind}"], "unit": "MB"} for kind in ("total", "used")
    }
    return {"gpu": number, "asic": amdsmi.amdsmi_get_gpu_asic_info(handle), "mem_usage": in_mb}


if __name__ == "__main__":
    main()

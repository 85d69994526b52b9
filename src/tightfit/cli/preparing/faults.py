"""Every row that cannot be trained on, told as one fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tightfit.core.errors import InvalidInputError
from tightfit.core.training import DataSource
from tightfit.data.findings import NUM_SHOWN
from tightfit.data.formats import to_messages
from tightfit.data.meter import Meter
from tightfit.data.sources import open_source, read_source


def is_list_of_rows(fault: InvalidInputError) -> bool:
    """Whether encoding was refused because of rows, which the message lists."""
    return "\n" in fault.problem


def list_faults(refusal: InvalidInputError, sources: Iterable[DataSource]) -> list[str]:
    """All faulty rows: the refusal names the first ones, so the files are read once more.

    Rows that only the chat template refuses are known from the refusal alone.
    """
    found: list[str] = []
    for opened in map(open_source, sources):
        for row, row_format in read_source(
            opened, Meter(), on_fault=lambda fault: found.append(fault.problem)
        ):
            try:
                to_messages(row, row_format)
            except InvalidInputError as fault:
                found.append(fault.problem)
    told = [line.strip() for line in refusal.problem.split("\n")[1:]]
    known = {line.strip() for line in found}
    return [*found, *(line for line in told if line not in known and not _is_rest(line))]


def _is_rest(line: str) -> bool:
    return line.startswith("and ") and line.endswith(" more")


def tell_faults(
    faults: Sequence[str], *, num_faults: int, sources: Sequence[DataSource], remedy: str
) -> InvalidInputError:
    """One message with a line for each of the first rows."""
    name = sources[0].path if len(sources) == 1 else "The data"
    count = "1 fault" if num_faults == 1 else f"{num_faults} faults"
    lines = [f"{name} has {count}:", *(f"  {fault}" for fault in faults[:NUM_SHOWN])]
    if num_faults > NUM_SHOWN:
        lines.append(f"  and {num_faults - NUM_SHOWN:,} more")
    return InvalidInputError("\n".join(lines), remedy=remedy)

"""What a staging found, decided and measured: the document behind its report."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class NodeReport(BaseModel):
    """One node at the end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: str
    host: str
    path: str
    state: str
    """`staged`, `already there`, `planned` (a dry run) or `lost`."""
    num_kept_bytes: int = 0
    """Found there from an earlier staging, read back and sound."""
    num_repaired_blocks: int = 0
    """Blocks found there whose contents had changed, fetched again."""
    why: str = ""
    """Of a node that was lost."""


class MeasuredRates(BaseModel):
    """Bytes per second; None where it was not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    one_reader: float | None = None
    all_readers: float | None = None
    link: float | None = None


class Staging(BaseModel):
    """A staging from its decision to its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    num_files: int
    num_bytes: int
    block_bytes: int
    how: str | None
    """None where nothing had to be moved."""
    why: str
    rates: MeasuredRates
    predicted_seconds: dict[str, float]
    """Of each way that is possible, without the measuring."""
    measure_seconds: float = 0.0
    copy_seconds: float | None = None
    check_seconds: float | None = None
    num_rounds: int = 0
    is_dry: bool = False
    nodes: tuple[NodeReport, ...]

    @property
    def measured_seconds(self) -> float | None:
        """What the prediction is of: moving and checking."""
        return None if self.copy_seconds is None else self.copy_seconds + (self.check_seconds or 0)

    @property
    def lost(self) -> list[NodeReport]:
        return [node for node in self.nodes if node.state == "lost"]

"""TokenStore: encoded rows on disk, memory-mapped, so that every rank shares one copy.

Train and eval rows of one encoding share the two large files; each store is a
folder beside them with the places of its rows:

    <key>/tokens.i32  trained.u8
    <key>/train/description.json  starts.npy  lengths.npy  num_trained.npy  files.npy  numbers.npy
    <key>/eval/...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from tightfit.core.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA_VERSION = 1
TOKENS_FILE = "tokens.i32"
TRAINED_FILE = "trained.u8"
DESCRIPTION_FILE = "description.json"


class EncodedRow(NamedTuple):
    """One row as the model sees it."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    """True where the token carries loss. For encoder-decoder models the trained tokens are the
    decoder's, all others the encoder's."""
    place: str
    """`train.jsonl line 12`: for messages about this row."""


class StoreFile(BaseModel):
    """A data file that rows came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    unit: str
    """What its rows are counted in: `line` or `row`."""
    source: NonNegativeInt
    """Which of the description's sources it belongs to."""


class StoreDescription(BaseModel):
    """What the store holds and how it was made; its `description.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    key: str
    """Digest of everything that decides the content."""
    num_rows: PositiveInt
    num_tokens: PositiveInt
    num_trained_tokens: NonNegativeInt
    seq_len: PositiveInt
    template: str
    """What rendered it: `tokenizer`, a name, or a file; `none` for plain text."""
    pad_token_id: NonNegativeInt
    """Never a token that ends a trained answer."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer and are trained as such."""
    num_rows_with_stop: NonNegativeInt
    is_encoder_decoder: bool = False
    format: str = ""
    """Of the rows: `alpaca`, `chat`, ...; several joined by `+`."""
    tokenizer: str = ""
    """Folder of the tokenizer."""
    sources: tuple[str, ...]
    source_of_row_weights: tuple[float, ...] = (1.0,)
    """By source: times each of its rows is seen in an epoch."""
    files: tuple[StoreFile, ...] = ()
    num_truncated: NonNegativeInt = 0
    num_lost_tokens: NonNegativeInt = 0
    longest_row_tokens: NonNegativeInt = 0
    """Before truncation."""
    num_blob_tokens: NonNegativeInt = 0
    """Tokens in the shared files, so that a cut-off copy is noticed."""


class TokenStore:
    """Read-only view of a store's folder."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self.folder = folder
        self.description = _read_description(folder)
        blob = folder.parent
        num_tokens = self.description.num_blob_tokens
        try:
            self._tokens = np.memmap(blob / TOKENS_FILE, np.int32, "r", shape=(num_tokens,))
            self._trained = np.memmap(blob / TRAINED_FILE, np.bool_, "r", shape=(num_tokens,))
            self._starts = np.load(folder / "starts.npy")
            self.lengths: NDArray[np.int32] = np.load(folder / "lengths.npy")
            self.num_trained: NDArray[np.int32] = np.load(folder / "num_trained.npy")
            """Trained tokens of each row; a row's first token is never predicted."""
            self._files = np.load(folder / "files.npy")
            self._numbers = np.load(folder / "numbers.npy")
        except (OSError, ValueError) as fault:
            raise _damaged(folder, str(fault)) from fault

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> EncodedRow:
        start = int(self._starts[index])
        end = start + int(self.lengths[index])
        return EncodedRow(self._tokens[start:end], self._trained[start:end], self.place(index))

    def find_highest_token(self) -> int:
        """Over all rows of the blob, which both sides share."""
        return int(self._tokens.max()) if len(self._tokens) else -1

    def place(self, index: int) -> str:
        """Where row `index` came from."""
        file = self.description.files[int(self._files[index])]
        return f"{file.path} {file.unit} {int(self._numbers[index])}"

    @property
    def source_ids(self) -> NDArray[np.int64]:
        """By row: which of the description's sources it belongs to."""
        import numpy as np

        by_file = np.array([file.source for file in self.description.files], dtype=np.int64)
        ids: NDArray[np.int64] = by_file[self._files]
        return ids


def _read_description(folder: Path) -> StoreDescription:
    try:
        described = StoreDescription.model_validate_json((folder / DESCRIPTION_FILE).read_bytes())
    except FileNotFoundError as fault:
        raise NotFoundError(
            f"There is no encoded data in {folder}.",
            remedy="run the same command again; the data is then encoded anew",
        ) from fault
    except (OSError, ValidationError) as fault:
        raise _damaged(folder, str(fault).splitlines()[0]) from fault
    if described.schema_version != SCHEMA_VERSION:
        raise _damaged(folder, f"it is of version {described.schema_version}")
    return described


def _damaged(folder: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The encoded data in {folder} cannot be used: {why}.",
        remedy="delete that folder and run the same command again",
    )

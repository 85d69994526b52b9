"""TokenStore: encoded rows on disk, memory-mapped, so that all ranks share one copy.

<key>/tokens.i32  trained.u8    shared by train and eval
<key>/train/description.json  starts.npy  lengths.npy  num_trained.npy  files.npy
<key>/train/numbers.npy    and the same under <key>/eval/; labels.npy where answers are labelled
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from pydantic import NonNegativeInt, PositiveInt, ValidationError

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.frozen import Frozen
from tightfit.core.objectives import ExampleKind
from tightfit.core.profiles import DataProfile
from tightfit.core.reading import read_bytes

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


class StoreFile(Frozen):
    """A data file that rows came from."""

    path: str
    unit: str
    """What its rows are counted in: `line` or `row`."""
    source: NonNegativeInt
    """Which of the description's sources it belongs to."""


class StoreDescription(Frozen):
    """What the store holds and how it was made; its `description.json`."""

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
    example: ExampleKind = ExampleKind.ANSWER
    """What its rows are. Of a pair the chosen answer's row comes first, the rejected one's next."""

    @property
    def rows_per_example(self) -> int:
        return self.example.num_sequences


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
            self.is_good: NDArray[np.bool_] | None = None
            """Of labelled answers."""
            if self.description.example is ExampleKind.LABELLED:
                self.is_good = np.load(folder / "labels.npy").astype(np.bool_)
        except (OSError, ValueError) as error:
            raise _damaged(folder, str(error)) from error

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def example_lengths(self) -> NDArray[np.int32]:
        """By row: the length of its example, which is that of a pair's longer row."""
        import numpy as np

        size = self.description.rows_per_example
        longest = self.lengths.reshape(-1, size).max(axis=1)
        lengths: NDArray[np.int32] = np.repeat(longest, size)
        return lengths

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
        described = StoreDescription.model_validate_json(read_bytes(folder / DESCRIPTION_FILE))
    except FileNotFoundError as error:
        raise NotFoundError(
            f"There is no encoded data in {folder}.",
            remedy="run the same command again; the data is then encoded anew",
        ) from error
    except (OSError, ValidationError) as error:
        raise _damaged(folder, str(error).splitlines()[0]) from error
    if described.schema_version != SCHEMA_VERSION:
        raise _damaged(folder, f"it is of version {described.schema_version}")
    return described


def _damaged(folder: Path, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The encoded data in {folder} cannot be used: {why}.",
        remedy="delete that folder and run the same command again",
    )


# Writing encoded rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A row ready to be written, with what its source says of it."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    num_trained: int
    """Without a row's first token, which nothing predicts."""
    has_stop: bool
    num_lost: int
    """Tokens cut off to fit."""
    file: int
    number: int
    digest: int
    """Of the example it came from: the same text has the same one."""
    is_good: bool = True
    """Of a labelled answer."""


_COLUMNS = {
    **{"starts": "q", "lengths": "i", "num_trained": "i", "num_lost": "q"},
    **{"has_stop": "b", "files": "i", "numbers": "q", "digests": "Q", "labels": "b"},
}
"""By name, the type code of its `array`."""
_STORED_COLUMNS = ("starts", "lengths", "num_trained", "files", "numbers")


class StoreWriter:
    """The shared files of one encoding, being written; a few numbers per row stay in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_tokens = 0
        self.columns: dict[str, array[int]] = {name: array(kind) for name, kind in _COLUMNS.items()}
        """Over all rows written, in order."""
        self._tokens: IO[bytes] = (folder / TOKENS_FILE).open("wb")
        self._trained: IO[bytes] = (folder / TRAINED_FILE).open("wb")

    def add(self, row: NewRow) -> None:
        values = {
            "starts": self.num_tokens,
            "lengths": len(row.tokens),
            "num_trained": row.num_trained,
            "num_lost": row.num_lost,
            "has_stop": row.has_stop,
            "files": row.file,
            "numbers": row.number,
            "digests": row.digest,
            "labels": row.is_good,
        }
        for name, column in self.columns.items():
            column.append(values[name])
        self._tokens.write(row.tokens.tobytes())
        self._trained.write(row.trained.tobytes())
        self.num_tokens += len(row.tokens)

    def column(self, name: str) -> NDArray[np.int64]:
        """A column for arithmetic; digests keep their unsigned kind."""
        import numpy as np

        held = self.columns[name]
        return np.frombuffer(held, dtype=held.typecode) if held else np.zeros(0, held.typecode)

    def close(self) -> None:
        self._tokens.close()
        self._trained.close()

    def write_store(
        self, name: str, rows: NDArray[np.int64], description: StoreDescription
    ) -> None:
        """One store over some of the rows."""
        import numpy as np

        folder = self.folder / name
        folder.mkdir()
        is_labelled = description.example is ExampleKind.LABELLED
        for column in (*_STORED_COLUMNS, *(("labels",) if is_labelled else ())):
            np.save(folder / f"{column}.npy", self.column(column)[rows])
        text = description.model_dump_json(indent=2) + "\n"
        (folder / DESCRIPTION_FILE).write_text(text, encoding="utf-8")


# Which rows an epoch shows, in which order: by seed and epoch alone.


def epoch_rows(
    store: TokenStore, *, seed: int, epoch: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Row indices of one epoch; of a pair its first row's.

    A source of weight 2 gives each row twice, of 0.5 a half drawn anew each
    epoch, of 2.5 both. The number of rows is the same in every epoch.
    """
    import numpy as np

    weights = store.description.source_of_row_weights
    first = np.arange(0, len(store), store.description.rows_per_example, dtype=np.int64)
    if all(weight == 1.0 for weight in weights):
        rows = first
    else:
        ids = store.source_ids[first]
        parts = [
            _draw(first[ids == source], weight, (seed, epoch, source))
            for source, weight in enumerate(weights)
        ]
        rows = np.sort(np.concatenate(parts))
    return rows[_order(len(rows), (seed, epoch))] if shuffle else rows


def _draw(rows: NDArray[np.int64], weight: float, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    import numpy as np

    whole = int(weight)
    num_more = round((weight - whole) * len(rows))
    if not whole and not num_more and len(rows):
        num_more = 1  # a source that was named is seen
    more = rows[_order(len(rows), seeds)[:num_more]]
    return np.concatenate([np.repeat(rows, whole), more])


def _order(size: int, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    """A permutation. Sorting uniform numbers keeps it alike over numpy's versions."""
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
    return np.argsort(generator.random(size), kind="stable").astype(np.int64)


# Made-up rows: random tokens of given lengths, for measuring a model without its data.

SYNTHETIC_SOURCE = "synthetic rows"
_SEED = 0
MAX_SYNTHETIC_TOKENS = 2**25
"""In the file, 160 MiB; the rows then come round again."""


def count_rows(seq_len: int, *, effective_batch: int, num_steps: int) -> int:
    """As many rows as the steps take, whole steps of them, within the bound of the file."""
    most_steps = max(1, MAX_SYNTHETIC_TOKENS // (seq_len * effective_batch))
    return effective_batch * min(num_steps, most_steps)


def draw_lengths(profile: DataProfile, num_rows: int) -> list[int]:
    """Row lengths spread as the dataset's are, shortest first: its quantiles."""
    import numpy as np

    lengths, counts = zip(*profile.histogram, strict=True)
    reached = np.cumsum(counts)
    places = (np.arange(num_rows) + 0.5) / num_rows * reached[-1]
    found = np.searchsorted(reached, places)
    return [min(int(lengths[at]), profile.seq_len) for at in found]


def write_synthetic(  # noqa: PLR0913
    folder: Path,
    lengths: Sequence[int],
    *,
    vocab_size: int,
    seq_len: int,
    trained_fraction: float = 1.0,
    is_encoder_decoder: bool = False,
    example: ExampleKind = ExampleKind.ANSWER,
) -> TokenStore:
    """A store of random rows; the last part of each is trained, as an answer would be.

    An encoder-decoder's rows have a question and an answer of the given length each. Both answers
    of a pair are as long; every other labelled answer is good.
    """
    import numpy as np

    draw = np.random.default_rng(_SEED)
    folder.mkdir(parents=True)
    writer = StoreWriter(folder)
    every = [length for length in lengths for _ in range(example.num_sequences)]
    for number, length in enumerate(every, start=1):
        size = 2 * length if is_encoder_decoder else length
        num_trained = length if is_encoder_decoder else max(1, round(trained_fraction * length))
        row = _draw_row(draw, size, num_trained, number=number, vocab_size=vocab_size)
        writer.add(replace(row, is_good=number % 2 == 1))
    writer.close()
    description = StoreDescription(
        key="synthetic",
        num_rows=len(every),
        num_tokens=writer.num_tokens,
        num_trained_tokens=int(writer.column("num_trained").sum()),
        seq_len=seq_len,
        template="none",
        pad_token_id=0,
        stop_token_ids=(),
        num_rows_with_stop=0,
        is_encoder_decoder=is_encoder_decoder,
        format="synthetic",
        tokenizer="random numbers",
        sources=(SYNTHETIC_SOURCE,),
        files=(StoreFile(path=SYNTHETIC_SOURCE, unit="row", source=0),),
        longest_row_tokens=max(lengths),
        num_blob_tokens=writer.num_tokens,
        example=example,
    )
    writer.write_store("train", np.arange(len(every)), description)
    return TokenStore(folder / "train")


def _draw_row(
    draw: np.random.Generator, size: int, num_trained: int, *, number: int, vocab_size: int
) -> NewRow:
    import numpy as np

    # The middle of a vocabulary holds words; control tokens stand at its ends.
    tokens = draw.integers(vocab_size // 4, max(1, 3 * vocab_size // 4), size, dtype=np.int32)
    trained = np.zeros(size, dtype=np.bool_)
    trained[size - num_trained :] = True
    return NewRow(
        tokens=tokens,
        trained=trained,
        num_trained=int(trained[1:].sum()),
        has_stop=False,
        num_lost=0,
        file=0,
        number=number,
        digest=number,
    )

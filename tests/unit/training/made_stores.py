"""Small token stores for tests, written with the real writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tightfit.data.token_store import NewRow, StoreDescription, StoreFile, StoreWriter, TokenStore

Example = tuple[Sequence[int], Sequence[bool]]
"""Tokens, and which of them are trained."""


def make_store(
    folder: Path, rows: Sequence[Example], *, seq_len: int = 64, is_encoder_decoder: bool = False
) -> TokenStore:
    folder.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(folder)
    for number, (tokens, trained) in enumerate(rows, start=1):
        learnt = trained if is_encoder_decoder else trained[1:]
        writer.add(
            NewRow(
                tokens=np.array(tokens, dtype=np.int32),
                trained=np.array(trained, dtype=np.bool_),
                num_trained=sum(learnt),
                has_stop=True,
                num_lost=0,
                file=0,
                number=number,
                digest=number,
            )
        )
    writer.close()
    num_tokens = sum(len(tokens) for tokens, _ in rows)
    description = StoreDescription(
        key="made",
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_trained_tokens=sum(sum(trained) for _, trained in rows),
        seq_len=seq_len,
        template="none",
        pad_token_id=0,
        stop_token_ids=(2,),
        num_rows_with_stop=len(rows),
        is_encoder_decoder=is_encoder_decoder,
        sources=("made.jsonl",),
        files=(StoreFile(path="made.jsonl", unit="line", source=0),),
        num_blob_tokens=num_tokens,
    )
    writer.write_store("train", np.arange(len(rows)), description)
    return TokenStore(folder / "train")


def draw_rows(num_rows: int, *, seed: int = 0, vocab: int = 96, most: int = 24) -> list[Example]:
    """Rows of different lengths, their latter part trained."""
    rng = np.random.default_rng(seed)
    rows: list[Example] = []
    for _ in range(num_rows):
        length = int(rng.integers(4, most + 1))
        num_prompt = int(rng.integers(1, length - 1))
        tokens = rng.integers(3, vocab, size=length).tolist()
        rows.append((tokens, [place >= num_prompt for place in range(length)]))
    return rows

"""Encode a dataset for training: tokens, loss masks, report; once, and kept by content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.core.cache import cache_folder
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.training import DataSource, TrainOn
from tightfit.data.encode_cache import REPORT_FILE, find_encoding, new_encoding
from tightfit.data.encoding_job import EncodingJob
from tightfit.data.meter import Meter, ReadProgress
from tightfit.data.report import DataReport
from tightfit.data.row_encoder import EncoderOptions
from tightfit.data.sources import OpenedSource, digest_sources, open_source
from tightfit.data.streams import size_of
from tightfit.data.templates import choose_template
from tightfit.data.token_store import SCHEMA_VERSION, TokenStore
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer

ENCODER_VERSION = 1
"""Raised whenever the same data would be encoded otherwise, so that old caches are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """What to encode and how. Equal requests over equal files share one encoding."""

    sources: Sequence[DataSource]
    model_folder: Path
    """Holds tokenizer.json, and the chat template if the model has one."""
    template: str | None = None
    train_on: TrainOn = TrainOn.ANSWERS
    seq_len: int
    eval_fraction: float = 0.0
    seed: int = 0
    is_encoder_decoder: bool | None = None
    """None: as the model's config says."""
    cache: Path | None = None
    """None: `core.cache.cache_folder()`."""
    skip_faulty: bool = False
    """Leave out rows that cannot be read instead of refusing; the report lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Rows to train on, rows to evaluate on, and what is to be said about them."""

    train: TokenStore
    eval: TokenStore | None
    report: DataReport
    is_cached: bool = False
    """Found, not made."""


def encode_dataset(
    request: EncodeRequest, *, watch: Callable[[ReadProgress], None] | None = None
) -> Encoded:
    """Tokens and masks of all sources; found in the cache or made now.

    Raises one error that lists every row that cannot be trained on, and refuses
    data that would train nothing, or that never trains a stop token.
    """
    _check(request)
    tokenizer = load_tokenizer(request.model_folder)
    opened = [open_source(source) for source in request.sources]
    options = _options(request, tokenizer)
    key = _key(request, opened, tokenizer, options)
    home = (request.cache or cache_folder()) / "tokens" / key
    if found := find_encoding(home):
        return Encoded(train=found[0], eval=found[1], report=found[2], is_cached=True)
    with new_encoding(home) as folder:
        total = sum(size_of(path) for item in opened for path in item.files)
        job = EncodingJob(
            tokenizer=tokenizer,
            options=options,
            folder=folder,
            meter=Meter(watch, total_bytes=total),
        )
        try:
            job.read(opened)
            if not request.skip_faulty:
                job.findings.refuse()
            report = job.finish(key, eval_fraction=request.eval_fraction, seed=request.seed)
        finally:
            job.writer.abandon()
        write_atomic(folder / REPORT_FILE, report.model_dump_json(indent=2) + "\n")
    made = find_encoding(home)
    if made is None:
        raise UserError(
            f"The encoded data in {home} vanished while it was written.",
            remedy="run the same command again, or export TIGHTFIT_CACHE=/another/folder",
        )
    return Encoded(train=made[0], eval=made[1], report=made[2])


def _check(request: EncodeRequest) -> None:
    if not 0 < request.seq_len <= MAX_SEQ_LEN:
        raise InvalidInputError(
            f"A sequence length of {request.seq_len} makes no sense.",
            remedy=f"choose one from 1 to {MAX_SEQ_LEN:,}; 2048 is a common start",
        )
    if not any(source.split == "train" for source in request.sources):
        raise InvalidInputError(
            "No data to train on was named.", remedy="name a data file: --data train.jsonl"
        )


def _options(request: EncodeRequest, tokenizer: ChatTokenizer) -> EncoderOptions:
    is_pair = request.is_encoder_decoder
    is_pair = tokenizer.is_encoder_decoder if is_pair is None else is_pair
    # An encoder-decoder learns question to answer; a chat template only where one is named.
    is_bare = is_pair and request.template is None
    return EncoderOptions(
        template=None if is_bare else choose_template(request.template, tokenizer),
        train_on=request.train_on,
        seq_len=request.seq_len,
        is_encoder_decoder=is_pair,
    )


def _key(
    request: EncodeRequest,
    opened: Sequence[OpenedSource],
    tokenizer: ChatTokenizer,
    options: EncoderOptions,
) -> str:
    parts = (
        f"{ENCODER_VERSION}.{SCHEMA_VERSION}",
        digest_sources(opened),
        tokenizer.digest,
        str(tokenizer.folder.resolve()),
        options.template.name if options.template else "",
        options.template.text if options.template else "",
        options.train_on.value,
        str(options.seq_len),
        str(options.is_encoder_decoder),
        repr(float(request.eval_fraction)),
        str(request.seed if request.eval_fraction else 0),
        str(request.skip_faulty),
    )
    return hashlib.blake2b("\x1e".join(parts).encode(), digest_size=12).hexdigest()

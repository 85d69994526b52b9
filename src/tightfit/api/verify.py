"""`verify`: compare models with the one that they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import model_argument
from tightfit.api.options.engines import Device, Threads
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.options import count_option, path_option, text_option
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress

if TYPE_CHECKING:
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.model_files import Artefact


MAX_VERIFY_TOKENS = 10**8

VERIFY_EXAMPLES = """\b
Examples:
  tightfit verify runs/sql runs/sql/merged
  tightfit verify runs/sql/merged model-f16.gguf model-q8_0.gguf model-q4_k_m.gguf
  tightfit verify ./model ./model-gptq-4 --text wiki.test.raw --tokens 100000 --html report.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Compare models with the one they were made from.

    Compares scores (most likely token, KL divergence, perplexity), greedy answers, the rendered
    chat template, how text is cut into tokens, special tokens and where answers stop. How much
    may differ depends on what was done: nothing for a merge, little for 8 bit, more for 4 bit;
    3 and 2 bit are reported. Ends with 0 where all pass and with 8 where one does not.
    """

    reference: Annotated[
        str,
        model_argument(
            "REFERENCE",
            "What the others were made from: a run, an adapter, a model folder or a GGUF file.",
        ),
    ] = field(kw_only=False)
    others: Annotated[
        list[str],
        model_argument("OTHER...", "Models to check.", example=""),
    ] = field(kw_only=False)
    text: str | None = text_option(
        "FILE",
        "Text to score. [default: a page of our own, and rows of the run]",
        example="wiki.test.raw",
    )
    prompts: str | None = text_option(
        "FILE",
        "Prompts to answer: one on each line, or rows as `train` reads them.",
        example="prompts.txt",
    )
    tokens: int | None = count_option(
        "Most tokens of the text to score. [default: 2048]", most=MAX_VERIFY_TOKENS, example=2048
    )
    step: str | None = text_option(
        "KIND",
        "Judge every model as this kind: exact, format, 8-bit, fp8, int8, 6-bit, 5-bit, 4-bit, "
        "gptq-4, nf4, fp4, 3-bit or 2-bit. [default: found from the files]",
        example="8-bit",
        name="--as",
    )
    device: Device = None
    threads: Threads = None
    html: str | None = path_option(
        "Write the report as a page, with a plot.", example="report.html"
    )
    progress: Progress | None = None


@accepts_keywords(VerifyOptions)
def verify(options: VerifyOptions) -> Verdict:
    """Compare. The verdict's `raise_if_broken` raises for the first model that fails."""
    require_packages("Checking", "torch", "transformers")
    from tightfit.export.verify.scores import read_step
    from tightfit.export.verify.verify import (
        DEFAULT_TOKENS,
        VerifyRequest,
        read_prompts,
        verify_models,
    )
    from tightfit.runtime.model_files import find_artefact

    step = None if options.step is None else read_step(options.step)
    prompts = None if options.prompts is None else read_prompts(Path(options.prompts).expanduser())
    reference = find_artefact(options.reference)
    others, broken = _find_others(options.others)
    verdict = verify_models(
        VerifyRequest(
            reference=reference,
            others=others,
            broken=broken,
            text=None if options.text is None else Path(options.text).expanduser(),
            prompts=prompts,
            num_tokens=options.tokens or DEFAULT_TOKENS,
            steps={} if step is None else dict.fromkeys(options.others, step),
            device=options.device or "auto",
            threads=options.threads,
            report=options.progress,
        )
    )
    if options.html is not None:
        from tightfit.export.verify.verdict import write_verdict_html

        write_verdict_html(verdict, Path(options.html).expanduser())
    return verdict


def _find_others(names: Sequence[str]) -> tuple[tuple[Artefact, ...], dict[str, UserError]]:
    """A damaged file is a finding; one that does not exist is a mistake of the caller."""
    from tightfit.runtime.model_files import find_artefact

    found: list[Artefact] = []
    broken: dict[str, UserError] = {}
    for name in dict.fromkeys(names):
        try:
            found.append(find_artefact(name))
        except InvalidInputError as error:
            broken[name] = error
    return tuple(found), broken

"""`verify`: compare models with the one that they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.api.call import accepts_keywords
from tightfit.api.options.export import VerifyOptions
from tightfit.core.errors import InvalidInputError, UsageError, UserError
from tightfit.core.packages import require_packages

if TYPE_CHECKING:
    from tightfit.export.verify.verdict import Verdict
    from tightfit.runtime.artefacts import Artefact


@accepts_keywords(VerifyOptions)
def verify(options: VerifyOptions) -> Verdict:
    """Compare. The verdict's `raise_if_broken` raises for the first model that fails."""
    if any(not name.strip() for name in options.others):
        raise UsageError("A model to check has no name.", remedy="tightfit verify REFERENCE OTHER")
    require_packages("Checking", "torch", "transformers")
    from tightfit.export.verify.judge import read_step
    from tightfit.export.verify.sample import read_prompts
    from tightfit.export.verify.verify import DEFAULT_TOKENS, VerifyRequest, verify_models
    from tightfit.runtime.artefacts import find_artefact

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
        from tightfit.export.verify.html import write_verdict_html

        write_verdict_html(verdict, Path(options.html).expanduser())
    return verdict


def _find_others(names: Sequence[str]) -> tuple[tuple[Artefact, ...], dict[str, UserError]]:
    """A damaged file is a finding; one that does not exist is a mistake of the caller."""
    from tightfit.runtime.artefacts import find_artefact

    found: list[Artefact] = []
    broken: dict[str, UserError] = {}
    for name in dict.fromkeys(names):
        try:
            found.append(find_artefact(name))
        except InvalidInputError as error:
            broken[name] = error
    return tuple(found), broken

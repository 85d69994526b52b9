"""`tightfit verify`: models held against the one they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tightfit.cli.flags.export import VerifyFlags
from tightfit.cli.packages import require_packages
from tightfit.cli.terminal.output import announce, progress_bar, show_json
from tightfit.core.errors import CheckFailedError, InvalidInputError, UsageError, UserError

if TYPE_CHECKING:
    from tightfit.runtime.artefacts import Artefact


def verify(flags: VerifyFlags) -> None:
    """Compare, show, and leave with 8 where one does not pass."""
    if any(not name.strip() for name in flags.others):
        raise UsageError("A model to check has no name.", remedy="tightfit verify REFERENCE OTHER")
    require_packages("Checking", "torch", "transformers")
    from tightfit.export.verify.judge import read_step
    from tightfit.export.verify.sample import read_prompts
    from tightfit.export.verify.verify import DEFAULT_TOKENS, VerifyRequest, verify_models
    from tightfit.runtime.artefacts import find_artefact

    step = None if flags.step is None else read_step(flags.step)
    prompts = None if flags.prompts is None else read_prompts(Path(flags.prompts).expanduser())
    reference = find_artefact(flags.reference)
    others, broken = _find_others(flags.others)
    with progress_bar() as report:
        verdict = verify_models(
            VerifyRequest(
                reference=reference,
                others=others,
                broken=broken,
                text=None if flags.text is None else Path(flags.text).expanduser(),
                prompts=prompts,
                num_tokens=flags.tokens or DEFAULT_TOKENS,
                steps={} if step is None else dict.fromkeys(flags.others, step),
                device=flags.device or "auto",
                threads=flags.threads,
                report=report,
            )
        )
    if flags.as_json:
        show_json(verdict.model_dump(mode="json"))
    else:
        from tightfit.cli.render.verify import show_verdict

        show_verdict(verdict)
    if flags.html is not None:
        from tightfit.export.verify.html import write_verdict_html

        path = Path(flags.html).expanduser()
        write_verdict_html(verdict, path)
        announce(path)
    if verdict.saved_to is not None:
        announce(Path(verdict.saved_to))
    if not verdict.is_good:
        raise typer.Exit(CheckFailedError.exit_code)


def _find_others(names: list[str]) -> tuple[tuple[Artefact, ...], dict[str, UserError]]:
    """A damaged file is a finding; one that is not there is a mistake of the command line."""
    from tightfit.runtime.artefacts import find_artefact

    found: list[Artefact] = []
    broken: dict[str, UserError] = {}
    for name in dict.fromkeys(names):
        try:
            found.append(find_artefact(name))
        except InvalidInputError as fault:
            broken[name] = fault
    return tuple(found), broken

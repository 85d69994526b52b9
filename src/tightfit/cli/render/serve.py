"""How a server that answers presents itself."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from tightfit.cli.terminal.harmless import harmless

if TYPE_CHECKING:
    from tightfit.serve.api.ready import Ready, ReadyModel


def render_ready(ready: Ready) -> str:
    """The models, why they run where they run, and two lines to try."""
    lines = [line for model in ready.models for line in _model_lines(model)]
    lines += ["", f"address  {ready.url}"]
    if ready.api_key is not None:
        lines.append(f"key      {ready.api_key}    (shown this once; export TIGHTFIT_API_KEY=KEY)")
    lines += ["", _curl(ready), "", _client(ready), "", "Ctrl-C stops it."]
    return "\n".join(lines) + "\n"


def _model_lines(model: ReadyModel) -> list[str]:
    also = f" (also {', '.join(model.aliases)})" if model.aliases else ""
    return [
        harmless(f"{model.id}{also}: {model.format} on {model.engine}, {model.device}"),
        harmless(f"  {model.why}"),
        f"  {model.max_context:,} tokens of prompt and answer, {model.num_slots} answers at once",
    ]


def _curl(ready: Ready) -> str:
    body = {"model": ready.models[0].id, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $TIGHTFIT_API_KEY"' if ready.needs_api_key else ""
    told = shlex.quote(harmless(json.dumps(body, ensure_ascii=False)))
    return (
        f"curl {ready.base_url}/chat/completions -H 'Content-Type: application/json'{key} -d {told}"
    )


def _client(ready: Ready) -> str:
    key = 'os.environ["TIGHTFIT_API_KEY"]' if ready.needs_api_key else '"none"'
    return f'openai.OpenAI(base_url="{ready.base_url}", api_key={key})'

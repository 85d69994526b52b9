"""The frame of every HTML page: one self-contained file, nothing fetched, light and dark."""

from __future__ import annotations

from html import escape

MEMORY_COLOURS = {
    "weights": "#4477aa",
    "adapters": "#ee6677",
    "gradients": "#aa3377",
    "optimizer": "#66ccee",
    "activations": "#e69f00",
    "logits": "#009e73",
    "communication": "#6f7bd1",
    "kv cache": "#8c6d46",
    "quantization": "#cc79a7",
    "dequantized": "#228833",
    "allocator slack": "#b0b0b0",
    "cuda context": "#7f7f7f",
}
"""By component. Distinguishable with the common colour blindnesses; after the sets of Paul Tol and
of Okabe and Ito. Components that are no tensors of the job are grey."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d8dee4;
  --paper: #ffffff; --limit: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #3a424b;
  --paper: #0f1419; --limit: #ff8a80; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 1.8rem 0 0; }
p { color: var(--soft); margin: .2rem 0 .6rem; }
svg { width: 100%; height: auto; } text { fill: var(--ink); font-size: 13px; }
text.soft { fill: var(--soft); font-size: 12px; } text.over { fill: var(--limit); }
line.grid { stroke: var(--line); } line.limit { stroke: var(--limit); stroke-width: 2;
  stroke-dasharray: 6 4; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
ul.legend span { display: inline-block; width: .9em; height: .9em; border-radius: 2px;
  margin-right: .4em; vertical-align: -1px; }
"""


def render_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """The whole document. `body` is markup; `title` is text."""
    ending = f"<script>{script}</script>\n" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        f"{body}{ending}</body>\n</html>\n"
    )

"""Pages of the site that do not lie in docs/ as they are: a hook of mkdocs (`make site`).

README.md and its neighbours become pages, with their links rewritten. The gallery is made of what
the commands write just now: terminals as pictures, charts and reports as the pages that users get.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "EXTENDING.md": "extending.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/text_to_sql/README.md": "text-to-sql.md",
    "benchmarks/published/README.md": "published.md",
    "src/tightfit/catalogue/README.md": "catalogue.md",
}
COPIED = ["examples/whole_job.ipynb"]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
FETCHED_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""rich names a font of a web server; the reader's own monospace serves."""
COLUMNS = 100
TERMINALS = {
    "The best plans, and why": "tightfit plan Llama-2-7b --on 4xV100-32GB --top 3",
    "When nothing fits": "tightfit plan Llama-2-70b --on T4",
    "What would fit": "tightfit plan Llama-3.1-70B --method qlora --buy",
    "Every part of the peak": "tightfit estimate Qwen2.5-7B --method qlora --on RTX-4090",
}
CHARTS = {
    "Memory of a plan, phase by phase": "tightfit plan Llama-2-7b --on 4xV100-32GB --chart {}",
}
REPORT = ROOT / "demo-out" / "report.html"
"""What `make demo` leaves: a run, predicted beside measured."""


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source in COPIED:
        files.append(File.generated(config, source, abs_src_path=str(ROOT / source)))
    gallery, attached = make_gallery()
    files.append(File.generated(config, "gallery.md", content=gallery))
    for name, content in attached.items():
        files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Links of the repository become links between pages, and plain text where there is no page."""
    path = page.file.src_uri
    if path == "gallery.md":
        return markdown
    source = next((old for old, new in PAGES.items() if new == path), f"docs/{path}")

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        wanted = "architecture.md" if target == "docs/decisions" else PAGES.get(target)
        wanted = wanted or target.removeprefix("docs/")
        if files.get_file_from_path(wanted) is not None:
            relative = posixpath.relpath(wanted, posixpath.dirname(path) or ".")
            return f"[{match[1]}]({relative}{match[3] or ''})"
        return f"{match[1]} (`{target}`)" if (ROOT / target).exists() else match[0]

    return LINK.sub(rewrite, markdown)


def make_gallery() -> tuple[str, dict[str, bytes]]:
    """The page, and the files that it shows by name."""
    lines, attached = ["# Gallery", "", "What the commands print and write."], {}
    for number, (title, command) in enumerate(TERMINALS.items()):
        name = f"terminal-{number}.svg"
        attached[name] = draw_terminal(command)
        lines += ["", f"## {title}", "", f"![{command}](gallery/{name})"]
    for number, (title, command) in enumerate(CHARTS.items()):
        name = f"chart-{number}.html"
        with tempfile.TemporaryDirectory() as folder:
            run(command.format(Path(folder) / name))
            attached[name] = (Path(folder) / name).read_bytes()
        shown = command.format("chart.html")
        lines += ["", f"## {title}", "", f"    {shown}", "", _frame(name, title)]
    if REPORT.is_file():
        attached["report.html"] = REPORT.read_bytes()
        lines += ["", "## A run, predicted beside measured", "", _frame("report.html", "A run")]
    return "\n".join(lines) + "\n", attached


def run(command: str) -> str:
    program = Path(sys.executable).with_name("tightfit")
    environment = os.environ | {
        "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "HF_HUB_OFFLINE": "1", "TIGHTFIT_TRACE": "0"
    }  # fmt: skip
    done = subprocess.run(
        [str(program), *shlex.split(command)[1:]],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def draw_terminal(command: str) -> bytes:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(
            record=True, width=COLUMNS, file=nowhere, force_terminal=True, highlight=False
        )
        console.print(f"[bold]$ {command}[/bold]\n")
        console.print(Text.from_ansi(run(command).rstrip()))
        picture = console.export_svg(title="tightfit")
    return FETCHED_FONT.sub("", picture).encode()


def _frame(name: str, title: str) -> str:
    return (
        f'<iframe src="gallery/{name}" title="{title}" style="width:100%;height:40rem;border:0">'
        f"</iframe>\n\n[Open it alone](gallery/{name})"
    )

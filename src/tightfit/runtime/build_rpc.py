"""`python -m tightfit.runtime.build_rpc`: the RPC backend that the wheel lacks, for `--hosts`.

Two files of the source package of the very release that is installed, made a library that the
wheel can load. ggml itself is not built: its functions are the wheel's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

from tightfit.core.errors import SetupError, UserError
from tightfit.core.files import atomic_folder, temporary_folder
from tightfit.core.import_path import module_words
from tightfit.runtime.llama_cpp import REMEDY, RpcFolder, has_llama, installed_release, rpc_folder

_LIBRARY_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread"),
    *("-DGGML_BACKEND_DL", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED"),
)
_SOURCES = ("ggml-rpc.cpp", "transport.cpp")


def main() -> int:
    """Build it, or find it built."""
    try:
        folder = build_rpc()
    except UserError as error:
        print(error.as_lines(), file=sys.stderr)
        return error.exit_code
    print(f"llama.cpp's RPC backend is in {folder.path}")
    return 0


def build_rpc() -> RpcFolder:
    """The library for the installed release; whole or not there."""
    if not has_llama():
        raise SetupError("llama.cpp is not installed.", remedy=REMEDY)
    folder = rpc_folder()
    if folder.path.is_dir():
        return folder
    if shutil.which("c++") is None:
        raise SetupError(
            "Building needs a C++ compiler, and there is no `c++` on PATH.",
            remedy="apt install g++, or your system's package of that name",
        )
    try:
        with (
            atomic_folder(folder.path, is_shared=True) as made,
            temporary_folder() as home,
        ):
            _compile(_fetch_source(home), RpcFolder(made))
    except OSError as error:
        raise SetupError(
            f"{folder.path} cannot be made: {error.strerror or error}.",
            remedy="export TIGHTFIT_CACHE=/a/folder/with/space",
        ) from error
    return folder


def _fetch_source(home: Path) -> Path:
    """ggml out of the wheel's source package, which pip finds where it found the wheel."""
    release = installed_release()
    print(f"fetching the source of xllamacpp {release} ...", flush=True)
    only_source = ["--no-deps", "--no-binary", "xllamacpp", f"xllamacpp=={release}"]
    words = ["download", "--quiet", "--dest", str(home), *only_source]
    _run(
        [sys.executable, *module_words("pip", *words)],
        remedy=f"python -m pip download {' '.join(only_source)}",
    )
    inside = f"xllamacpp-{release}/thirdparty/llama.cpp/ggml"
    with tarfile.open(next(home.glob("xllamacpp-*.tar.gz"))) as archive:
        unpack_files(archive, inside, home)
    return home / inside


def unpack_files(archive: tarfile.TarFile, inside: str, home: Path) -> None:
    """Plain files below the folder `inside`, and nothing that leads out of it.

    By hand, since `extractall` has its filter in 3.10.12, 3.11.4 and later alone.
    """
    for part in archive:
        path = PurePosixPath(part.name)
        if not part.isfile() or not path.is_relative_to(inside) or ".." in path.parts:
            continue
        source = archive.extractfile(part)
        if source is not None:
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_bytes(source.read())


def _compile(ggml: Path, made: RpcFolder) -> None:
    print("compiling ...", flush=True)
    includes = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}"]
    sources = [str(ggml / "src" / "ggml-rpc" / name) for name in _SOURCES]
    _run(
        ["c++", *_LIBRARY_FLAGS, *includes, *sources, "-o", str(made.library)],
        remedy="a newer compiler: apt install g++",
    )
    shutil.copy2(ggml / "include" / made.header.name, made.header)


def _run(command: list[str], *, remedy: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [""]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        name = "pip" if "pip" in command else command[0]
        raise SetupError(
            f"`{name}` failed with code {done.returncode}: {reason.strip()[:300]}", remedy=remedy
        )


if __name__ == "__main__":
    sys.exit(main())

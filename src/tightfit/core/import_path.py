"""Where Python may import from: never the folder in which a command is typed.

`python -m` and `python -c` search the current folder first, where a `json.py` or a `torch.py` of a
downloaded model would be run. Loaded before anything else: it imports nothing that is a file.
"""

import os
import sys

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""From Python 3.11: no Python started from here on searches its current folder."""
LAUNCHER = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    f'import os, runpy; os.environ["{SAFE_PATH_VARIABLE}"] = "1"; '
    'module = sys.argv[1]; sys.argv[:2] = ["-m"]; '
    'runpy.run_module(module, run_name="__main__", alter_sys=True)'
)
"""What `-P -m` does, which Python 3.10 does not know."""


def module_words(module: str, *words: str) -> list[str]:
    """The words after the interpreter that run a module, without the current folder."""
    return ["-c", LAUNCHER, module, *words]


def drop_current_folder() -> None:
    """Take the current folder off the search path of this process and of those it starts.

    An empty entry of PYTHONPATH, as in `PYTHONPATH=$PYTHONPATH:/x`, means the current folder too.
    """
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    stated = [entry for entry in listed if entry]
    if stated:
        os.environ["PYTHONPATH"] = os.pathsep.join(stated)
    os.environ[SAFE_PATH_VARIABLE] = "1"
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:  # it was deleted
        here = ""
    if here not in map(os.path.abspath, stated):
        # Only where Python itself puts it: elsewhere the folder is one of installed packages.
        head = slice(0, 1 + len(listed))
        sys.path[head] = [entry for entry in sys.path[head] if entry not in ("", here)]

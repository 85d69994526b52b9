"""A pytest plugin: verbs do not trace unless a test asks for it, which would take seconds each."""

import os

os.environ.setdefault("TIGHTFIT_TRACE", "0")

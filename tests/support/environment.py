"""A pytest plugin: what tests expect of the process they run in."""

import os
import signal

# Verbs do not trace unless a test asks for it, which would take seconds each.
os.environ.setdefault("TIGHTFIT_TRACE", "0")
# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

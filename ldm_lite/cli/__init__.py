"""What all commands share.  Nothing here imports torch."""

import os
import signal
import sys

_first, *_ = *sys.argv, ""
_module = sys.orig_argv[sys.orig_argv.index("-m") + 1] if _first == "-m" and "-m" in sys.orig_argv else ""
if (_module.partition(".")[0] == "ldm_lite" or os.path.basename(_first) == "ldm-lite") and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):  # this process is one of our commands: until it has begun, Ctrl-C ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

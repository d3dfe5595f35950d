"""What all commands share.  Nothing here imports torch."""

import os
import signal
import sys

if os.path.basename("".join(sys.argv[:1])) in ("-m", "ldm-lite") and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):  # this process is a command: until it has begun, Ctrl-C ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

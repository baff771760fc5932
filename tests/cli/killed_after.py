"""The command line that sends itself a signal after a step: killed_after.py SIGNAL STEP WORDS…"""

import os
import sys

from headwise.cli import main
from headwise.training import loop

number, last, *words = sys.argv[1:]


class Dies(loop.ProgressObserver):
    """Dies, or asks to stop, when a step is done."""

    def stepped(self, record):
        super().stepped(record)
        if record.step == int(last):
            os.kill(os.getpid(), int(number))


loop.ProgressObserver = Dies  # before any module has taken the name from there
sys.argv = ["headwise", *words]
main.main()

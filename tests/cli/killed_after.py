"""The command line that sends itself a signal after a step: killed_after.py SIGNAL STEP WORDS…"""

import os
import sys

from headwise import verbs
from headwise.cli import main

number, last, *words = sys.argv[1:]


class Dies(verbs.ProgressObserver):
    """Dies, or asks to stop, when a step is done."""

    def stepped(self, record):
        super().stepped(record)
        if record.step == int(last):
            os.kill(os.getpid(), int(number))


verbs.ProgressObserver = Dies
sys.argv = ["headwise", *words]
main.main()

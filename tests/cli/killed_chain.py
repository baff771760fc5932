"""A command killed again and again at random moments, each time resumed, then left to finish.

    parent (everything imported, nothing run) ─ fork ─► the command, from its first line
                                              ─ SIGKILL before a random effect ─► fork again …

A fork stands in for a fresh start of Python: imports take seconds and change nothing on disk. The
moments are counted in effects on the disk (`killed_before.py`) and drawn from the seed, so nothing
waits for a clock. A life that finishes before its death is put aside as out-1, out-2, … and the
next one starts from nothing. Prints what happened as JSON.
"""

import json
import random
import shutil
import signal
import sys
from pathlib import Path

from killed_before import import_like, life

from headwise.training import loop

SHARES = (0.07, 0.2, 1.0)  # of a whole run's effects: a life ends within one of them


class Losses(loop.Observer):
    """Every step's figures, appended to a file that outlives the process."""

    def __init__(self, progress, what):
        self.path = Path(f"{Path.cwd()}.losses")  # beside the folder, so that it is no effect

    def stepped(self, record):
        row = {"step": record.step, "loss": record.loss, "held_out_loss": record.held_out_loss}
        with self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


loop.ProgressObserver = Losses  # before any module has taken the name from there


def is_finished(status, folder):
    """Whether the work is done: now, or by a life that was killed after its very last file."""
    said = Path(f"{folder}.log").read_text()
    if status == 0 or (status == 2 and "out exists already" in said):
        return True
    if status == -signal.SIGKILL:
        return False
    sys.exit(f"status {status}: {said}")


def chain(words, here, progress, seed, kills):
    whole, folder = here / "whole", here / "killed"
    assert is_finished(life(words, whole), whole)
    import_like(whole)
    effects, rng = int((here / "whole.effects").read_text()), random.Random(seed)
    moments, finished = [], 0
    while len(moments) < kills:
        fatal = rng.randrange(round(rng.choice(SHARES) * effects))
        if is_finished(life(words, folder, fatal), folder):
            finished += 1
            (folder / "out").rename(folder / f"out-{finished}")
            shutil.rmtree(folder / "out.partial", ignore_errors=True)
        else:
            piece = max((p.name for p in folder.glob(progress)), default="")
            moments.append((piece, fatal))
    assert is_finished(life(words, folder), folder)
    return {"moments": moments, "finished": finished, "effects": effects}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(chain(asked["words"], Path(asked["here"]), **asked["how"])))  # noqa: T201

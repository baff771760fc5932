"""A command killed again and again at random moments, each time resumed, then left to finish.

    parent (everything imported, nothing run) ─ fork ─► the command, from its first line
                                              ─ SIGKILL at a random moment ─► fork again …

A fork stands in for a fresh start of Python: imports take seconds and change nothing on disk. Each
life is told in how many new pieces of progress (files matching `progress`) and how much later it
ends, both drawn from the seed. A life that finishes before its death is put aside as out-1, out-2,
… and the next one starts from nothing. Prints what happened as JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import transformers  # noqa: F401

from headwise import pipeline, verbs
from headwise.cli import main
from headwise.cutting import run  # noqa: F401
from headwise.reporting import pages  # noqa: F401
from headwise.training.loop import Observer


class Losses(Observer):
    """Every step's figures, appended to a file that outlives the process."""

    def stepped(self, record):
        row = {"step": record.step, "loss": record.loss, "held_out_loss": record.held_out_loss}
        with Path("losses.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def watcher(progress, what):
    return Losses()


def life(words, folder):
    """Start the command in `folder`; returns the process's id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        verbs.ProgressObserver = pipeline.ProgressObserver = watcher
        sys.argv = ["headwise", *words]
        main.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        os._exit(code)


def ended(child, options=0):
    """Its wait status; None if it still runs and we only asked."""
    pid, status = os.waitpid(child, options)
    return status if pid else None


def is_finished(status, folder):
    """Whether the work is done: now, or by a life that was killed after its very last file."""
    said = (folder / "stderr").read_text()
    if status == 0 or (os.waitstatus_to_exitcode(status) == 2 and "out exists already" in said):
        return True
    if status == signal.SIGKILL:
        return False
    sys.exit(f"status {status}: {said}")


def finished_pieces(folder, progress):
    """The files of finished pieces; none if their folder is removed while it is looked at."""
    try:
        return set(folder.glob(progress))
    except FileNotFoundError:
        return set()


def killed_life(words, folder, progress, rng, usual):
    """One life that is to be killed: how far the work had come by then; None if it finished."""
    before = finished_pieces(folder, progress)
    pieces = rng.randint(0, 2)
    pause = rng.uniform(0, 0.05 if pieces else 0.25) * usual
    child, status = life(words, folder), None
    while status is None and len(finished_pieces(folder, progress) - before) < pieces:
        time.sleep(0.001)
        status = ended(child, os.WNOHANG)
    if status is None:
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
        status = ended(child)
    if is_finished(status, folder):
        return None
    return max((p.name for p in finished_pieces(folder, progress)), default="")


def chain(words, here, progress, seed, kills):
    whole, folder = here / "whole", here / "killed"
    whole.mkdir()
    folder.mkdir()
    started = time.monotonic()
    assert is_finished(ended(life(words, whole)), whole)
    usual, rng = time.monotonic() - started, random.Random(seed)
    moments, finished = [], 0
    while len(moments) < kills:
        moment = killed_life(words, folder, progress, rng, usual)
        if moment is not None:
            moments.append(moment)
        else:
            finished += 1
            (folder / "out").rename(folder / f"out-{finished}")
            shutil.rmtree(folder / "out.partial", ignore_errors=True)
    assert is_finished(ended(life(words, folder)), folder)
    return {"moments": moments, "finished": finished, "seconds": usual}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(chain(asked["words"], Path(asked["here"]), **asked["how"])))  # noqa: T201

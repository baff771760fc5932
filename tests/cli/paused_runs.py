"""Run command lines one after the other, and pause wherever one takes hold of a folder.

Reads command lines, each a JSON list, from stdin. Says `held FOLDER` on stdout at every hold and
waits for a line; says `ended CODE` at the end of a command.
"""

import contextlib
import json
import sys

import headwise.papers.harness.runner
import headwise.runs
from headwise.artifacts import one_writer
from headwise.cli import main

said = sys.stdout


@contextlib.contextmanager
def paused(folder):
    with one_writer(folder):
        print("held", folder, file=said, flush=True)
        sys.stdin.readline()
        yield


if __name__ == "__main__":  # the workers of `reproduce` import this file, too
    headwise.runs.one_writer = paused
    headwise.papers.harness.runner.one_writer = paused
    while line := sys.stdin.readline():
        sys.argv = ["headwise", *json.loads(line)]
        with contextlib.redirect_stdout(sys.stderr):
            try:
                main.main()
            except SystemExit as end:
                print("ended", end.code or 0, file=said, flush=True)

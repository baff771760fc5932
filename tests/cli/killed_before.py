"""A command killed before each of its effects on the disk, each time run again to the end.

    whole/    the command undisturbed; its effects are counted
    N/        the same command, killed before effect N, then run again

An effect is a file opened for writing, a rename, a new folder or something removed, in the working
folder; Python announces each of them (`sys.addaudithook`) just before it happens. A fork of a
process that has imported what the undisturbed run imported stands in for a fresh start. Pictures
are left blank: drawing them would take most of the time. Prints the number of effects.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from headwise.cli import main
from tests import blank_pictures

REMOVALS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def is_effect(event, arguments, folder):
    """Whether an announced event changes something in the working folder."""
    if event not in REMOVALS and not (event == "open" and (arguments[2] or 0) & WRITING):
        return False
    path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | Path) else ""
    return bool(path) and (not Path(path).is_absolute() or path.startswith(f"{folder}/"))


def count_effects(folder, fatal=None):
    """Count this process's effects from now on, and kill it before effect number `fatal`."""
    count, here = [0], str(folder)

    def hook(event, arguments):
        if is_effect(event, arguments, here):
            if count[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1

    sys.addaudithook(hook)
    return count


def life(words, folder, fatal=None):
    """Run the command in `folder`, killed before effect number `fatal`; its exit status.

    Beside the folder lie what it said and, if it was not to be killed, its effects and modules.
    """
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 70
    try:
        os.chdir(folder)
        log = folder.with_name(f"{folder.name}.log")
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        count = count_effects(folder, fatal)
        sys.argv = ["headwise", *words]
        main.main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        if fatal is None:
            folder.with_name(f"{folder.name}.effects").write_text(str(count[0]))
            folder.with_name(f"{folder.name}.modules").write_text("\n".join(sys.modules))
        os._exit(code)


def import_like(whole):
    """Import what an undisturbed run has imported, once for all the lives to come."""
    for name in Path(f"{whole}.modules").read_text().splitlines():
        with contextlib.suppress(ImportError, AttributeError):  # made at run time, not a file
            importlib.import_module(name)


def kill_before_each(words, here, every, first):
    whole = here / "whole"
    assert life(words, whole) == 0, whole.with_name("whole.log").read_text()
    effects = int((here / "whole.effects").read_text())
    import_like(whole)
    for fatal in range(first, effects, every):
        folder, log = here / f"{fatal}", here / f"{fatal}.log"
        killed = life(words, folder, fatal)
        assert killed == -signal.SIGKILL, (fatal, killed, log.read_text())
        again = life(words, folder)
        done = again == 0 or (again == 2 and "exists already" in log.read_text())
        assert done, (fatal, again, log.read_text())
    return effects


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    blank_pictures.install()
    here, every, first = Path(asked["here"]), asked["every"], asked["first"]
    print(kill_before_each(asked["words"], here, every, first))  # noqa: T201

"""Run commands on damaged files, many of them: python tests/fuzz/fuzzer.py --number 3000 --seed 7

    parent ── fork ──► child: case, case, case, …  one line of result each
       │                 │ copies a folder, damages a file, runs a command in a bounded memory
       └─ a child that is silent for too long, or dies, is the finding of the case it was at

A case is its number and the seed, so `--only 1234 --seed 7` shows it again. Every ending is fine
that is an exit code 0, 1 or 2, with one sentence of bounded length where it is 2; a traceback, a
flood of words, an endless wait, more memory than is allowed or a temporary file left behind is a
finding. Exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import blank_pictures
from tests.fuzz.mutations import mutate
from tests.fuzz.places import TARGETS, Target, make_place, run

MOST_MEMORY = 3 * 2**30  # bytes that a case may take beyond what is mapped when it begins
MOST_PROCESSOR = 30.0  # seconds of a processor that a case may take
MOST_SECONDS = 60.0  # that a child may be silent; the machine may be busy with other work
MOST_WORDS = 100_000  # characters on the screen
MOST_SENTENCE = 1500  # characters of an error
SPENT: Counter[str] = Counter()  # seconds of a processor, by target
PER_CHILD = 40  # cases; what one leaves in memory stays with few


def attempt(
    number: int, seed: int, targets: Sequence[Target], *, special: bool = True, whole: bool = False
) -> str:
    """Run one case in the working directory; what is wrong with its ending, '' if nothing.

    `whole` leaves the file as it is, and any ending but an exit code 0 is a finding: a command that
    is always refused would find nothing.
    """
    rng = random.Random(f"{seed}:{number}")
    target = targets[number % len(targets)]
    trial = Path("trial")
    shutil.copytree(target.folder, trial)
    if target.folder == "cut":
        shutil.copytree("profile", "trial.profile")
    what = "whole" if whole else mutate(trial / target.file, rng, special=special)
    case = f"case {number} (seed {seed}): {target.name}, {what}"
    try:
        done = run(target.words)
    except BaseException:
        return f"{case}: {traceback.format_exc()}"
    else:
        problem = wrong_with(done.code, done.out, done.err)
        if whole and done.code and not problem:
            problem = f"{' '.join(target.words)} ended with {done.code}: {done.err}"
        left = [str(p) for p in Path().rglob(".*.tmp")]
        if target.words == ("read", "gguf"):  # a refused file leaves nothing in the cache
            left += [str(p) for p in Path("cache").glob("gguf/*")]
        if not problem and left and done.code == 2:
            problem = f"left {left}"
        return problem and f"{case}: {problem}"
    finally:
        for path in (*Path().glob("trial*"), *Path().glob("out*"), *Path().glob(".out*")):
            _remove(path)
        _remove(Path("cache"))


def wrong_with(code: int, out: str, err: str) -> str:
    """What is wrong with the ending of a command."""
    if len(out) + len(err) > MOST_WORDS:
        return f"a flood of {len(out) + len(err)} characters: {(out + err)[:300]}"
    if code not in (0, 1, 2):
        return f"exit code {code}: {err[-2000:]}"
    if "Traceback" in err:
        return err[-2000:]
    if code == 2:
        sentences = [line for line in err.splitlines() if line.startswith("Error: ")]
        if len(sentences) != 1 or not err.endswith(sentences[0] + "\n"):
            return f"not one sentence: {err[-2000:]}"
        if len(sentences[0]) > MOST_SENTENCE:
            return f"a sentence of {len(sentences[0])} characters: {sentences[0][:300]}"
    return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def bounded(
    numbers: Sequence[int], seed: int, targets: Sequence[Target], *, whole: bool = False
) -> list[str]:
    """The findings of some cases, each child bounded in time and memory."""
    found: list[str] = []
    left = list(numbers)
    while left:
        results, reason = _one_child(left[:PER_CHILD], seed, targets, whole)
        found += [problem for problem, _ in results if problem]
        for number, (_, spent) in zip(left, results, strict=False):
            SPENT[targets[number % len(targets)].name] += spent
        left = left[len(results) :]
        if reason:
            target = targets[left[0] % len(targets)]
            found.append(f"case {left[0]} (seed {seed}): {target.name}: {reason}")
            left = left[1:]
            for path in (*Path().glob("trial*"), *Path().glob("out*"), *Path().glob(".out*")):
                _remove(path)
    return found


def _one_child(
    numbers: Sequence[int], seed: int, targets: Sequence[Target], whole: bool
) -> tuple[list[tuple[str, float]], str]:
    """The results of the cases that came to an end, and why the next one did not."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _live(numbers, seed, targets, whole, writing)
    os.close(writing)
    results: list[tuple[str, float]] = []
    reason = ""
    with os.fdopen(reading, encoding="utf-8") as stream:
        while len(results) < len(numbers):
            if not select.select([stream], [], [], MOST_SECONDS)[0]:
                os.kill(child, signal.SIGKILL)
                reason = f"silent for {MOST_SECONDS:.0f} s"
                break
            line = stream.readline()
            if not line:
                break
            results.append(json.loads(line))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not reason and len(results) < len(numbers):
        reason = f"the process died with {status}"
    return results, reason


def _live(
    numbers: Sequence[int], seed: int, targets: Sequence[Target], whole: bool, writing: int
) -> None:
    try:
        # Of memory that can be written; address space alone (the charts' engine reserves much of
        # it) is no burden.
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + MOST_MEMORY,) * 2)
        with os.fdopen(writing, "w", encoding="utf-8") as stream:
            for number in numbers:
                began = time.process_time()
                problem = attempt(number, seed, targets, whole=whole)
                spent = time.process_time() - began
                if not problem and spent > MOST_PROCESSOR:
                    problem = f"case {number} (seed {seed}): took {spent:.0f} s of a processor"
                stream.write(json.dumps([problem, spent]) + "\n")
                stream.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _in_a_child(work: Callable[[], None]) -> None:
    """Threads that some work starts (autograd's, tokenizers') would be missing after a fork."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--number", type=int, default=2000, help="cases to run")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--only", type=int, help="run this case alone")
    words.add_argument("--target", default="", help="only targets whose name holds this")
    words.add_argument("--whole", action="store_true", help="every command once, on whole files")
    words.add_argument("--times", action="store_true", help="say where the time went")
    given = words.parse_args()
    # Here, for the processes that a command starts import this file, too.
    import transformers  # noqa: F401

    import headwise.pipeline
    import headwise.reporting.pages
    import headwise.training.train  # noqa: F401

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
    targets = tuple(t for t in TARGETS if given.target in t.name)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["HEADWISE_CACHE"] = f"{folder}/cache"
        blank_pictures.install()
        _in_a_child(lambda: make_place(Path(folder)))
        began = time.process_time()
        if given.whole:
            targets = tuple({(t.folder, t.words): t for t in targets}.values())
            given.number = len(targets)
        numbers = range(given.number) if given.only is None else [given.only]
        found = bounded(numbers, given.seed, targets, whole=given.whole)
        spent = time.process_time() - began + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    if given.times:
        for name, seconds in SPENT.most_common():
            print(f"{seconds:8.2f} s  {name}")  # noqa: T201
    print(*found, sep="\n")  # noqa: T201
    print(f"{len(numbers)} cases, {len(found)} findings, {spent:.0f} s of a processor")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

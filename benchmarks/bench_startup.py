"""How long `headwise --help` takes, as a multiple of importing the libraries it is made with.

Target: at most 3 times `python -c "import typer, rich"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from timing import interleaved


def process(*words: str) -> Callable[[], object]:
    """A call that runs a command and waits for it."""
    return lambda: subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    timings = interleaved(
        {
            "help": process(sys.executable, "-m", "headwise", "--help"),
            "libraries": process(sys.executable, "-c", "import typer, rich"),
        },
        repeats=21,
        warmup=3,
    )
    ratio = timings["help"].median / timings["libraries"].median
    report = {"ratio": ratio, "target": 3.0, **{k: asdict(t) for k, t in timings.items()}}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

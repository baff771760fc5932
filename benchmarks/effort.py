"""What each stage of a compression brings for its processor time: perplexity ÷ dense, as JSON.

Each row is one way to the budget: the cut alone, with the refit, with the layer fit, with recovery
on so many tokens, with both. Rows of one budget share profile and plan, and a recovery starts from
the cut of the row above it, so its time is that of the whole way. Rows are appended to
OUT/rows.jsonl as they are done; the same command does what is missing.

    python benchmarks/effort.py builtin:smollm2 --text wiki.txt --text 0.5:code.txt \\
        --held-out other.txt --budget 75% --budget 50% --recover 16384,131072 -o effort

Times are processor seconds (user and system) of this process; set OMP_NUM_THREADS=1 for figures
that do not depend on the number of cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import headwise as hw
from headwise.cutting.settings import CutSettings
from headwise.measure.record import LanguageQuality
from headwise.profiling.format import Profile

CUTS = {
    "folded": CutSettings(refit=False, fit=0),
    "refit": CutSettings(fit=0),
    "refit and layer fit": CutSettings(),
}


@dataclass(frozen=True)
class Row:
    """One way to a budget."""

    budget: str
    cut: str
    recover: int
    train: str = "attention"

    @property
    def folder(self) -> str:
        """The name of its model's folder."""
        name = f"{self.budget.rstrip('%')}-{self.cut.replace(' ', '-')}"
        return f"{name}-{self.recover}-{self.train}" if self.recover else name


def main() -> None:
    options = arguments()
    out = Path(options.out)
    out.mkdir(exist_ok=True)
    rows = out / "rows.jsonl"
    done = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    names = {one["folder"]: one for one in done}
    started = time.process_time()
    if (out / "p").exists():
        profile = Profile.read(out / "p")
    else:
        profile = hw.profile(options.model, text=options.text, tokens=options.tokens, out=out / "p")
    profiling = names.get("p", {"seconds": time.process_time() - started})["seconds"]
    if "p" not in names:
        write(rows, {"folder": "p", "seconds": profiling, "tokens": options.tokens})
    for row in asked(options):
        if row.folder not in names:
            found = measured(row, profile, names, options, out)
            names[row.folder] = found | {"minutes": (found["seconds"] + profiling) / 60}
            write(rows, names[row.folder])
    for one in names.values():
        print(json.dumps(one))


def asked(options: argparse.Namespace) -> Iterator[Row]:
    for budget in options.budget:
        for cut in CUTS:
            if cut in options.cut.split(","):
                yield Row(budget, cut, 0)
                for tokens in map(int, filter(None, options.recover.split(","))):
                    for train in options.train.split(","):
                        yield Row(budget, cut, tokens, train)


def measured(
    row: Row, profile: Profile, names: dict[str, dict], options: argparse.Namespace, out: Path
) -> dict:
    """Make the row's model and measure it; the time of measuring does not count."""
    started, before = time.process_time(), 0.0
    folder = out / row.folder
    if row.recover:
        start = Row(row.budget, row.cut, 0).folder
        before = names[start]["seconds"]
        hw.recover(
            out / start,
            against=options.model,
            text=options.text,
            tokens=row.recover,
            train=row.train,
            split=0,
            out=folder,
        )
    else:
        plan = hw.fit(
            profile, attn_params=row.budget, kv_bytes=row.budget, granularity=options.granularity
        )
        hw.cut(profile, plan, model=options.model, settings=CUTS[row.cut], out=folder)
    seconds = before + time.process_time() - started
    found = hw.verify(
        folder,
        against=options.model,
        text=options.held_out[0],
        held_out=options.held_out[1:],
        tokens=options.verify_tokens,
    )
    texts = [one for one in found.texts if isinstance(one, LanguageQuality)]
    ratios = {Path(one.source).name: one.ratio for one in texts}
    return {"folder": row.folder, **vars(row), "seconds": seconds, "ratios": ratios}


def write(path: Path, row: dict) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--held-out", action="append", required=True)
    parser.add_argument("--budget", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--cut", default=",".join(CUTS))
    parser.add_argument("--recover", default="16384,131072")
    parser.add_argument("--train", default="attention")
    parser.add_argument("--granularity", default="layer")
    parser.add_argument("--verify-tokens", type=int, default=16384)
    parser.add_argument("-o", "--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()

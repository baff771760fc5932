"""The findings as Markdown: one table of all claims, then each with its numbers."""

from __future__ import annotations

from typing import Any

COLUMNS = ("claim", "the paper says", "measured", "seeds", "verdict")
READING = (
    "“±” is the standard deviation over seeds; bars in figures go from the lowest seed to the "
    "highest.",
    "“Within the spread” means that the interval of the mean difference, taken seed by seed, "
    "reaches 0: the difference may be chance.",
    "“Cannot be tested here” means that the spread or the size of the experiment hides the answer, "
    "or that the machine lacks what is needed; “holds in part” that some of the claim was seen.",
)


def markdown(info: dict[str, Any]) -> str:
    """The table and the sections below it."""
    lines = [
        "# The claims of the papers, measured",
        "",
        f"Size: {info['size']}. {provenance(info)}",
        "",
        *(f"- {line}" for line in reading(info)),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for claim in info["claims"]:
        cells = (
            f"[{claim['id']}](#{claim['id']}): {claim['statement']}",
            f"{claim['expected']} ({claim['source']})",
            claim["measured"],
            str(len(claim["seeds"])),
            f"**{claim['verdict']}**",
        )
        lines.append(f"| {' | '.join(_cell(c) for c in cells)} |")
    for claim in info["claims"]:
        lines += ["", *_section(claim)]
    return "\n".join(lines) + "\n"


def reading(info: dict[str, Any]) -> tuple[str, ...]:
    """What the words mean, and what is not there."""
    missing = ", ".join(info["not_run"])
    return (*READING, f"Not run: {missing}.") if missing else READING


def provenance(info: dict[str, Any]) -> str:
    """Versions, machine and time in one line."""
    made = info["provenance"]
    versions = ", ".join(f"{name} {'/'.join(v)}" for name, v in made["versions"].items())
    cores = "/".join(map(str, made["cores"])) or "no"
    return (
        f"{made['trials']} trials, {duration(made['seconds'])} of processor time, each trial on "
        f"one thread (machine of {cores} cores); {versions}."
    )


def footing(claim: dict[str, Any]) -> str:
    """Seeds, trials and time behind a finding."""
    seeds = ", ".join(map(str, claim["seeds"])) or "none whole"
    text = f"Seeds: {seeds}. Trials: {claim['trials']}, {duration(claim['seconds'])}."
    if claim["missing"]:
        text += f" Missing: {claim['missing']}, of which failed: {len(claim['failures'])}."
    return text


def shown(value: Any) -> str:
    """A cell: floats with four digits, absent ones as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """A length of time in its natural unit."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _section(claim: dict[str, Any]) -> list[str]:
    lines = [f"## {claim['id']}", "", claim["statement"], "", f"*{claim['setting']}*", ""]
    lines += [f"**{claim['verdict'].capitalize()}.** {claim['measured']}", ""]
    lines += [f"- {reason}" for reason in claim["reasons"]] + [""]
    if claim["figure"]:
        lines += [f"![{claim['figure_shows']}]({claim['figure']})", ""]
    if claim["table"]:
        columns, rows = claim["table"]["columns"], claim["table"]["rows"]
        lines += [f"| {' | '.join(_cell(c) for c in columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(_cell(shown(c)) for c in row)} |" for row in rows] + [""]
    lines += [f"- failed: {f['name']}, seed {f['seed']}: {f['error']}" for f in claim["failures"]]
    return [*lines, footing(claim)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""Commands shown in the documentation are run, and the lines shown below them must appear."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Each `$ command` of the console blocks, with the output lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip():
                found[-1][1].append(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_documentation_run_as_shown(page, tmp_path, monkeypatch, headwise):
    monkeypatch.chdir(tmp_path)
    for command, shown in commands(page.read_text()):
        program, *words = shlex.split(command)
        assert program == "headwise", command
        done = headwise(*words)
        assert done.code == 0, f"{command}\n{done.err}"
        squeezed = re.sub(r" +", " ", done.out)
        for line in shown:
            assert re.sub(r" +", " ", line) in squeezed, f"{command}\n{done.out}"


def test_the_reader_of_blocks_sees_commands_and_output():
    text = "```console\n$ headwise a\nshown\n$ headwise b\n```\n"
    assert commands(text) == [("headwise a", ["shown"]), ("headwise b", [])]


@pytest.mark.slow
def test_the_example_runs():
    example = ROOT / "examples" / "plan_tour.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "policy theory" in done.stdout


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"

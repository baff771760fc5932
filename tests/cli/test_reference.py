"""The page of commands is current, every command shows an example, and the examples are real."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headwise.cli.main import app
from headwise.cli.reference import api_page, commands, page, paragraphs

ROOT = Path(__file__).parents[2]
COMMANDS = commands(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def check(line: str) -> None:
    """Read a command line as the program would, without running it."""
    words = shlex.split(line, comments=True)
    name = next(n for k in (3, 2, 1) if (n := " ".join(words[:k])) in COMMANDS or k == 1)
    if name == "headwise":
        assert words[1:] in (["--version"], ["--help"], ["--install-completion"]), line
        return
    rest = words[len(name.split()) :]
    with COMMANDS[name].make_context(name, rest):
        pass


def test_the_committed_page_is_current():
    assert (ROOT / "docs" / "commands.md").read_text() == page(app), "run `make docs`"


def test_the_committed_api_page_is_current():
    assert (ROOT / "docs" / "api.md").read_text() == api_page(), "run `make docs`"


def test_the_page_follows_the_code():
    small = typer.Typer(help="Small.")

    @small.command()
    def first(size: int, wide: bool = True, loud: bool = False) -> None:
        """Does | little.

        Example: headwise first 3
        """

    @small.command()
    def second() -> None:
        """Does nothing.

        Example: headwise second

        Example: headwise second --help
        """

    made = page(small)
    assert "| [`headwise first`](#headwise-first) | Does | little. |" in made
    assert "| `size <int>` |  | required |" in made
    assert "| `--wide / --no-wide` |  | `--wide` |" in made
    assert "```sh\nheadwise second\nheadwise second --help\n```" in made
    assert page(app) != made


@pytest.mark.slow
def test_the_page_is_written_without_torch(tmp_path):
    program = (
        "import sys; from headwise.cli import reference; sys.argv[1:] = [sys.argv[1]];"
        "reference.main(); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    written = tmp_path / "commands.md"
    done = subprocess.run([sys.executable, "-c", program, written], check=False)
    assert done.returncode == 0
    assert written.read_text() == page(app)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_shows_an_example_that_is_understood(name, headwise):
    shown = headwise(*name.split()[1:], "--help")
    assert shown.code == 0
    assert f"Example: {name}" in " ".join(shown.out.split())
    examples = paragraphs(COMMANDS[name])[1]
    assert examples
    for example in examples:
        assert example.startswith(name)
        check(example)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_that_are_not_run_are_at_least_understood(path):
    for block in re.findall(r"```(?:sh)?\n(.*?)```", path.read_text(), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("headwise "):
                check(line)


def test_the_check_can_fail():
    with pytest.raises(typer.TyperException, match="No such option"):
        check("headwise generate ./model --prompt hello --loudly")
    with pytest.raises(typer.TyperException, match="Missing"):
        check("headwise generate ./model")


# Completion belongs to the installed program: its name is in the scripts.
PROGRAM = Path(sys.executable).with_name("headwise")


def completed(*command, **environment) -> str:
    done = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_show_completion_prints_the_script_of_the_shell():
    shown = completed("bash", "-c", f"{shlex.quote(str(PROGRAM))} --show-completion; exit $?")
    assert "complete -o default -F _headwise_completion headwise" in shown
    assert shown.strip() == completed(PROGRAM, _HEADWISE_COMPLETE="source_bash").strip()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_their_scripts(shell):
    shown = completed(PROGRAM, _HEADWISE_COMPLETE=f"source_{shell}")
    assert f"_HEADWISE_COMPLETE=complete_{shell}" in shown


@pytest.mark.slow
def test_completion_knows_the_commands():
    asked = {"COMP_WORDS": "headwise plan ", "COMP_CWORD": "2"}
    shown = completed(PROGRAM, _HEADWISE_COMPLETE="complete_bash", **asked)
    assert sorted(shown.split()) == ["cost", "design", "fit", "new", "show"]


def test_options_named_in_the_documentation_exist():
    """`--no-refit` in a sentence is as much a promise as a command line."""
    parameters = [p for command in COMMANDS.values() for p in command.params]
    known = {flag for p in parameters for flag in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version", "--install-completion", "--show-completion"}
    known.add("--sizes")  # a benchmark's
    named = {
        (page.name, flag)
        for page in PAGES
        if page.name != "other-tools.md"
        for span in re.findall(r"`(--?[a-z][^`]*)`", page.read_text(encoding="utf-8"))
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)
    }
    assert len(named) > 100
    assert not sorted(one for one in named if one[1] not in known)

"""The rooms of the house: who may import whom, and what must stay light.

Rooms are listed from the ground up; a room may import only rooms below it (its own room is
always allowed). The same order excludes cycles between rooms; cycles between the files of one
room are looked for separately.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headwise"

ROOMS = (
    "errors",
    "devices",
    "progress",
    "inputs",
    "artifacts",
    "records",
    "runs",
    "plan",
    "theory",
    "planning",
    "memory",
    "data",
    "models",
    "source",
    "measure",
    "training",
    "profiling",
    "cutting",
    "effort",
    "baselines",
    "reporting",
    "exporting",
    "recipe",
    "plans",
    "pipeline",
    "comparing",
    "designing",
    "verbs",
    "papers",
    "cli",
    "__main__",
)
HEAVY = ("torch", "transformers")
LIGHT_ROOMS = (
    "errors",
    "inputs",
    "progress",
    "records",
    "runs",
    "plan",
    "artifacts",
    "theory",
    "planning",
    "memory",
)


def module_name(path: Path) -> str:
    parts = ("headwise", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Every module a file imports, wherever the statement stands, type checking left out."""
    found: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


@functools.cache
def graph() -> dict[str, set[str]]:
    files = {module_name(p): p for p in SOURCE.rglob("*.py")}
    return {
        name: {
            target
            for target in imports(parsed(path), name, path.name == "__init__.py")
            if target in files and target != name
        }
        for name, path in files.items()
    }


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "headwise"


def upward_arrows(edges: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, targets in sorted(edges.items())
        for target in sorted(targets)
        if room(name) != "headwise"
        and room(target) != "headwise"
        and ROOMS.index(room(target)) > ROOMS.index(room(name))
    ]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append(path[path.index(name) :])
            return
        if name in done:
            return
        for target in sorted(edges.get(name, ())):
            walk(target, [*path, name])
        done.add(name)

    for start in sorted(edges):
        walk(start, [])
    return found


def importers_of_papers(edges: dict[str, set[str]]) -> set[str]:
    return {
        name
        for name, targets in edges.items()
        if room(name) != "papers" and any(room(target) == "papers" for target in targets)
    }


def test_every_room_is_listed_and_there():
    assert {room(name) for name in graph()} - {"headwise"} == set(ROOMS)
    assert len(ROOMS) == len(set(ROOMS))


def test_no_upward_arrows():
    assert upward_arrows(graph()) == []


def test_no_cycles():
    assert cycles(graph()) == []


def test_the_papers_are_a_client_that_only_their_command_imports():
    assert importers_of_papers(graph()) == {"headwise.cli.reproduce"}


def test_the_checks_can_fail():
    planted = {"headwise.models.build": {"headwise.papers.harness.claim"}}
    assert importers_of_papers(planted) == {"headwise.models.build"}
    assert upward_arrows({"headwise.plan": {"headwise.cli.main"}}) != []
    assert cycles({"a": {"b"}, "b": {"a"}}) == [["a", "b"]]
    inside = "def f():\n    from ..cli import main\n"
    assert "headwise.cli.main" in imports(
        ast.parse(inside), "headwise.theory.allocation", is_package=False
    )


def test_the_light_rooms_name_nothing_heavy():
    for path in SOURCE.rglob("*.py"):
        name = module_name(path)
        if room(name) in LIGHT_ROOMS:
            roots = {target.split(".")[0] for target in imports(parsed(path), name, False)}
            assert not roots & set(HEAVY), name


def classes_named_twice(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The public class names that several files define."""
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_public_class_name_means_one_thing():
    assert classes_named_twice({str(p): parsed(p) for p in SOURCE.rglob("*.py")}) == {}
    planted = {"a.py": "class Kept: pass", "b.py": "class Kept: pass", "c.py": "class _K: pass"}
    trees = {file: ast.parse(source) for file, source in planted.items()}
    assert classes_named_twice(trees) == {"Kept": {"a.py", "b.py"}}


def test_only_the_command_line_prints_or_exits():
    for path in SOURCE.rglob("*.py"):
        if room(module_name(path)) in ("cli", "__main__"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), path


RUN_MAIN = """
import sys
sys.argv = ["headwise", *{arguments!r}]
try:
    import headwise.cli.main
    headwise.cli.main.main()
except SystemExit as end:
    assert end.code in (0, None), end.code
assert not {heavy!r} & set(sys.modules), {heavy!r} & set(sys.modules)
"""


@pytest.mark.parametrize(
    "command",
    [
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                "--help",
                "theory bound --width 128 --token-dim 16 --heads 1-9",
                "theory allocate --width 64 --token-dim 8 --kernel 1,1",
                "theory advise --d-model 64 --heads 4 --head-dim 16 --context 99",
            )
        ),
        "plan new --layers 3 --d-model 64 --heads 4 --context 99 --attn-params 75%",
    ],
)
def test_quick_commands_stay_light(command):
    code = RUN_MAIN.format(arguments=command.split(), heavy=set(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_headwise_is_light():
    heavy = {*HEAVY, "numpy", "scipy", "pydantic", "typer", "rich"}
    code = f"import sys, headwise; assert not {heavy!r} & set(sys.modules), set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Whether an installed wheel works: run by `make test-wheel` with the Python it is installed in.

python tests/wheel_smoke.py dist/headwise-*.whl
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPE = ("--layers", "5", "--d-model", "64", "--heads", "4", "--context", "101")
SMALL = ("--length", "32", "--tokens", "640", "--multiple-of", "2", "--verify-tokens", "256")


def check_contents(wheel: Path) -> None:
    """Every file of the package is in the wheel, those that are not Python too."""
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "headwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("headwise/")}
    assert packed == files, packed ^ files
    assert {Path(name).suffix for name in packed} > {".py", ".css", ".html", ".js"}


def headwise(*words: object) -> str:
    """What the installed command prints."""
    command = [str(Path(sys.prefix) / "bin" / "headwise"), *map(str, words)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_cut() -> None:
    """A tiny random Llama is cut to 60% of its cache, and transformers loads the result."""
    sys.path.append(str(ROOT))
    from transformers import AutoModelForCausalLM

    from tests import tiny

    tiny.write_llama(Path())
    made = headwise(
        "compress", "model", "--text", "text.txt", "--kv-bytes", "60%", *SMALL, "-o", "small"
    )
    assert "small" in made, made
    kinds = [
        json.loads(Path(f, "config.json").read_text())["model_type"] for f in ("model", "small")
    ]
    assert kinds == ["llama", "headwise"]
    dense, cut = (AutoModelForCausalLM.from_pretrained(f) for f in ("model", "small"))
    assert cut.num_parameters() < dense.num_parameters()
    assert Path("small", "verify.json").exists()


def main(wheel: Path) -> None:
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        import headwise as package

        assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
        version = importlib.metadata.version("headwise")
        assert package.__version__ == version
        assert version in headwise("--version")
        headwise("plan", "new", *SHAPE, "--attn-params", "75%", "-o", "plan.json")
        assert package.Plan.from_json(Path("plan.json").read_text()).shape.n_layers == 5
        check_cut()
        os.chdir(ROOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

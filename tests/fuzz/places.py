"""What is damaged: one folder of every kind that headwise reads, and the verbs that read it.

place/model/    ─ copied ─►   place/trial/      one file of it damaged, then a verb is run on it
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwise.baselines.record import read_comparison
from headwise.cli import main
from headwise.data.images import ImageReader, read_images
from headwise.data.text import read_source
from headwise.data.tokens import load_tokenizer
from headwise.errors import HeadwiseError, printable
from headwise.exporting.record import EXPORT_RECORD, ExportRecord, read_export
from headwise.measure.answers import read_tasks
from headwise.measure.generation import SELF_TEXT_RECORD, SelfTextRecord, read_self_text
from headwise.measure.record import read_verification
from headwise.models.gguf import dequantise
from headwise.models.record import read_cut_record
from headwise.plan import Plan
from headwise.plans import read_plan
from headwise.profiling.format import Profile
from headwise.recipe import read_recipe
from headwise.records import write_record
from headwise.reporting.sources import read_report_source
from headwise.source import open_source
from tests import tiny

SIZES = "--tokens 48 --length 16 --device cpu"
CUT = "--attn-params 60% --multiple-of 2"
TEXT = "--text text.txt"
SHAPE = tiny.SHAPE
_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Target:
    """A file that is damaged, the folder it lies in, and a command that reads it."""

    folder: str
    file: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.file} by {' '.join(self.words[:2])}"


_COMPARE = f"compare model {TEXT} {SIZES} --methods svd-llm --attn-params 75% -o"
_VERIFY = f"{TEXT} --tokens 32 --repeats 0"
_RECOVER = f"{TEXT} --tokens 32 --length 16 -o out"
_TRAIN = "--steps 1 --device cpu -o out"
_REPRODUCE = "reproduce bound-curve --quick --workers 1 -o"
_WEIGHTS, _STEP = "model.safetensors", "checkpoints/step-00000002"
# The folder, the files in it that are damaged, and the commands that read them from `trial`; a
# command `read X` is the library's own reader X, without the rest of a verb.
_READ: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "model",
        f"config.json {_WEIGHTS} tokenizer.json tokenizer_config.json",
        (
            f"profile trial {TEXT} {SIZES} -o out",
            f"compress trial {TEXT} {SIZES} {CUT} --verify-tokens 32 -o out",
            f"eval trial {TEXT} --tokens 32 --device cpu",
            "generate trial --prompt The --max-new-tokens 3 --device cpu",
            f"verify cut --against trial {_VERIFY}",
            f"recover cut --against trial {_RECOVER}",
            _COMPARE.replace("model", "trial") + " out",
        ),
    ),
    (
        "sharded",
        "model.safetensors.index.json model-00001-of-00003.safetensors",
        (
            f"profile trial {TEXT} {SIZES} -o out",
            f"compress trial {TEXT} {SIZES} {CUT} --no-verify -o out",
            f"eval trial {TEXT} --tokens 32",
        ),
    ),
    (
        "model",
        "generation_config.json",
        (
            "generate trial --prompt x --max-new-tokens 2",
            f"verify cut --against trial {_VERIFY} --samples 1",
        ),
    ),
    (
        "cut",
        f"headwise.json config.json {_WEIGHTS} verify.json README.md",
        (
            f"verify trial --against model {_VERIFY}",
            f"recover trial --against model {_RECOVER}",
            "report trial -o out.html",
            f"eval trial {TEXT} --tokens 32",
            "generate trial --prompt x --max-new-tokens 2",
        ),
    ),
    ("cut", "recipe.yaml", ("run trial/recipe.yaml -o out",)),
    ("profile", "recipe.yaml", ("run trial/recipe.yaml -o out",)),
    (
        "profile",
        "profile.json profile.safetensors",
        (
            f"plan fit trial {CUT} -o out.json",
            "report trial -o out.html",
            f"compress model {TEXT} {SIZES} {CUT} --profile trial --no-verify -o out",
        ),
    ),
    (
        "run",
        f"run.json plan.json metrics.jsonl tokens/train.npy tokenizer/tokenizer.json "
        f"{_STEP}/state.json {_STEP}/{_WEIGHTS} {_STEP}/optimizer.safetensors model/config.json",
        ("train -o trial --resume", "report trial --no-samples -o out.html"),
    ),
    (
        "unfinished",
        f"run.json plan.json metrics.jsonl tokens/train.npy tokenizer/tokenizer.json "
        f"{_STEP}/state.json {_STEP}/{_WEIGHTS} {_STEP}/optimizer.safetensors",
        ("train -o trial --resume",),
    ),
    (
        "compared",
        "compare.json run.json cells/dense.json cells/svd-llm@75pct.json",
        (
            f"{_COMPARE} trial",
            "report trial -o out.html",
            "report cut --compare trial -o out.html",
        ),
    ),
    ("compared", "profile/profile.json", (f"{_COMPARE} trial",)),
    (
        "plans",
        "plan.json",
        (
            "plan show trial/plan.json",
            "plan cost trial/plan.json",
            "theory advise --d-model 12 --heads 3 --head-dim 4 --context 16 --plan trial/plan.json",
            f"train trial/plan.json {TEXT} {_TRAIN}",
        ),
    ),
    (
        "fitted",
        "plan.json",
        (f"compress model {TEXT} {SIZES} --plan trial/plan.json --no-verify -o out",),
    ),
    (
        "texts",
        "notes.txt",
        (
            "eval model --text trial/notes.txt --tokens 32",
            "eval model --text trial --tokens 32",
            f"train plan.json --text trial/notes.txt {_TRAIN}",
        ),
    ),
    ("cut", f"config.json {_WEIGHTS}", ("export trial --to padded --no-check -o out",)),
    ("model", f"config.json {_WEIGHTS}", ("export trial --to gguf --no-check -o out.gguf",)),
    (
        "gguf",
        "tiny.gguf",
        (
            f"eval trial/tiny.gguf {TEXT} --tokens 32",
            f"compress trial/tiny.gguf {TEXT} {SIZES} {CUT} --no-verify -o out",
        ),
    ),
    ("images", "3.png", ("profile vit --images trial --device cpu -o out",)),
    ("vit", "preprocessor_config.json config.json", ("profile trial --images images -o out",)),
    (
        "pixels",
        "pixels.safetensors",
        ("profile vit --images trial/pixels.safetensors -o out",),
    ),
    (
        "vectors",
        "vectors.npy",
        ("theory allocate --width 64 --kernel 1,1 --vectors trial/vectors.npy",),
    ),
    ("results", "run.json results.json trials/bound-curve.jsonl", ("reproduce --draw -o trial",)),
    ("results", "run.json trials/bound-curve.jsonl", (f"{_REPRODUCE} trial",)),
)


_READERS: dict[str, Callable[[Path], object]] = {
    "comparison": read_comparison,
    "export": read_export,
    "questions": lambda trial: read_tasks(("piqa",), str(trial)),
    "self-text": read_self_text,
    "cut": lambda trial: (read_cut_record(trial), read_verification(trial)),
    "gguf": lambda trial: dequantise(trial / "tiny.gguf", Path("cache")),
    "images": lambda trial: ImageReader("vit", (3, 6, 8)).pixels(read_images(str(trial))),
    "model": lambda trial: open_source(trial).load(device="cpu"),
    "pixels": lambda trial: read_images(str(trial / "pixels.safetensors")),
    "plan": lambda trial: read_plan(trial / "plan.json"),
    "profile": Profile.read,
    "recipe": lambda trial: read_recipe(trial / "recipe.yaml"),
    "report": read_report_source,
    "text": lambda trial: read_source(str(trial / "notes.txt")),
    "tokenizer": lambda trial: load_tokenizer(str(trial)),
}
_LIBRARY = (
    ("model", f"config.json {_WEIGHTS}", "model"),
    ("model", "config.json tokenizer.json tokenizer_config.json", "tokenizer"),
    ("sharded", "model.safetensors.index.json model-00002-of-00003.safetensors", "model"),
    ("cut", f"config.json {_WEIGHTS}", "model"),
    ("cut", "headwise.json verify.json", "cut"),
    ("cut", "headwise.json verify.json config.json", "report"),
    ("cut", "recipe.yaml", "recipe"),
    ("profile", "profile.json profile.safetensors", "profile"),
    ("profile", "recipe.yaml", "recipe"),
    ("run", "run.json plan.json metrics.jsonl", "report"),
    ("compared", "compare.json", "comparison"),
    ("plans", "plan.json", "plan"),
    ("records", "export.json", "export"),
    ("records", "piqa.jsonl", "questions"),
    ("records", "self-text.json", "self-text"),
    ("texts", "notes.txt", "text"),
    ("gguf", "tiny.gguf", "gguf"),
    ("images", "3.png", "images"),
    ("pixels", "pixels.safetensors", "pixels"),
)


VERBS = tuple(
    Target(folder, file, tuple(words.split()))
    for folder, files, commands in _READ
    for words in commands
    for file in files.split()
)
READERS = tuple(
    Target(folder, file, ("read", reader))
    for folder, files, reader in _LIBRARY
    for file in files.split()
)
# A reader is quick, a verb is not: of three cases two are of readers.
TARGETS = tuple(
    target
    for i, verb in enumerate(VERBS)
    for target in (verb, READERS[2 * i % len(READERS)], READERS[(2 * i + 1) % len(READERS)])
)


@dataclass(frozen=True)
class Spoken:
    """What a command line came to."""

    code: int
    out: str
    err: str


def run(words: tuple[str, ...]) -> Spoken:
    """A command line in this process; anything but SystemExit passes through."""
    if words[0] == "read":
        return _read(words[1])
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["headwise", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main.main()
    except SystemExit as end:
        return Spoken(int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("a command always ends with an exit code")


def _read(reader: str) -> Spoken:
    try:
        _READERS[reader](Path("trial"))
    except HeadwiseError as error:
        return Spoken(2, "", f"Error: {printable(str(error), keep='')}\n")
    return Spoken(0, "", "")


def make_place(place: Path) -> None:
    """Everything that is damaged; the working directory must be `place`."""
    make_small_place(place)
    _must(f"compress model {TEXT} {SIZES} {CUT} --verify-tokens 32 -o cut")
    (place / "cut.profile").rename(place / "profile")
    (place / "fitted").mkdir()
    _must(f"plan fit profile {CUT} -o fitted/plan.json")
    _make_sharded(place)
    steps = f"train plan.json {TEXT} --steps 2 --save-every 1 --eval-every 1 --keep 2 --device cpu"
    _must(f"{steps} -o run")
    shutil.copytree(place / "run", place / "unfinished")
    shutil.rmtree(place / "unfinished" / "model")
    record = json.loads((place / "unfinished" / "run.json").read_text())
    (place / "unfinished" / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    _must(f"{_COMPARE} compared")
    _must(f"{_REPRODUCE} results")
    _make_images(place)
    _make_gguf(place)


def make_small_place(place: Path) -> None:
    """What is quickly made: a model, texts and plans, for the fast lane."""
    tiny.write_llama(place, characters=3_000, vocab_size=263, **_LLAMA)
    _make_texts_and_plans(place)


def _must(words: str) -> None:
    done = run(tuple(words.split()))
    assert done.code == 0, (words, done)


def _make_texts_and_plans(place: Path) -> None:
    for folder in ("texts", "plans", "vectors", "records"):
        (place / folder).mkdir()
    shutil.copy(place / "text.txt", place / "texts" / "notes.txt")
    plan = Plan.uniform(SHAPE).to_json()
    (place / "plan.json").write_text(plan)
    (place / "plans" / "plan.json").write_text(plan)
    export = {"key": "0", "model": "model", "target": "stock", "architecture": "x", "dtype": "y"}
    write_record(place / "records" / EXPORT_RECORD, ExportRecord(**export, notes=("a note",)))
    own = SelfTextRecord(
        key="0", model="model", weights_sha256="0", tokens=9, seed=0, documents=("one", "two")
    )
    write_record(place / "records" / SELF_TEXT_RECORD, own)
    question = {"query": "what", "choices": ["this", "that"], "gold": 1}
    (place / "records" / "piqa.jsonl").write_text(2 * f"{json.dumps(question)}\n")
    np.save(place / "vectors" / "vectors.npy", np.random.default_rng(0).normal(size=(40, 6)))


def _make_sharded(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(place / "model", place / "sharded")
    (place / "sharded" / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    model.save_pretrained(place / "sharded", max_shard_size="20KB")
    names = sorted((place / "sharded").glob("*.safetensors"))
    assert len(names) == 3, names


def _make_images(place: Path) -> None:
    from PIL import Image
    from safetensors.numpy import save_file

    tiny.stock("vit").save_pretrained(place / "vit")
    processor = {"size": {"height": 6, "width": 8}}
    (place / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    for folder in ("images", "pixels"):
        (place / folder).mkdir()
    rng = np.random.default_rng(3)
    for i in range(5):
        photo = rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)
        Image.fromarray(photo).save(place / "images" / f"{i}.png")
    pixels = rng.normal(size=(5, *tiny.IMAGE)).astype(np.float16)
    save_file({"pixel_values": pixels}, place / "pixels" / "pixels.safetensors")


def _make_gguf(place: Path) -> None:
    """The model as a GGUF file; the order of rows within a head does not matter here."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (place / "gguf").mkdir()
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    writer = gguf.GGUFWriter(place / "gguf" / "tiny.gguf", "llama")
    writer.add_block_count(_LLAMA["num_hidden_layers"])
    writer.add_context_length(_LLAMA["max_position_embeddings"])
    writer.add_embedding_length(_LLAMA["hidden_size"])
    writer.add_feed_forward_length(_LLAMA["intermediate_size"])
    writer.add_head_count(_LLAMA["num_attention_heads"])
    writer.add_head_count_kv(_LLAMA["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tiny.add_gguf_tokenizer(writer, AutoTokenizer.from_pretrained(place / "model"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, _LLAMA["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(module)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

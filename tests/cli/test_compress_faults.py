"""Broken input and a full disk: one sentence, exit code 2, and a good output stays as it was."""

import gc
import json
import resource
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file

from tests import lanes


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama, run_command):
    """A tiny sharded model, its text, its profile, and a good cut of it."""
    folder = tmp_path_factory.mktemp("faults")
    write_llama(
        folder,
        characters=20_000,
        vocab_size=293,
        shard="60KB",
        hidden_size=48,
        intermediate_size=61,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=64,
    )
    run_command(*words(folder, folder / "good", "--attn-params", "70%"))
    return folder


def words(place, out, *more, model=None, text=None, profile=None):
    where = (model or place / "model", "--text", text or place / "text.txt", "-o", out)
    sizes = ("--length", "32", "--tokens", "640", "--multiple-of", "2", "--no-verify")
    sizes += ("--recover", "0")
    prepared = ("--profile", profile or place / "profile")
    return [str(w) for w in ("compress", *where, *sizes, *prepared, *more)]


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def out(place, tmp_path):
    """A copy of the good output; it must be the same, and alone, after whatever happens."""
    folder = tmp_path / "outputs" / "out"
    shutil.copytree(place / "good", folder)
    yield folder
    assert contents(folder) == contents(place / "good")
    assert not [p for p in folder.parent.iterdir() if p.name.startswith(".")]


@pytest.fixture
def broken(place, tmp_path):
    """A copy of the model, to be broken."""
    return shutil.copytree(place / "model", tmp_path / "model")


def changed(model, name, change):
    """Change one tensor of a sharded checkpoint in place."""
    for shard in model.glob("*.safetensors"):
        state = load_file(shard)
        if name in state:
            change(state[name])
            save_file(state, shard, metadata={"format": "pt"})
            return
    raise AssertionError(name)


def one_sentence(result, *parts):
    assert result.code == 2, result.err
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert "Traceback" not in result.err
    for part in parts:
        assert part in last


@pytest.fixture(params=["profiled", "not profiled"])
def profile(request, place, broken, tmp_path):
    """A profile made before the damage, so that the cut itself has to notice; or none yet."""
    made = tmp_path / "profile"
    if request.param == "profiled":
        shutil.copytree(place / "profile", made)
        record = json.loads((made / "profile.json").read_text())
        (made / "profile.json").write_text(json.dumps(record | {"model": str(broken)}))
    return made


@pytest.fixture
def forced(headwise, place, out, tmp_path):
    """Cut over the good output."""

    def run(model, **changes):
        changes.setdefault("profile", tmp_path / "profile")
        return headwise(
            *words(place, out, "--attn-params", "60%", "--force", model=model, **changes)
        )

    return run


def test_a_truncated_shard(forced, broken, profile):
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    one_sentence(forced(broken), shard.name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj"])
def test_weights_that_are_no_numbers(forced, broken, profile, name, value):
    changed(broken, f"model.layers.1.{name}.weight", lambda tensor: tensor[3].fill_(value))
    one_sentence(forced(broken), f"layers.1.{name}", "NaN")


def test_a_missing_shard(forced, broken, profile):
    shard = sorted(broken.glob("*.safetensors"))[1]
    shard.unlink()
    one_sentence(forced(broken), shard.name)


def without(model, name):
    """Take one tensor out of a sharded checkpoint, and out of its index."""
    index = model / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shard = model / data["weight_map"].pop(name)
    state = load_file(shard)
    del state[name]
    save_file(state, shard, metadata={"format": "pt"})
    index.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_a_checkpoint_that_lacks_a_tensor(headwise, forced, broken, place, tmp_path, name):
    without(broken, name)
    one_sentence(forced(broken), f"lacks {name}")
    text = ("--text", place / "text.txt")
    for command in (
        ("profile", broken, *text, "-o", tmp_path / "made", "--tokens", "64", "--length", "32"),
        ("eval", broken, *text, "--tokens", "64"),
        ("verify", place / "good", "--against", broken, *text, "--tokens", "64"),
        ("generate", broken, "--prompt", "def"),
    ):
        one_sentence(headwise(*command), f"lacks {name}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_is_generated_from_weights_that_are_no_numbers(headwise, broken, value):
    name = "model.layers.1.mlp.up_proj.weight"
    changed(broken, name, lambda tensor: tensor[3].fill_(value))
    result = headwise("generate", broken, "--prompt", "def")
    one_sentence(result, name, "NaN")
    assert not result.out


def test_a_profile_of_other_weights(forced, broken, place, tmp_path):
    made = shutil.copytree(place / "profile", tmp_path / "profile")
    record = json.loads((made / "profile.json").read_text())
    (made / "profile.json").write_text(json.dumps(record | {"model": str(broken)}))
    changed(broken, "model.layers.1.mlp.up_proj.weight", lambda tensor: tensor[3].mul_(2))
    one_sentence(forced(broken), "made from other weights")


def test_a_tokenizer_of_more_tokens_than_the_model_knows(headwise, forced, broken, place, tmp_path):
    """The model's vocabulary is made smaller than its tokenizer's."""
    index = json.loads((broken / "model.safetensors.index.json").read_text())["weight_map"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state = load_file(broken / index[name])
        state[name] = state[name][:200].clone()
        save_file(state, broken / index[name], metadata={"format": "pt"})
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    one_sentence(forced(broken), "the tokenizer gives token", "vocabulary has 200")
    cut = tmp_path / "cut"
    shutil.copytree(place / "good", cut)
    state = load_file(cut / "model.safetensors")
    for name in ("backbone.model.embed_tokens.weight", "backbone.lm_head.weight"):
        state[name] = state[name][:200].clone()
    save_file(state, cut / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((cut / "config.json").read_text())
    config["backbone"]["vocab_size"] = 200
    (cut / "config.json").write_text(json.dumps(config))
    words = ("recover", cut, "--against", broken, "--text", place / "text.txt")
    result = headwise(*words, "-o", tmp_path / "back", "--tokens", "64", "--length", "32")
    one_sentence(result, "the tokenizer gives token", "vocabulary has 200")
    assert not (tmp_path / "back.partial").exists()


def test_text_shorter_than_a_window(forced, place, tmp_path):
    (tmp_path / "short.txt").write_text("def main(): pass\n")
    result = forced(place / "model", text=tmp_path / "short.txt")
    one_sentence(result, "tokens, but one sequence needs 32")


def test_a_missing_tokenizer(forced, broken):
    for file in broken.glob("tokenizer*"):
        file.unlink()
    one_sentence(forced(broken), "tokenizer")


def test_pickles_only(forced, broken):
    for file in broken.glob("*.safetensors*"):
        file.unlink()
    (broken / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    one_sentence(forced(broken), "pytorch_model.bin", "only safetensors are read")


@pytest.mark.parametrize("room", [9_000, 60_000])
def test_files_that_may_not_grow(forced, place, room):
    """The operating system refuses to write beyond a few kilobytes: at a layer, at the weights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        result = forced(place / "model", profile=place / "profile")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_sentence(result, "could not be written", "what was there before is untouched")


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own; its size can be set."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if shutil.which("mount") is None or not mount("size=64k"):
        pytest.skip("needs to be allowed to mount a file system")
    yield folder, lambda kilobytes: mount("remount", f"size={kilobytes}k")
    gc.collect()  # the error's traceback may hold a part that is mapped from this disk
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("at", lanes.slow_but(("weights",), ("layers", "weights")))
def test_a_full_disk(headwise, place, disk, at):
    folder, resize = disk
    size = sum(len(x) for x in contents(place / "good").values()) // 1024
    assert resize(4 * size)
    out = shutil.copytree(place / "good", folder / "out")
    assert resize(size + {"layers": 60, "weights": 60 + size // 2}[at])
    line = words(place, out, "--attn-params", "60%", "--force")
    one_sentence(headwise(*line), "No space left", "free space")
    assert contents(out) == contents(place / "good")
    left = {p.name for p in folder.iterdir()}
    assert left <= {"out", "out.partial"}
    assert ("out.partial" in left) or at == "layers"
    assert resize(4 * size)
    assert headwise(*line).code == 0
    assert contents(out) != contents(place / "good")
    assert {p.name for p in folder.iterdir()} == {"out"}

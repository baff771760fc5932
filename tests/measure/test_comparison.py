"""Comparisons against sums written out, and counts against plans."""

import math

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

from headwise.errors import HeadwiseError
from headwise.measure.comparison import comparison, embedding_cosines
from headwise.measure.likelihood import likelihood
from headwise.measure.size import cache_bytes, counted, plan_in
from headwise.measure.speed import speeds
from headwise.nn import registration
from headwise.nn.build import convert, plan_of
from headwise.nn.checkpoint import Checkpoint
from headwise.nn.slicing import Kept, sliced
from headwise.planning.cost import cost

registration.install()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB = 101
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 42,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 67,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 10}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "tied": transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True, attention_bias=True),
    "qwen3": transformers.Qwen3Config(**GROUPED),
    "gemma3": transformers.Gemma3TextConfig(
        **GROUPED,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=42, n_layer=3, n_head=6, n_positions=67
    ),
    "neox": transformers.GPTNeoXConfig(**COMMON),
    "bert": transformers.BertConfig(**COMMON),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _stock(name="llama", seed=7):
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict())
    auto = AutoModel if name == "bert" else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.25 if p.ndim > 1 else 0.5))
    return model


@pytest.fixture
def stream():
    return np.random.default_rng(3).integers(0, VOCAB, 60).astype(np.uint32)


def _by_hand(model, reference, stream, window, stride):
    """Every figure token by token, with a forward pass of its own for each."""
    rows, buckets, windows, done = [], {}, [], 0
    while done < len(stream) - 1:
        end = min(len(stream) - 1, window if done == 0 else done + stride)
        for target in range(done + 1, end + 1):
            start = max(0, end - window)
            ids = torch.from_numpy(stream[start:target].astype(np.int64))[None]
            with torch.no_grad():
                q, p = (m(ids).logits[0, -1].double().log_softmax(-1) for m in (model, reference))
            kl = float((p.exp() * (p - q)).sum())
            agreed = float(q.argmax() == p.argmax())
            rows.append((-float(q[stream[target]]), -float(p[stream[target]]), agreed, kl))
            seen = target - start
            bucket = next(b for b in range(20) if seen <= 2**b)
            buckets.setdefault(bucket, []).append(kl)
        windows.append(np.mean([row[3] for row in rows[done:]]))
        done = end
    return np.mean(rows, 0), buckets, windows


@pytest.mark.parametrize(("window", "stride"), [(16, None), (13, 5), (59, None), (200, None)])
def test_every_figure_is_the_one_written_out(window, stride, stream):
    model, reference = _stock(seed=7), _stock(seed=8)
    found = comparison(model, reference, stream, window=window, stride=stride)
    means, buckets, windows = _by_hand(model, reference, stream, window, stride or window)
    got = (found.nll, found.reference_nll, found.top_agreement, found.kl)
    np.testing.assert_allclose(got, means, rtol=1e-4)
    assert found.tokens == 59
    assert found.window_kl == pytest.approx(windows, rel=1e-4)
    assert found.ratio == pytest.approx(math.exp(means[0] - means[1]), rel=1e-4)
    assert [d.last for d in found.drift] == [2**b for b in sorted(buckets)]
    for drift, b in zip(found.drift, sorted(buckets), strict=True):
        assert drift.tokens == len(buckets[b])
        assert drift.first == (2 ** (b - 1) + 1 if b else 1)
        assert drift.kl == pytest.approx(np.mean(buckets[b]), rel=1e-4)


def test_the_likelihoods_are_those_of_eval(stream):
    model, reference = _stock(seed=7), _stock(seed=8)
    found = comparison(model, reference, stream, window=16, stride=8)
    assert found.nll == pytest.approx(likelihood(model, stream, window=16).nll, rel=1e-6)
    whole = likelihood(reference, stream, window=16)
    assert found.reference_nll == pytest.approx(whole.nll, rel=1e-6)


def test_a_model_against_itself_has_lost_nothing(stream):
    model = _stock()
    ticks = []
    found = comparison(model, model, stream, window=16, tick=lambda *t: ticks.append(t))
    assert (found.ratio, found.top_agreement, found.kl) == (1.0, 1.0, 0.0)
    assert ticks[-1] == (59, 59)


def test_bad_input_is_one_sentence(stream):
    model, other = _stock(), _stock("gpt2")
    with pytest.raises(HeadwiseError, match="stride from 1 to window"):
        comparison(model, model, stream, window=4, stride=5)
    with pytest.raises(HeadwiseError, match="no token to score"):
        comparison(model, model, stream[:1])
    other.resize_token_embeddings(VOCAB + 2)
    with pytest.raises(HeadwiseError, match="one vocabulary, got 101 and 103"):
        comparison(model, other, stream, window=16)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(HeadwiseError, match="not numbers"):
        comparison(model, _stock(), stream, window=16)


def _cut(stock):
    """Some planes and value columns fewer in every head, where the family allows it."""
    model = convert(stock)
    normed = stock.config.model_type in ("qwen3", "gemma3_text")
    kept = []
    for i, layer in enumerate(plan_of(model).layers):
        row = []
        for head in layer.heads:
            planes = range(len(head.rotary_planes))
            free = range(head.qk_dim - 2 * len(planes))
            fewer = (planes, free) if normed else (planes[i % 2 :], free[i % 2 :])
            row.append(Kept(*fewer, range(head.vo_dim)[1 + i :]))
        kept.append(row)
    return sliced(model, kept)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_files_caches_and_plans_count_alike(name, tmp_path):
    stock = _stock(name)
    cut = _cut(stock)
    for model, folder in ((stock, tmp_path / "stock"), (cut, tmp_path / "cut")):
        model.save_pretrained(folder, max_shard_size="40KB")
        checkpoint = Checkpoint.open(folder)
        planned = cost(plan_in(checkpoint))
        found = counted(checkpoint)
        assert found.attn_params == planned.attn_params
        assert found.total_params == planned.total_params
        assert found.total_params == sum(p.numel() for p in model.parameters())
        if name != "bert":
            numbers = planned.kv_bytes // plan_in(checkpoint).shape.kv_dtype_bytes
            assert cache_bytes(model) == 4 * numbers
    small, whole = (counted(Checkpoint.open(tmp_path / n)) for n in ("cut", "stock"))
    lost = whole.attn_params - small.attn_params
    assert lost > 0
    assert whole.total_params - small.total_params == lost


def test_cosines_ignore_padding_and_see_differences():
    from headwise.data.tokens import trained_tokenizer

    words = trained_tokenizer(["a b c d e f"], 257)
    words.pad_token = words.eos_token
    model, other = _wide_bert(7), _wide_bert(8)
    sentences = ["abc", "a much longer sentence than that", "the third one"]
    same = embedding_cosines(model, model, words, sentences)
    np.testing.assert_allclose(same, 1, rtol=1e-9)
    together = embedding_cosines(model, other, words, sentences)
    alone = [embedding_cosines(model, other, words, [s])[0] for s in sentences]
    np.testing.assert_allclose(together, alone, rtol=1e-4)
    assert max(together) < 0.9


def _wide_bert(seed):
    config = transformers.BertConfig(**{**COMMON, "vocab_size": 263})
    model = AutoModel.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def test_speeds_take_turns(monkeypatch):
    from headwise.measure import speed

    calls = []

    def timed(model, prompt, new_tokens):
        calls.append(model)
        return {"a": 2.0, "b": 4.0}[model] + len(calls) * 1e-9, 8.0

    monkeypatch.setattr(speed, "_timed", timed)
    found = speed.speeds(("a", "b"), prompt=128, new_tokens=16, repeats=3)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]  # one warm-up each, then in turns
    assert [s.prefill.median for s in found] == pytest.approx([64, 32])
    assert [s.decode.median for s in found] == pytest.approx([2, 2])
    assert all(s.prefill.low <= s.prefill.median <= s.prefill.high for s in found)


def test_speeds_of_real_models():
    found = speeds((_stock(), _cut(_stock())), prompt=11, new_tokens=2, repeats=1)
    assert all(s.prefill.median > 0 and s.decode.median > 0 for s in found)
    (encoder,) = speeds((_stock("bert"),), prompt=11, new_tokens=0, repeats=1)
    assert encoder.decode is None

"""Comparisons against sums written out, and counts against plans."""

import math

import numpy as np
import pytest
import torch

from headwise.data.tokens import train_tokenizer
from headwise.errors import HeadwiseError
from headwise.measure.comparison import embedding_cosines, text_comparison
from headwise.measure.likelihood import likelihood
from headwise.measure.size import cache_bytes, counted
from headwise.models.build import convert
from headwise.planning.cost import cost
from headwise.source import open_source
from tests import lanes, tiny

FAMILIES = (
    *("llama", "llama_tied", "llama_biased", "qwen3", "gemma3_text", "gpt2", "gpt_neox"),
    "bert_bare",
)


@pytest.fixture
def stream():
    return np.random.default_rng(3).integers(0, tiny.VOCAB, 60).astype(np.uint32)


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


@pytest.mark.parametrize(
    ("window", "stride"), lanes.slow_but(((13, 5),), ((16, None), (13, 5), (59, None), (200, None)))
)
def test_every_figure_is_the_one_written_out(window, stride, stream):
    model, reference = tiny.stock("llama", seed=7), tiny.stock("llama", seed=8)
    found = text_comparison(model, reference, stream, window=window, stride=stride)
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
    model, reference = tiny.stock("llama", seed=7), tiny.stock("llama", seed=8)
    found = text_comparison(model, reference, stream, window=16, stride=8)
    assert found.nll == pytest.approx(likelihood(model, stream, window=16).nll, rel=1e-6)
    whole = likelihood(reference, stream, window=16)
    assert found.reference_nll == pytest.approx(whole.nll, rel=1e-6)


def test_a_model_against_itself_has_lost_nothing(stream):
    model = tiny.stock("llama")
    seen = []
    found = text_comparison(model, model, stream, window=16, progress=lambda *t: seen.append(t))
    assert (found.ratio, found.top_agreement, found.kl) == (1.0, 1.0, 0.0)
    assert seen[-1] == ("scoring", 59, 59)


def test_bad_input_is_one_sentence(stream):
    model, other = tiny.stock("llama"), tiny.stock("gpt2")
    with pytest.raises(HeadwiseError, match="stride from 1 to window"):
        text_comparison(model, model, stream, window=4, stride=5)
    with pytest.raises(HeadwiseError, match="no token to score"):
        text_comparison(model, model, stream[:1])
    other.resize_token_embeddings(tiny.VOCAB + 2)
    with pytest.raises(HeadwiseError, match="the same vocabulary, got 101 and 103"):
        text_comparison(model, other, stream, window=16)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(HeadwiseError, match="NaN or infinite"):
        text_comparison(model, tiny.stock("llama"), stream, window=16)


@pytest.mark.parametrize("name", lanes.slow_but(tiny.QUICK, FAMILIES))
def test_files_caches_and_plans_count_alike(name, tmp_path):
    stock = tiny.stock(name)
    cut = tiny.narrowed(convert(stock))
    plans = []
    for model, folder in ((stock, tmp_path / "stock"), (cut, tmp_path / "cut")):
        model.save_pretrained(folder, max_shard_size="40KB")
        source = open_source(folder)
        plans.append(source.plan)
        planned = cost(source.plan)
        found = counted(source)
        assert found.attn_params == planned.attn_params
        assert found.params == planned.params
        assert found.params == sum(p.numel() for p in model.parameters())
        if name != "bert_bare":
            numbers = planned.kv_bytes // source.plan.shape.kv_dtype_bytes
            assert cache_bytes(model) == 4 * numbers
    small, whole = (counted(open_source(tmp_path / n)) for n in ("cut", "stock"))
    lost = whole.attn_params - small.attn_params
    assert lost > 0
    of_mlps = cost(plans[0]).ffn_params - cost(plans[1]).ffn_params
    assert whole.params - small.params == lost + of_mlps


def test_cosines_ignore_padding_and_see_differences():
    words = train_tokenizer(["a b c d e f"], 257)
    words.pad_token = words.eos_token
    model, other = (
        tiny.stock("bert_bare", seed=7, vocab_size=263),
        tiny.stock("bert_bare", seed=8, vocab_size=263),
    )
    sentences = ["abc", "a much longer sentence than that", "the third one"]
    same = embedding_cosines(model, model, words, sentences)
    np.testing.assert_allclose(same, 1, rtol=1e-9)
    together = embedding_cosines(model, other, words, sentences)
    alone = [embedding_cosines(model, other, words, [s])[0] for s in sentences]
    np.testing.assert_allclose(together, alone, rtol=1e-4)
    assert max(together) < 0.9

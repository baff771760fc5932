import math

import numpy as np
import pytest
import torch

from headwise import memory
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import Likelihood, likelihood, sliding_windows
from tests import tiny


class Known(torch.nn.Module):
    """After token t, says t + 1 (mod V) with log-odds `sure` against each other token."""

    def __init__(self, vocabulary: int, sure: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, 1)
        self.vocabulary, self.sure, self.lengths = vocabulary, sure, []
        self.config = type("C", (), {"get_text_config": lambda s: s, "vocab_size": vocabulary})()
        self.device = torch.device("cpu")

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, use_cache):
        self.lengths.append(tuple(input_ids.shape))
        following = (input_ids + 1) % self.vocabulary
        logits = torch.nn.functional.one_hot(following, self.vocabulary) * self.sure
        return type("O", (), {"logits": logits})()


@pytest.mark.parametrize("n", [1, 2, 5, 7, 8, 13, 29, 30])
@pytest.mark.parametrize(("window", "stride"), [(7, 7), (7, 3), (7, 1), (1, 1), (5, 2)])
def test_every_token_is_scored_once_with_context(n, window, stride):
    windows = list(sliding_windows(n, window, stride))
    scored = [t for w in windows for t in range(w.scored_from, w.end + 1)]
    assert scored == list(range(1, n + 1))
    for w in windows:
        assert w.end - w.start == min(window, n)  # all windows as long as the first
        for token in range(w.scored_from, w.end + 1):
            assert token - w.start >= min(window - stride + 1, token)  # tokens seen before it


def test_the_sum_is_the_hand_computed_one():
    """Sure by ln 6 among 7 tokens: the next one has 6/12, each other 1/12."""
    model = Known(7, math.log(6))
    stream = np.array([0, 1, 2, 5, 6, 0, 0], dtype=np.uint32)
    # Steps 0→1, 1→2, 5→6, 6→0 are foreseen; 2→5 and 0→0 are not.
    expected = 4 * math.log(2) + 2 * math.log(12)
    for window, stride in ((6, 6), (4, 2), (3, 1), (2, 2), (1, 1)):
        result = likelihood(model, stream, window=window, stride=stride)
        assert result.tokens == 6
        assert result.nll_sum == pytest.approx(expected, abs=1e-5)  # fp32 logits
        assert result.perplexity == pytest.approx(math.exp(expected / 6), rel=1e-5)
    assert result.bits_per_byte(3) == pytest.approx((4 + 2 * math.log2(12)) / 3, rel=1e-5)


def test_tokens_weigh_equally_and_windows_do_not():
    """The last window holds one token; a mean of window means would count it like four."""
    model = Known(7, math.log(6))
    stream = np.array([0, 1, 2, 3, 4, 0], dtype=np.uint32)  # only the last is unforeseen
    result = likelihood(model, stream, window=4, stride=4)
    assert result.nll == pytest.approx((4 * math.log(2) + math.log(12)) / 5, rel=1e-5)
    per_window = (math.log(2) + math.log(12)) / 2
    assert abs(result.nll - per_window) > 0.5


def test_windows_run_together_give_the_same_sum(monkeypatch):
    model = tiny.stock("gpt2", vocab_size=31)
    stream = np.random.default_rng(0).integers(31, size=97)
    together = likelihood(model, stream, window=11, stride=5)
    monkeypatch.setattr(memory, "LOGIT_BYTES", 1)
    single = likelihood(model, stream, window=11, stride=5)
    assert together.nll_sum == pytest.approx(single.nll_sum, rel=1e-6)
    by_hand = 0.0
    with torch.no_grad():
        for t in range(1, 97):  # the most context the rule allows, token by token
            end = t if t <= 11 else next(e for e in [*range(11, 96, 5), 96] if e >= t)
            seen = torch.from_numpy(stream[max(0, end - 11) : t])
            logits = model(seen[None]).logits[0, -1]
            by_hand -= float(logits.log_softmax(-1)[stream[t]])
    assert single.nll_sum == pytest.approx(by_hand, rel=1e-5)
    assert likelihood(model, stream, window=11, stride=11).nll_sum != pytest.approx(
        by_hand, rel=1e-4
    )


def test_bad_sizes_and_foreign_tokens_are_refused():
    model = Known(7, 1.0)
    with pytest.raises(HeadwiseError, match="stride from 1 to window"):
        likelihood(model, np.arange(5), window=3, stride=4)
    with pytest.raises(HeadwiseError, match="no token to score"):
        likelihood(model, np.arange(1), window=3)
    with pytest.raises(HeadwiseError, match="token id 7, but the model's vocabulary has 7"):
        likelihood(model, np.arange(8), window=3)


def test_a_hopeless_model_has_infinite_perplexity():
    assert Likelihood(nll_sum=1e6, tokens=1, window=1, stride=1).perplexity == math.inf

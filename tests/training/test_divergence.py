"""The loss of recovery in pieces, and its gradient, are those of torch's own functions."""

import pytest
import torch
from torch.nn import functional

from headwise.training import divergence as module
from headwise.training.divergence import divergence

TOKENS, VOCABULARY, SHARE = (3, 7), 13, 0.5


@pytest.fixture
def logits():
    torch.manual_seed(2)
    given = (4 * torch.randn(*TOKENS, VOCABULARY)).requires_grad_()
    return given, 4 * torch.randn(*TOKENS, VOCABULARY), torch.randint(VOCABULARY, TOKENS)


def _whole(given, wanted, labels, share=SHARE):
    """The same from torch's own functions, all tokens at once."""
    given, wanted = given.flatten(0, 1), wanted.flatten(0, 1)
    logs, target = given.float().log_softmax(-1), wanted.float().log_softmax(-1)
    kl = functional.kl_div(logs, target, log_target=True, reduction="batchmean")
    nll = functional.cross_entropy(given.float(), labels.flatten())
    return kl + share * nll, kl, nll


@pytest.mark.parametrize("rows", [1, 2, 5, 21, 100])
def test_it_is_the_sum_of_both_losses(logits, monkeypatch, rows):
    monkeypatch.setattr(module, "ON_CPU", rows * VOCABULARY)
    given, wanted, labels = logits
    found, expected = divergence(given, wanted, labels, share=SHARE), _whole(*logits)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(3 * found[0], given)
    (whole,) = torch.autograd.grad(3 * expected[0], given)
    torch.testing.assert_close(slope, whole)
    other = torch.autograd.grad(3 * _whole(*logits, share=0.4)[0], given)[0]
    assert (slope - other).abs().max() > 1e-3  # another share is another gradient


def test_bf16_logits_have_a_bf16_gradient(logits):
    given, wanted, labels = logits
    rounded = given.detach().bfloat16().requires_grad_()
    loss, _, _ = divergence(rounded, wanted.bfloat16(), labels, share=SHARE)
    expected = _whole(rounded.detach().float(), wanted.bfloat16(), labels)[0]
    torch.testing.assert_close(loss, expected)  # the sums are in float32
    (slope,) = torch.autograd.grad(loss, rounded)
    (whole,) = torch.autograd.grad(_whole(given, wanted, labels)[0], given)
    assert slope.dtype == torch.bfloat16
    torch.testing.assert_close(slope.float(), whole, rtol=0.05, atol=0.002)


def test_only_the_loss_has_a_gradient_and_only_to_the_model(logits):
    given, wanted, labels = logits
    loss, kl, nll = divergence(given, wanted.requires_grad_(), labels, share=SHARE)
    assert loss.requires_grad
    assert not kl.requires_grad
    assert not nll.requires_grad
    loss.backward()
    assert given.grad is not None
    assert wanted.grad is None
    with torch.no_grad():
        torch.testing.assert_close(divergence(given, wanted, labels, share=SHARE)[0], loss.detach())

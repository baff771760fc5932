import math

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.training.optimizer import adamw, decayed_names, moments, restore_moments
from headwise.training.settings import TrainSettings


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.linear = torch.nn.Linear(3, 2)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight


SETTINGS = TrainSettings(lr=0.1, weight_decay=0.5)


def test_only_matrices_that_are_no_embeddings_decay():
    assert decayed_names(Net()) == {"linear.weight"}


def test_decay_is_decoupled_from_the_gradient():
    """With a zero gradient, w ← w·(1 − lr·decay) and the others stay."""
    net = Net()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer = adamw(net, SETTINGS)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        factor = 1 - 0.1 * 0.5 if name == "linear.weight" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


def test_the_first_update_is_the_hand_computed_one():
    """Adam's first step is lr·g/(|g| + eps), whatever the betas."""
    net = Net()
    optimizer = adamw(net, SETTINGS)
    before = net.norm.bias.detach().clone()
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.3)
    optimizer.step()
    step = 0.1 * 0.3 / (0.3 + 1e-8)
    torch.testing.assert_close(net.norm.bias.detach(), before - step)
    saved = moments(net, optimizer)
    assert saved["norm.bias/exp_avg"][0].item() == pytest.approx(0.03)
    assert saved["norm.bias/exp_avg_sq"][0].item() == pytest.approx(0.05 * 0.09)
    assert saved["norm.bias/step"].item() == 1
    assert math.isclose(len(saved), 3 * 5)  # 5 parameters: the tied one counts once


def test_restored_moments_continue_exactly():
    torch.manual_seed(0)
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    first, second = adamw(one, SETTINGS), adamw(other, SETTINGS)
    gradients = [[torch.randn_like(p) for p in one.parameters()] for _ in range(4)]

    def stepped(net, optimizer, several):
        for some in several:
            for p, g in zip(net.parameters(), some, strict=True):
                p.grad = g.clone()
            optimizer.step()

    stepped(one, first, gradients)
    stepped(other, second, gradients[:2])
    fresh = adamw(other, SETTINGS)
    restore_moments(other, fresh, moments(other, second))
    stepped(other, fresh, gradients[2:])
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(HeadwiseError, match="no parameter to train"):
        adamw(Net().requires_grad_(False), SETTINGS)


def test_a_relative_rate_moves_every_tensor_by_a_share_of_its_size():
    """Adam's first step moves each number by its rate, which is lr × root mean square."""
    net = Net()
    with torch.no_grad():
        net.linear.weight.mul_(100)
        net.linear.bias.zero_()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer = adamw(net, TrainSettings(lr=0.1, lr_relative=True, weight_decay=0.0))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    for group in optimizer.param_groups:  # as the loop does it
        group["lr"] = 0.1 * group["scale"]
    optimizer.step()
    for name, p in net.named_parameters():
        size = float(before[name].square().mean().sqrt()) or 1.0  # zeros have no size
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * size, rtol=1e-4, atol=1e-5)


def test_without_a_relative_rate_every_tensor_has_the_same():
    assert {group["scale"] for group in adamw(Net(), SETTINGS).param_groups} == {1.0}

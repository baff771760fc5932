"""What a profile says of an MLP's neurons, against gates that are really there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwise.models.backbones_headwise import family_of, stock_attentions
from headwise.models.build import inner
from headwise.profiling.run import profile_model
from tests import lanes, tiny
from tests.profiling.gates import sequence_losses


@pytest.mark.parametrize(
    "family", lanes.slow_but(("phi3", "gpt2"), ("llama", "phi3", "gpt2", "opt", "bert", "vit"))
)
def test_neurons_have_the_sensitivity_of_explicit_gates(tmp_path, family):
    job = tiny.profile_job(tiny.stock(family).double(), family)
    profile = profile_model(job, tmp_path / "p")
    stock = inner(job.model)
    mlp = family_of(stock.config.model_type).mlp
    gates, seen, hooks = [], [], []
    for layer, _ in stock_attentions(stock):
        down = layer.get_submodule(mlp.down)
        gate = torch.ones(tiny.FFN, dtype=torch.float64, requires_grad=True)

        def close(module, args, gate=gate):
            seen.append(args[0].detach().reshape(-1, tiny.FFN))
            return (args[0] * gate,)

        gates.append(gate)
        hooks.append(down.register_forward_pre_hook(close))
    losses, counts = sequence_losses(job)
    for hook in hooks:
        hook.remove()
    rows = [torch.autograd.grad(loss, gates, retain_graph=True) for loss in losses]
    root = counts.detach().sqrt()
    for i in range(tiny.LAYERS):
        found = profile.get(i, "ffn_sensitivity")
        gradients = np.stack([(row[i] / root[s]).numpy() for s, row in enumerate(rows)])
        expected = np.square(gradients).mean(0)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5 * expected.max())
        # The control: the neighbours' are others.
        assert np.abs(np.roll(found, 1) - expected).max() > 0.1 * expected.max()
        tokens = torch.cat(seen[i :: tiny.LAYERS])
        mean = profile.get(i, "ffn_mean")
        assert mean == pytest.approx(tokens.mean(0).numpy(), abs=1e-5 * float(tokens.abs().max()))
        weight = list(stock_attentions(stock))[i][0].get_submodule(mlp.down).weight.detach()
        columns = (weight.T if mlp.transposed else weight).square().sum(0)
        energy = (tokens.square().mean(0) * columns).numpy()
        assert profile.get(i, "ffn_energy") == pytest.approx(energy, rel=1e-4)

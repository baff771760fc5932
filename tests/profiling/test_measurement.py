"""What a profile says, against the plain definition: explicit gates, direct sums, eager softmax."""

import numpy as np
import pytest
import torch

from headwise.models.heads_headwise import HeadClass
from headwise.profiling.run import measure_chunk, profile_model
from headwise.theory.saturation import jacobian_norm
from tests import lanes, tiny
from tests.profiling.gates import gated, open_gates, sequence_losses

FAMILIES = ("llama", "gpt2", "gpt_neox", "bert", "bert_bare", "vit", "vit_bare")


def make_job(name, **options):
    """A job in double precision, so that sums can be compared to many digits."""
    return tiny.profile_job(tiny.stock(name).double(), name, **options)


def by_autograd(job, profile):
    """∂L_s/∂gate / √n_s of every sequence, by gates that are really there."""
    gates = open_gates(profile)
    leaves = [(i, part) for i, layer in enumerate(gates) for part in layer]
    with gated(job.model, profile, gates):
        losses, counts = sequence_losses(job)
        rows = [
            torch.autograd.grad(loss, [gates[i][p] for i, p in leaves], retain_graph=True)
            for loss in losses
        ]
    root = counts.detach().sqrt()
    return {
        leaf: np.stack([(row[n] / root[s]).numpy() for s, row in enumerate(rows)])
        for n, leaf in enumerate(leaves)
    }


@pytest.mark.parametrize("family", lanes.slow_but(("llama", "gpt_neox", "vit"), FAMILIES))
def test_gate_gradients_are_those_of_explicit_gates(tmp_path, family):
    job = make_job(family)
    profile = profile_model(job, tmp_path / "p")
    expected = by_autograd(job, profile)
    assert {part for _, part in expected} == {
        "llama": {"vo", "plane"},
        "gpt_neox": {"vo", "plane", "free"},
    }.get(family, {"vo", "free"})
    for (layer, part), gradients in expected.items():
        found = profile.get(layer, f"{part}_gradients")
        size = np.abs(gradients).max()
        assert np.abs(found - gradients).max() < 1e-5 * size, (layer, part)
        # The control: the wrong head, or the wrong direction, is nowhere near.
        assert np.abs(np.roll(found, 1, axis=1) - gradients).max() > 0.1 * size
        assert np.abs(np.roll(found, 1, axis=2) - gradients).max() > 0.1 * size
        sensitivity = np.square(gradients).mean(0)
        assert profile.get(layer, f"{part}_sensitivity") == pytest.approx(
            sensitivity, rel=1e-3, abs=1e-5 * sensitivity.max()
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_gates_open_are_the_model_itself(tmp_path, family):
    job = make_job(family)
    profile = profile_model(job, tmp_path / "p")
    gates = open_gates(profile)
    plain, _ = sequence_losses(job)
    with gated(job.model, profile, gates):
        whole, _ = sequence_losses(job)
        gates[1]["vo"].data[0, 2] = 0
        cut, _ = sequence_losses(job)
    assert (whole - plain).abs().max() < 1e-9
    assert (cut - plain).abs().max() > 1e-6


@pytest.mark.parametrize(
    "family", lanes.slow_but(("qwen3", "bert"), ("llama", "gpt_neox", "bert", "qwen3", "vit"))
)
def test_moments_are_those_of_the_activations(tmp_path, family):
    job = make_job(family)
    profile = profile_model(job, tmp_path / "p")
    seen = {}
    hooks = []
    for i, a in enumerate(job.model.attentions()):
        for name in ("q", "k"):
            last = getattr(a, f"{name}_norm", None) or getattr(a, f"{name}_proj")
            hooks.append(
                last.register_forward_hook(
                    lambda m, x, out, at=(i, name): seen.update({at: out.detach()})
                )
            )
        hooks.append(
            a.o_proj.register_forward_pre_hook(
                lambda m, x, at=(i, "z"): seen.update({at: x[0].detach()})
            )
        )
    sequence_losses(job)
    for (layer, name), x in seen.items():
        heads = job.model.attentions()[layer].classes[0]
        dim = heads.vo_dim if name == "z" else heads.qk_dim
        rows = x.reshape(-1, heads.n_heads, x[0, 0].numel() // dim // heads.n_heads, dim).numpy()
        moment = np.einsum("nghi,nghj->gij", rows, rows) / len(rows)
        mean = rows.mean(0).reshape(-1, dim)
        assert profile.get(layer, f"{name}_moment") == pytest.approx(moment, rel=1e-4, abs=1e-5)
        assert profile.get(layer, f"{name}_mean") == pytest.approx(mean, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "family", lanes.slow_but(("mistral", "bert"), ("llama", "mistral", "gpt2", "bert"))
)
def test_softmax_rows_are_those_of_eager_attention(tmp_path, family):
    job = make_job(family)
    profile = profile_model(job, tmp_path / "p")
    assert profile.record.lengths == ((13,) if family == "bert" else (4, 8, 13))
    job.model.set_attn_implementation("eager")
    weights = []
    for a in job.model.attentions():
        a.register_forward_hook(lambda m, x, out: weights.append(out[1].detach().double()))
    ids = torch.from_numpy(job.sequences.inputs)
    if family == "bert":
        # Masked tokens are replaced before the model sees them.
        from headwise.profiling.source import probe

        ids = probe("masked-token", ids, tuple(range(7)), 11, 3).inputs
    job.model(input_ids=ids)
    for layer, p in enumerate(weights):
        rows = p[:, :, [3, 7, 12]]  # sequences, heads, positions, keys
        norm = jacobian_norm(rows).mean(0).T
        entropy = torch.special.entr(rows).sum(-1).mean(0).T
        if family == "bert":
            norm, entropy = norm.mean(0, keepdim=True), entropy.mean(0, keepdim=True)
        assert profile.get(layer, "jacobian_norm") == pytest.approx(norm.numpy(), rel=1e-4)
        assert profile.get(layer, "entropy") == pytest.approx(entropy.numpy(), rel=1e-4)
        if family != "bert":
            # log p is the score up to a constant, which a spread does not see.
            last = rows[:, :, -1]
            spread = torch.stack(
                [torch.stack([r[r > 0].log().std(correction=0) for r in s]) for s in last]
            )
            found = profile.get(layer, "score_spread")[-1]
            assert found == pytest.approx(spread.mean(0).numpy(), rel=1e-3)


def test_norms_over_columns_without_positions_leave_queries_and_keys_alone(tmp_path, monkeypatch):
    """No family has them today: the sight of one is made up."""
    job = make_job("qwen3")
    monkeypatch.setattr(job.model.attentions()[0].classes[0], "rotary_dim", 8)
    monkeypatch.setattr(HeadClass, "rotated", lambda self, q, k, cos, sin: (q, k))
    profile = profile_model(job, tmp_path / "p")
    assert profile.record.qk_whole
    assert "not cut" in profile.record.notes[0]
    assert not profile.has(0, "plane_sensitivity")
    assert profile.has(0, "vo_sensitivity")


def test_the_model_is_left_as_it_was():
    job = make_job("llama")
    before = [p.requires_grad for p in job.model.parameters()]
    assert any(before)
    measure_chunk(job, 0)
    assert [p.requires_grad for p in job.model.parameters()] == before
    assert all(p.grad is None for p in job.model.parameters())
    heads = job.model.attentions()[0].classes[0]
    assert "forward" not in vars(heads)
    assert not job.model.attentions()[0].o_proj._forward_pre_hooks


def test_masks_and_probes_belong_to_the_sequence_not_to_the_batch():
    for family in ("bert", "bert_bare"):
        together = measure_chunk(make_job(family, chunk=7), 0)
        alone = measure_chunk(make_job(family, chunk=1), 4)
        assert together["losses"][4] == pytest.approx(float(alone["losses"][0]), rel=1e-9)
        assert together["0.vo_gradient"][4].numpy() == pytest.approx(
            alone["0.vo_gradient"][0].numpy(), rel=1e-6, abs=1e-9
        )


def test_labels_are_drawn_from_the_model_s_own_answer():
    """As often as it gives them, and whichever images run together."""
    from types import SimpleNamespace

    from headwise.profiling.source import probe

    p = torch.tensor([0.7, 0.2, 0.1])
    numbers = tuple(range(3001))

    def losses(some):
        logits = p.log().expand(len(some), 3)
        return probe("label", logits, some, 11).losses(SimpleNamespace(logits=logits))

    found, counts = losses(numbers)
    assert torch.equal(counts, torch.ones(3001))
    for share in p:
        seen = (found + share.log()).abs() < 1e-5
        assert seen.double().mean() == pytest.approx(float(share), abs=0.03)
    assert torch.equal(losses(numbers[7:12])[0], found[7:12])
    assert not torch.equal(losses(numbers[8:13])[0], found[7:12])

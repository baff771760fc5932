"""Odd but honest input that a cut must simply get right: low rank, little text, many shards."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headwise.cutting import run
from headwise.cutting.run import cut_model
from headwise.models.checkpoint import Checkpoint, CheckpointWriter
from headwise.plan import HeadSpec
from tests import lanes
from tests.tolerances import FELT, IDENTITY, difference

RANK = 3


def low_rank(model):
    """Values of every head that use only RANK directions, and one head that uses none."""
    for i, layer in enumerate(model.model.layers):
        heads = layer.self_attn.v_proj.weight.data.unflatten(0, (2, 10))
        for j, head in enumerate(heads):
            U, S, V = torch.linalg.svd(head.double(), full_matrices=False)
            rank = 0 if (i, j) == (1, 0) else RANK
            head.copy_((U[:, :rank] * S[:rank]) @ V[:rank])


def with_values(plan, width):
    """The same plan with value heads of another width."""

    def narrowed(head: HeadSpec) -> HeadSpec:
        return head.model_copy(update={"vo_dim": width})

    layers = [
        layer.model_copy(update={"heads": tuple(map(narrowed, layer.heads))})
        for layer in plan.layers
    ]
    return plan.model_copy(update={"layers": tuple(layers)})


@pytest.mark.slow
@pytest.mark.parametrize("refit", lanes.slow_but((True,), (True, False)))
def test_a_rank_deficient_moment_is_cut_without_loss(subject, tmp_path, refit):
    dense = subject("llama", change=low_rank)
    settings = {} if refit else {"refit": False, "fit": 0}
    for width, loses in ((RANK, False), (RANK - 1, True)):  # the control: one direction less
        out = tmp_path / f"{width}"
        cut_model(dense.request(with_values(dense.profile.plan, width), **settings), out)
        cut = AutoModelForCausalLM.from_pretrained(out).eval()
        before, after = dense.outputs(dense.model), dense.outputs(cut)
        assert torch.isfinite(after).all()
        lost = difference(after, before)
        assert (lost > FELT) if loses else (lost < IDENTITY), lost


def test_fewer_tokens_than_a_head_is_wide(subject, tmp_path):
    """Five tokens cannot fill the moments of heads of width 10."""
    dense = subject("llama", rows=1, length=5)
    cut_model(dense.request(dense.plan(0.6)), tmp_path / "out")
    cut = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.isfinite(dense.outputs(cut)).all()
    whole = tmp_path / "whole"
    cut_model(dense.request(dense.profile.plan), whole)
    same = AutoModelForCausalLM.from_pretrained(whole).eval()
    before = dense.outputs(dense.model)
    assert difference(dense.outputs(same), before) <= IDENTITY


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", lanes.slow_but((torch.bfloat16,), (torch.bfloat16, torch.float16))
)
def test_shards_in_and_out_change_nothing(subject, tmp_path, monkeypatch, dtype):
    dense = subject("llama_tied", dtype=dtype)
    plan = dense.plan(0.7)
    cut_model(dense.request(plan), tmp_path / "one")
    file = dense.path / "model.safetensors"
    source = load_file(file)
    file.unlink()
    with CheckpointWriter(dense.path, max_shard_bytes=9_000) as writer:
        for name, tensor in source.items():
            writer.put(name, tensor)
    assert len(list(dense.path.glob("*.safetensors"))) > 3
    small = partial(run.write_checkpoint, max_shard_bytes=9_000)
    monkeypatch.setattr(run, "write_checkpoint", small)
    cut_model(dense.request(plan), tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (Checkpoint.open(tmp_path / name) for name in ("one", "many"))
    assert set(one.names) == set(many.names)
    assert all(torch.equal(one.tensor(n), many.tensor(n)) for n in one.names)
    assert {s.dtype for s in many.stored.values()} == {dtype}
    assert not any("lm_head" in n for n in many.names)  # tied: stored once
    rest = [n for n in source if "self_attn" not in n]
    assert len(rest) > 10
    assert all(torch.equal(source[n], many.tensor(f"backbone.{n}")) for n in rest)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

"""Every direction of a profile with an explicit gate, by the plain definition."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from headwise.profiling.run import ProfileJob
from headwise.profiling.source import probe


def sequence_losses(job: ProfileJob):
    """L_s and n_s of all sequences together, with whatever hooks are on the model."""
    numbers = tuple(range(len(job.sequences)))
    inputs = torch.from_numpy(job.sequences.inputs)
    batch = probe(
        job.sequences.objective,
        inputs.double() if inputs.is_floating_point() else inputs,
        numbers,
        job.settings.seed,
        job.sequences.mask_token,
    )
    return batch.losses(job.model(**{job.sequences.name: batch.inputs}))


@contextmanager
def gated(model, profile, gates):
    """Multiply every direction of a profile by a gate, by the plain definition.

    `gates[layer]` has "vo", "plane" and "free": (groups × directions) tensors.
    """
    with ExitStack() as undo:
        for i, attention in enumerate(model.attentions()):
            heads = attention.classes[0]

            def cut_z(module, args, i=i, heads=heads):
                z = args[0].unflatten(-1, (heads.n_heads, heads.queries, heads.vo_dim))
                mean = torch.zeros(heads.n_heads, heads.queries, heads.vo_dim).to(z)
                if profile.record.centred:
                    mean = torch.from_numpy(profile.get(i, "z_mean")).reshape(mean.shape).to(z)
                encode, decode = _directions(profile.value_directions, i, heads.n_heads, z)
                kept = torch.einsum("btghi,gic->btghc", z - mean, encode) * _own(gates[i]["vo"])
                return ((torch.einsum("btghc,gcj->btghj", kept, decode) + mean).flatten(2),)

            def cut_q(module, args, out, i=i, heads=heads):
                q = out.reshape(*out.shape[:2], heads.n_heads, heads.queries, heads.qk_dim)
                rotary = heads.rotary_dim
                parts = []
                if rotary:
                    twice = torch.cat([gates[i]["plane"]] * 2, -1)
                    parts.append(q[..., :rotary] * _own(twice))
                if rotary < heads.qk_dim:
                    encode, other = _directions(profile.score_directions, i, heads.n_heads, q)
                    free = torch.einsum("btghi,gic->btghc", q[..., rotary:], encode)
                    free = free * _own(gates[i]["free"])
                    parts.append(torch.einsum("btghc,gjc->btghj", free, other))
                return torch.cat(parts, -1).reshape(out.shape)

            undo.callback(attention.o_proj.register_forward_pre_hook(cut_z).remove)
            if not profile.record.qk_whole:
                last = getattr(attention, "q_norm", attention.q_proj)
                undo.callback(last.register_forward_hook(cut_q).remove)
        yield


def _own(gates):
    return gates[None, None, :, None, :]


def _directions(read, layer, n_heads, like):
    pairs = [read(layer, j) for j in range(n_heads)]
    return [torch.from_numpy(np.stack(x)).to(like) for x in zip(*pairs, strict=True)]


def open_gates(profile, dtype=torch.float64):
    """All gates at 1, asking for their gradient."""
    return [
        {
            part: torch.ones(
                profile.get(i, f"{part}_energy").shape, dtype=dtype, requires_grad=True
            )
            for part in ("vo", "plane", "free")
            if profile.has(i, f"{part}_energy")
        }
        for i in range(len(profile.plan.layers))
    ]

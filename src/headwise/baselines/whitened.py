"""Methods that go by measured energy: whitened value directions, planes and scores.

    uniform   every head the same widths
    energy    the whole model competes for the budget by squared output and score

The bases are those of plain whitened truncation (`headwise.profiling.factor`), made here from the
profile's moments; where the layer has an output bias, the mean of what is dropped moves into it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np

from headwise.baselines.parts import Cut, Group, Subject, groups_of
from headwise.baselines.planned import Narrowed, Rule, planned_cut, without_planes
from headwise.plan import HeadSpec
from headwise.planning.fit import HeadWorth, Kept
from headwise.profiling.factor import ScoreBasis, ValueBasis, score_basis, value_basis


def uniform(subject: Subject, amount: int) -> Cut:
    """Uniform widths, the directions of the largest energy in every head."""
    return _by_energy(subject, amount, "uniform")


def energy(subject: Subject, amount: int) -> Cut:
    """The directions of the largest energy in the model."""
    return _by_energy(subject, amount, "valuable")


def _by_energy(subject: Subject, amount: int, widths: Literal["uniform", "valuable"]) -> Cut:
    plan, profile = subject.profile.plan, subject.profile

    @cache
    def bases(layer: int) -> list[tuple[ValueBasis, ScoreBasis | None]]:
        groups = groups_of(plan.layers[layer], subject.dense[layer])
        return [
            (_values(subject, layer, j, group), _scores(subject, layer, j))
            for j, group in enumerate(groups)
        ]

    def worth(layer: int, head: int, spec: HeadSpec) -> HeadWorth:
        n_planes = len(spec.rotary_planes or ())
        values, scores = bases(layer)[head]
        planes = np.zeros(n_planes)
        if profile.has(layer, "plane_energy"):
            planes = profile.get(layer, "plane_energy")[head]
        scale = np.square(spec.score_scale or spec.qk_dim**-0.5)
        free = np.zeros(spec.qk_dim - 2 * n_planes) if scores is None else scale * scores.energy
        return HeadWorth(planes, free, values.energy, qk_whole=profile.record.qk_whole)

    def narrowed(layer: int, head: int, group: Group, spec: HeadSpec, kept: Kept) -> Narrowed:
        values, scores = bases(layer)[head]
        made, shift = without_planes(group, spec, kept), None
        if len(kept.vo) < spec.vo_dim:
            vo = list(kept.vo)
            P = values.decode[vo].T @ values.encode[:, vo].T  # of column vectors z
            made = replace(made, value=P @ group.value)
            if profile.record.centred:
                lost = _means(subject, layer, head) @ (np.eye(len(P)) - P).T
                shift = np.einsum("gdv,gv->d", group.output, lost)
        if scores is not None and len(kept.free) < len(scores.energy):
            free, rotary = list(kept.free), 2 * len(spec.rotary_planes or ())
            query = made.query.copy()
            P_q = scores.encode_k[:, free] @ scores.encode_q[:, free].T
            query[:, rotary:] = P_q @ query[:, rotary:]
            made = replace(made, query=query)
        return Narrowed(made, shift)

    worths = tuple(
        tuple(worth(i, j, spec) for j, spec in enumerate(layer.heads))
        for i, layer in enumerate(plan.layers)
    )
    return planned_cut(subject, amount, Rule(worths, widths, narrowed))


def _values(subject: Subject, layer: int, head: int, group: Group) -> ValueBasis:
    C = subject.profile.get(layer, "z_moment")[head]
    if subject.profile.record.centred:
        means = _means(subject, layer, head)
        C = C - means.T @ means
    return value_basis(C, group.stacked_output.T)


def _scores(subject: Subject, layer: int, head: int) -> ScoreBasis | None:
    """The basis of the columns without positions, if there are any that may be cut."""
    profile = subject.profile
    spec = profile.plan.layers[layer].heads[head]
    rotary = 2 * len(spec.rotary_planes or ())
    if rotary == spec.qk_dim or profile.record.qk_whole:
        return None
    C_q, C_k = (profile.get(layer, f"{s}_moment")[head][rotary:, rotary:] for s in ("q", "k"))
    mean = profile.get(layer, "k_mean")[head][rotary:]
    # A constant added to all keys is ignored by the softmax: they count by their covariance.
    return score_basis(C_q, C_k - np.outer(mean, mean))


def _means(subject: Subject, layer: int, head: int) -> np.ndarray:
    """The mean of z of every query head of a group, queries × vo."""
    heads = subject.profile.plan.layers[layer].heads
    first = sum(h.queries for h in heads[:head])
    z = subject.profile.get(layer, "z_mean").reshape(-1, heads[head].vo_dim)
    return z[first : first + heads[head].queries]

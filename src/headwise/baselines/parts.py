"""One layer's projections split into head groups, and joined again.

Biases are a last column: the input has a constant 1 appended, so whatever is done to a matrix is
done to its bias alike. All in float64.

    query   queries × qk × (d_model + 1)     key     qk × (d_model + 1)
    output  queries × d_model × vo           value   vo × (d_model + 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from headwise.models.backbones_headwise import Projection, Projections, family_of
from headwise.plan import LayerPlan
from headwise.profiling.format import Profile


@dataclass(frozen=True, slots=True)
class Group:
    """The weights of one key/value head and of the query heads that share it."""

    query: Float[np.ndarray, "queries qk inputs"]
    key: Float[np.ndarray, "qk inputs"]
    value: Float[np.ndarray, "vo inputs"]
    output: Float[np.ndarray, "queries d_model vo"]

    @property
    def stacked_output(self) -> Float[np.ndarray, "outputs vo"]:
        """The output matrices of the query heads, stacked: what one W_V feeds."""
        return self.output.reshape(-1, self.output.shape[-1])

    @property
    def stacked_query(self) -> Float[np.ndarray, "rows qk"]:
        """The query matrices, transposed and stacked: what one W_K is multiplied with."""
        return self.query.swapaxes(1, 2).reshape(-1, self.query.shape[1])


@dataclass(frozen=True, slots=True)
class Subject:
    """A dense model as the methods see it."""

    profile: Profile
    dense: tuple[Projections, ...]  # of every layer, on the CPU; never write to them
    measured: Mapping[str, np.ndarray]  # of `headwise.baselines.measured`, what is needed
    tied_queries: bool = False  # one norm over all heads: no query or key row can go alone
    mlps: tuple[Projections, ...] = ()  # of every layer, for the methods that cut whole blocks

    @property
    def qk_whole(self) -> bool:
        """Whether queries and keys are not cut, as behind norms, which no method covers."""
        normed = family_of(self.profile.plan.shape.family).norm
        return bool(normed) or self.profile.record.qk_whole


@dataclass(frozen=True, slots=True)
class Cut:
    """Every layer's projections in the dense shape, and the parameters of their folded form.

    A method that cuts whole blocks gives the MLPs too.
    """

    layers: tuple[Projections, ...]
    attn_params: int
    mlps: tuple[Projections, ...] = ()
    ffn_params: int = 0


def groups_of(layer: LayerPlan, projections: Projections) -> list[Group]:
    """The head groups of one layer."""
    query, key, value = (_with_bias(projections[side]) for side in ("query", "key", "value"))
    W_O = projections["output"].weight.double().numpy()
    found, q, k, v, o = [], 0, 0, 0, 0
    for head in layer.heads:
        qk, vo, g = head.qk_dim, head.vo_dim, head.queries
        columns = W_O[:, o : o + g * vo].reshape(len(W_O), g, vo)
        found.append(
            Group(
                query[q : q + g * qk].reshape(g, qk, -1),
                key[k : k + qk],
                value[v : v + vo],
                np.ascontiguousarray(columns.swapaxes(0, 1)),
            )
        )
        q, k, v, o = q + g * qk, k + qk, v + vo, o + g * vo
    return found


def joined(
    groups: Sequence[Group], like: Projections, shift: Float[np.ndarray, " d_model"] | None = None
) -> Projections:
    """The four projections of these groups, `shift` added to the output bias, if there is one."""
    rows = {
        "query": np.concatenate([g.query.reshape(-1, g.query.shape[-1]) for g in groups]),
        "key": np.concatenate([g.key for g in groups]),
        "value": np.concatenate([g.value for g in groups]),
    }
    W_O = np.concatenate([matrix for g in groups for matrix in g.output], axis=1)
    made = {}
    for side, x in rows.items():
        bias = torch.from_numpy(x[:, -1].copy()) if like.has_bias(side) else None
        made[side] = Projection(torch.from_numpy(x[:, :-1].copy()), bias)
    b_O = like["output"].bias
    if b_O is not None:
        b_O = b_O.double() + (0.0 if shift is None else torch.from_numpy(shift))
    made["output"] = Projection(torch.from_numpy(W_O), b_O)
    return Projections({side: p.to(like[side].weight.dtype) for side, p in made.items()})


def kept_mlp(
    mlp: Projections, kept: Sequence[int], shift: Float[np.ndarray, " d_model"] | None = None
) -> Projections:
    """An MLP in its dense shape that reads only these neurons; `shift` is added to its output."""
    down = mlp["down"]
    stays = torch.zeros(down.weight.shape[1], dtype=down.weight.dtype)
    stays[list(kept)] = 1.0
    return mlp.replaced(down=shifted(Projection(down.weight * stays, down.bias), shift))


def shifted(projection: Projection, shift: Float[np.ndarray, " outputs"] | None) -> Projection:
    """The projection with a constant added to its outputs: a bias, new if there was none."""
    if shift is None:
        return projection
    W, bias = projection.weight, projection.bias
    more = torch.from_numpy(shift) + (0.0 if bias is None else bias.double())
    return Projection(W, more.to(W.dtype))


def neuron_params(mlp: Projections) -> int:
    """What one neuron costs: its row of every matrix into it, biases too, and a column out."""
    d = len(mlp["down"].weight)
    rows = sum(p.weight.shape[1] + mlp.has_bias(side) for side, p in mlp.items() if side != "down")
    return d + rows


def mlp_params(mlp: Projections, neurons: int) -> int:
    """Weights and biases of an MLP with so many neurons left; the output bias stays."""
    bias = mlp["down"].bias
    return neurons * neuron_params(mlp) + (0 if bias is None else bias.numel())


def _with_bias(projection: Projection) -> np.ndarray:
    matrix = projection.weight.double()
    bias = torch.zeros(len(matrix)) if projection.bias is None else projection.bias
    return torch.cat([matrix, bias.double()[:, None]], 1).numpy()

"""Plans and profiles made by hand: no model and no torch is needed to make them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from headwise.artifacts import sha256
from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.profiling.format import RECORD, TENSORS, ProfileRecord

LENGTHS = (4, 8, 11)


def dense_plan(
    *, layers=5, groups=3, queries=2, qk=32, vo=24, rotary=None, d_model=64, windows=(), ffn=13
) -> Plan:
    """A plan of equal heads; `rotary` of the query-key columns turn with the position."""
    shape = ModelShape(
        n_layers=layers,
        d_model=d_model,
        context=101,
        n_heads=queries * groups,
        n_kv_heads=groups,
        qk_dim=qk,
        vo_dim=vo,
        vocab_size=11,
        ffn_dim=ffn,
        windows=windows,
    )
    planes = tuple(range((qk if rotary is None else rotary) // 2))
    head = HeadSpec(qk_dim=qk, vo_dim=vo, queries=queries, score_scale=0.3, rotary_planes=planes)
    return Plan(shape=shape, layers=(LayerPlan(heads=(head,) * groups),) * layers)


def write_profile(
    folder: Path,
    *,
    groups=3,
    queries=2,
    qk=32,
    vo=24,
    rotary=None,
    windows=(),
    layers=5,
    seed=0,
    neurons=0,
    **record,
) -> Path:
    """A profile with random sensitivities, later layers less sensitive; MLPs if `neurons`."""
    rotary = qk if rotary is None else rotary
    plan = dense_plan(
        layers=layers,
        groups=groups,
        queries=queries,
        qk=qk,
        vo=vo,
        rotary=rotary,
        windows=windows,
        ffn=neurons or 13,
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    sizes = {"vo": vo, "plane": rotary // 2, "free": qk - rotary}
    for i in range(layers):
        for part, n in sizes.items():
            for measure in ("sensitivity", "energy") if n else ():
                values = rng.exponential(size=(groups, n)) * 0.01 * 10 ** (-i / 4)
                tensors[f"layers.{i}.{part}_{measure}"] = values.astype(np.float32)
        for measure in ("sensitivity", "energy", "mean") if neurons else ():
            values = rng.exponential(size=neurons) * 0.002 * 10 ** (-i / 4)
            tensors[f"layers.{i}.ffn_{measure}"] = values.astype(np.float32)
        norm = np.outer(0.3 / np.sqrt(LENGTHS), np.ones(queries * groups)) / (1 + i)
        tensors[f"layers.{i}.jacobian_norm"] = norm.astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS)
    given = {
        "model": "a/tiny model",
        "objective": "next-token",
        "text": {"source": "notes of mine.txt", "sha256": "0" * 64},
        "loss": 2.5,
        "qk_whole": False,
        "notes": (),
        **record,
    }
    made = ProfileRecord(
        **given,
        weights_sha256="1" * 64,
        dtype="float32",
        device="cpu",
        settings={"length": 11, "tokens": 88, "chunk": 4, "seed": 0},
        sequences=8,
        tokens=88,
        lengths=LENGTHS,
        centred=False,
        versions={"headwise": "0"},
        plan={"format": plan.format, **plan.to_dict()},
        tensors={name: x.shape for name, x in tensors.items()},
        tensors_sha256=sha256(folder / TENSORS),
    )
    (folder / RECORD).write_text(json.dumps(made.model_dump(mode="json")))
    return folder

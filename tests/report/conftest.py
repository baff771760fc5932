"""Folders as headwise writes them, made by hand: no model is needed to look at a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headwise.artifacts import sha256
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Plan
from headwise.planning.fit import fit
from headwise.planning.worth_curves import FitRules
from headwise.profile.format import RECORD, TENSORS, Profile, ProfileRecord
from headwise.profile.worth import fit_task

LENGTHS = (4, 8, 11)


def write_profile(
    folder: Path,
    *,
    layers=5,
    groups=3,
    queries=2,
    qk=32,
    vo=24,
    rotary=None,
    windows=(),
    seed=0,
    **record,
) -> Path:
    """A profile with random sensitivities, later layers less sensitive; `rotary` columns turn."""
    rotary = qk if rotary is None else rotary
    shape = ModelShape(
        n_layers=layers,
        d_model=64,
        context=101,
        n_heads=queries * groups,
        n_kv_heads=groups,
        qk_dim=qk,
        vo_dim=vo,
        vocab_size=11,
        ffn_dim=13,
        windows=windows,
    )
    planes = tuple(range(rotary // 2))
    head = HeadSpec(qk_dim=qk, vo_dim=vo, queries=queries, score_scale=0.3, rotary_planes=planes)
    plan = Plan(shape=shape, layers=(LayerPlan(heads=(head,) * groups),) * layers)
    rng = np.random.default_rng(seed)
    tensors = {}
    sizes = {"vo": vo, "plane": rotary // 2, "free": qk - rotary}
    for i in range(layers):
        for part, n in sizes.items():
            for measure in ("sensitivity", "energy") if n else ():
                values = rng.exponential(size=(groups, n)) * 0.01 * 10 ** (-i / 4)
                tensors[f"layers.{i}.{part}_{measure}"] = values.astype(np.float32)
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


def proof_of(ratio: float = 1.05, other: float = 1.25) -> dict:
    """A verify.json; the numbers are made up."""

    def text(source, role, times):
        return {
            "source": source,
            "sha256": "2" * 64,
            "role": role,
            "is_calibration_text": False,
            "tokens": 997,
            "window": 11,
            "stride": 11,
            "perplexity": 20 * times,
            "dense_perplexity": 20.0,
            "ratio": times,
            "nll": float(np.log(20 * times)),
            "dense_nll": float(np.log(20)),
            "top_agreement": 0.83,
            "kl": 0.1,
            "by_position": [
                {"first": 1, "last": 1, "tokens": 7, "kl": 0.05},
                {"first": 2, "last": 2, "tokens": 7, "kl": 0.09},
            ],
        }

    def rate(median):
        return {"median": median, "low": median, "high": median}

    size = {"dense": 1000, "cut": 750, "share": 0.75, "dense_plan": 1000, "cut_plan": 750}
    return {
        "format": "headwise-verify/1",
        "model": "small",
        "against": "model",
        "kind": "causal",
        "texts": [
            text("mine.txt", "calibration domain", ratio),
            text("other.txt", "other text", other),
        ],
        "size": {"attn_params": size, "total_params": size, "kv_bytes": size},
        "speed": {
            "prefill": {"dense": rate(100.0), "cut": rate(80.0), "ratio": 0.8},
            "decode": {"dense": rate(50.0), "cut": rate(60.0), "ratio": 1.2},
        },
        "warnings": ["mine.txt is the text the model was calibrated on."],
        "device": "cpu",
        "dtype": "float32",
        "targets": [{"option": "--max-ratio", "limit": 1.01, "found": ratio, "met": False}],
        "met": False,
    }


def write_cut(folder: Path, *, proof: dict | None = None, **record) -> Path:
    """A cut model's papers, with its profile beside it; there are no weights."""
    beside = write_profile(folder.with_name(f"{folder.name}.profile"))
    profile = Profile.read(beside)
    found = fit(fit_task(profile, "sensitivity", FitRules()), Budget(attn_params=Limit(share=0.75)))
    folder.mkdir()
    plan = {"format": found.plan.format, **found.plan.to_dict()}
    (folder / "config.json").write_text(json.dumps({"model_type": "headwise", "plan": plan}))
    given = {
        "format": "headwise-cut/1",
        "model": "a/tiny model",
        "command": "headwise compress model --keep 75%",
        "calibration": {"source": "mine.txt", "text_sha256": "3" * 64, "tokens": 88},
        "profile_sha256": profile.sha256,
        "settings": {"refit": True},
        "versions": {"headwise": "0"},
        **record,
    }
    (folder / "headwise.json").write_text(json.dumps(given))
    if proof is not None:
        (folder / "verify.json").write_text(json.dumps(proof))
    return folder


def write_run(folder: Path, *, steps=23, status="finished") -> Path:
    """A training run's folder without its model."""
    shape = ModelShape(
        n_layers=3,
        d_model=32,
        context=17,
        n_heads=4,
        n_kv_heads=2,
        qk_dim=8,
        vo_dim=8,
        vocab_size=19,
        ffn_dim=23,
    )
    folder.mkdir()
    (folder / "plan.json").write_text(Plan.uniform(shape).to_json())
    record = {
        "format": "headwise-run/1",
        "status": status,
        "command": "headwise train plan.json",
        "settings": {"steps": steps, "lr": 0.1},
        "text": {
            "source": "mine.txt",
            "sha256": "4" * 64,
            "train_tokens": 100,
            "held_out_tokens": 10,
            "split": "the last 0.05 of the text",
        },
        "versions": {"headwise": "0"},
    }
    (folder / "run.json").write_text(json.dumps(record))
    rows = [
        {
            "step": k,
            "loss": 5 / k,
            "lr": 0.1 / k,
            "grad_norm": 1.0,
            "tokens": 100 * k,
            "seconds": 0.5 * k,
            "tokens_per_second": 200.0,
            **({"held_out_loss": 6 / k} if k % 5 == 0 else {}),
        }
        for k in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Made:
    """The makers, for tests in this folder and below."""

    profile = staticmethod(write_profile)
    cut = staticmethod(write_cut)
    run = staticmethod(write_run)
    proof = staticmethod(proof_of)


@pytest.fixture(scope="session")
def made():
    return Made


@pytest.fixture
def profile(tmp_path):
    return write_profile(tmp_path / "p")

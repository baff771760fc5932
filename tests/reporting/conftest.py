"""Folders as headwise writes them, made by hand: no model is needed to look at a page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwise.plan import Budget, Limit, ModelShape, Plan
from headwise.planning.fit import fit
from headwise.planning.rules import WidthRules
from headwise.profiling.format import Profile
from headwise.profiling.worth import fit_problem
from tests.tiny_profile import write_profile


def verification_of(ratio: float = 1.05, other: float = 1.25) -> dict:
    """A verify.json; the numbers are made up."""

    def text(source, role, times):
        return {
            "source": source,
            "sha256": "2" * 64,
            "role": role,
            "is_calibration_text": False,
            "kind": "causal",
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
            "windows": {"count": 91, "broken": 0, "worst_kl": 0.3},
        }

    def rate(median):
        return {"median": median, "low": median, "high": median}

    def point(name, batch, context, dense, cut):
        return {
            "point": name,
            "batch": batch,
            "context": context,
            "repeats": 5,
            "dense": rate(dense),
            "cut": rate(cut),
            "ratio": cut / dense,
        }

    size = {"dense": 1000, "cut": 750, "share": 0.75, "dense_plan": 1000, "cut_plan": 750}
    return {
        "format": "headwise-verify/3",
        "model": "small",
        "against": "model",
        "kind": "causal",
        "texts": [
            text("mine.txt", "calibration domain", ratio),
            text("other.txt", "other text", other),
        ],
        "size": {"attn_params": size, "params": size, "kv_bytes": size | {"bytes_per_number": 4}},
        "speed": {
            "seconds": 60.0,
            "points": [
                point("prefill", 1, 51, 100.0, 80.0),
                point("decode", 1, 51, 50.0, 60.0),
                point("serving", 16, 13, 500.0, 700.0)
                | {"same_code": rate(560.0), "peak": {"dense": 2**31, "cut": 2**30}},
            ],
            "left_out": ["serving, longer was left out: no time."],
        },
        "fits": {"memory": 24 * 2**30, "context": 51, "dense": 40, "cut": 80},
        "tasks": [
            {
                "name": "piqa",
                "source": "piqa.jsonl",
                "metric": "acc_norm",
                "questions": 200,
                "dense": 0.7,
                "dense_stderr": 0.03,
                "cut": 0.6,
                "cut_stderr": 0.04,
                "difference": -0.1,
                "difference_stderr": 0.02,
                "gained": 5,
                "lost": 25,
            }
        ],
        "samples": [
            {"prompt": "One two", "dense": " three", "cut": " three"},
            {"prompt": "Once upon", "dense": " a time", "cut": " a mime"},
        ],
        "warnings": ["mine.txt is the text the model was calibrated on."],
        "device": "cpu",
        "dtype": "float32",
        "targets": [{"name": "max_ratio", "limit": 1.01, "found": ratio, "met": False}],
        "met": False,
    }


def write_cut(folder: Path, *, verification: dict | None = None, **record) -> Path:
    """A cut model's records, with its profile beside it; there are no weights."""
    beside = write_profile(folder.with_name(f"{folder.name}.profile"))
    profile = Profile.read(beside)
    found = fit(
        fit_problem(profile, "sensitivity", WidthRules()), Budget(attn_params=Limit(share=0.75))
    )
    folder.mkdir()
    plan = {"format": found.plan.format, **found.plan.to_dict()}
    (folder / "config.json").write_text(json.dumps({"model_type": "headwise", "plan": plan}))
    given = {
        "format": "headwise-cut/2",
        "key": "5" * 64,
        "model": "a/tiny model",
        "command": "headwise compress model --attn-params 75%",
        "calibration": {"source": "mine.txt", "sha256": "3" * 64, "tokens": 88},
        "profile_sha256": profile.sha256,
        "settings": {"refit": True},
        "versions": {"headwise": "0"},
        **record,
    }
    (folder / "headwise.json").write_text(json.dumps(given))
    if verification is not None:
        (folder / "verify.json").write_text(json.dumps(verification))
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
        "format": "headwise-run/2",
        "kind": "train",
        "status": status,
        "command": "headwise train plan.json",
        "inputs": {
            "settings": {"steps": steps, "lr": 0.1},
            "plan_sha256": "5" * 64,
            "text": {"sources": ["mine.txt"], "max_chars": None, "sha256": "4" * 64},
            "tokenizer": {"source": None, "vocab_size": None},
        },
        "details": {
            "text": {
                "documents": 1,
                "characters": 500,
                "skipped_files": 0,
                "split": "the last 0.05 of the text",
                "train_tokens": 100,
                "held_out_tokens": 10,
            },
            "special_tokens": {},
            "tokens_sha256": {},
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


def comparison_of() -> dict:
    """A compare.json of two methods; one of them does not reach half of the parameters."""
    text = {
        "source": "mine.txt",
        "sha256": "2" * 64,
        "role": "calibration domain",
        "tokens": 128,
        "window": 32,
        "stride": 32,
        "dense_nll": 3.0,
        "dense_perplexity": 20.1,
    }
    cells = [
        {
            "method": method,
            "budget": "75%",
            "amount": 10,
            "attn_params": 10,
            "share": 0.75,
            "texts": [{"nll": 3.1, "perplexity": 22.2, "ratio": ratio}],
        }
        for method, ratio in (("rival", 1.4), ("headwise", 1.1))
    ]
    cells.append({"method": "rival", "budget": "50%", "amount": 5, "problem": "cannot"})
    return {
        "format": "headwise-compare/2",
        "model": "tiny",
        "weights_sha256": "1" * 64,
        "attn_params": 1000,
        "calibration": {"source": "mine.txt", "sha256": "3" * 64, "tokens": 88},
        "profile_sha256": "6" * 64,
        "texts": [text],
        "methods": {
            "rival": {"what": "another way", "source": "a paper"},
            "headwise": {"what": "our way", "source": "here"},
        },
        "cells": cells,
        "command": "headwise compare",
    }


class Made:
    """The makers, for tests in this folder and below."""

    profile = staticmethod(write_profile)
    cut = staticmethod(write_cut)
    run = staticmethod(write_run)
    verification = staticmethod(verification_of)
    comparison = staticmethod(comparison_of)


@pytest.fixture(scope="session")
def made():
    return Made


@pytest.fixture
def profile(tmp_path):
    return write_profile(tmp_path / "p")

"""The bench of a comparison: the dense model, its texts, and one recipe after another put into it.

A rival's cut is four projections of the dense shape per layer, copied into the model in memory and
out again. Ours is the checkpoint that `compress` writes, read back and counted in its files.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from headwise.artifacts import atomic_file
from headwise.compress.comparison_folder import ComparisonFolder
from headwise.compress.recipes.by_weights import clover, magnitude
from headwise.compress.recipes.catalogue import OURS, RECOVERED, CompareSettings
from headwise.compress.recipes.heads import head_pruning
from headwise.compress.recipes.measured import Wanted, measurements
from headwise.compress.recipes.parts import Cut, Subject, attention_weights
from headwise.compress.recipes.svd_llm import svd_llm
from headwise.compress.recipes.whitened import energy, uniform
from headwise.compress.run import Request, compress, is_finished
from headwise.compress.settings import CutSettings
from headwise.data.text import Text
from headwise.errors import BudgetError, HeadwiseError
from headwise.measure.likelihood import DEFAULT_WINDOW, Likelihood, likelihood, scored_stream
from headwise.measure.loading import load_model, model_context
from headwise.measure.size import counted
from headwise.nn.backbones_headwise import Weights
from headwise.nn.build import load_projections
from headwise.nn.checkpoint import Checkpoint
from headwise.plan import Budget, Limit
from headwise.planning.cost import dense_cost
from headwise.planning.fit import fit
from headwise.planning.worth_curves import FitRules
from headwise.profile.format import Profile
from headwise.profile.source import load_profiled, weights_sha256
from headwise.profile.worth import fit_task

RIVALS: dict[str, Callable[[Subject, int], Cut]] = {
    "svd-llm": svd_llm,
    "clover": clover,
    "magnitude": magnitude,
    "energy": energy,
    "head-pruning": head_pruning,
    "uniform": uniform,
}
Report = Callable[[str, int, int], None]  # what is being done, done, in all
Recover = Callable[[Path, Path], None]  # a cut model's folder, the recovered one's


@dataclass(frozen=True)
class Comparison:
    """What is compared, on what; the first text is of the calibration text's kind."""

    model: str
    profile: Profile
    texts: tuple[Text, ...]
    methods: tuple[str, ...]
    budgets: tuple[Limit, ...]
    settings: CompareSettings
    recover: Recover | None = None
    recovery: dict[str, Any] | None = None  # its settings, for the record
    command: str = ""


class Bench:
    """The dense model with its texts, into which one recipe after another is put."""

    def __init__(self, job: Comparison, folder: ComparisonFolder, report: Report) -> None:
        self.job, self.folder, self.report = job, folder, report
        if job.profile.record.objective != "next-token":
            raise HeadwiseError(
                f"a comparison is of causal language models by perplexity, but {job.model} is "
                "not one; compare encoders with `headwise compress` and its proof."
            )
        self.model, self.words = load_profiled(job.model)
        self._check_weights()
        self.streams = [
            scored_stream(self.words, text, job.settings.max_tokens)[0] for text in job.texts
        ]
        context = model_context(self.model.backbone) or DEFAULT_WINDOW
        self.window = job.settings.window or min(context, DEFAULT_WINDOW)
        self.dense = tuple(attention_weights(a) for a in self.model.attentions())
        self.dense_params = dense_cost(job.profile.plan.shape).attn_params
        self._subject: Subject | None = None
        self.reference = self._reference()

    def cell(self, method: str, budget: Limit) -> dict[str, Any]:
        """One recipe at one budget."""
        whole = Budget(attn_params=budget)
        amount = whole.amount("attn_params", dense_cost(self.job.profile.plan.shape))
        found: dict[str, Any] = {"method": method, "budget": str(budget), "amount": amount}
        try:
            if method in RIVALS:
                params, scores = self._rival(method, amount)
            else:
                params, scores = self._ours(method, budget, whole)
        except BudgetError as error:
            return {**found, "problem": str(error)}
        assert params <= amount, f"{method} went over its budget"
        if method not in RIVALS:
            found["cut"] = CutSettings().to_dict()
        if method == RECOVERED:
            found["recovery"] = self.job.recovery
        texts = [_scores(s, nll) for s, nll in zip(scores, self.reference, strict=True)]
        return {**found, "attn_params": params, "share": params / self.dense_params, "texts": texts}

    def tidy(self, budget: Limit, left: Sequence[tuple[Limit, str]]) -> None:
        """Remove our models of a budget that no cell needs any more."""
        if not any(b == budget and m in (OURS, RECOVERED) for b, m in left):
            shutil.rmtree(self._place(budget), ignore_errors=True)

    def _rival(self, method: str, amount: int) -> tuple[int, list[Likelihood]]:
        cut = RIVALS[method](self.subject, amount)
        try:
            self._put(cut.layers)
            return cut.attn_params, self._likelihoods(self.model)
        finally:
            self._put(self.dense)

    def _ours(self, method: str, budget: Limit, whole: Budget) -> tuple[int, list[Likelihood]]:
        """The real checkpoint: cut, perhaps recovered, read back and counted in its files."""
        job, place = self.job, self._place(budget)
        rules = FitRules(multiple_of=job.settings.multiple_of)
        plan = fit(fit_task(job.profile, "sensitivity", rules), whole).plan
        origin = plan.origin.model_copy(update={"profile_sha256": job.profile.sha256})
        plan = plan.model_copy(update={"origin": origin})
        request = Request(job.model, job.profile, plan, CutSettings(), job.command)
        out = place / "cut"
        if not is_finished(request, out):
            shutil.rmtree(place / "recovered", ignore_errors=True)
            compress(request, out, force=True, tick=partial(self.report, "layer"))
        if method == RECOVERED:
            assert job.recover is not None
            if not (place / "recovered").exists():
                job.recover(out, place / "recovered")
            out = place / "recovered"
        model, _ = load_model(str(out))
        return counted(Checkpoint.open(out)).attn_params, self._likelihoods(model)

    @property
    def subject(self) -> Subject:
        """What the rivals see; measured when the first of them asks."""
        if self._subject is None:
            tied = any(
                hasattr(a, "q_norm") and a.norm_over == "all" for a in self.model.attentions()
            )
            self._subject = Subject(self.job.profile, self.dense, self._measured(), tied)
        return self._subject

    def _measured(self) -> dict[str, np.ndarray]:
        pending = {m for _, m in self.folder.missing(self.job.budgets, self.job.methods)}
        wanted = Wanted(moments="svd-llm" in pending, gates="head-pruning" in pending)
        path = self.folder.work / "measured.safetensors"
        found = load_file(path) if path.exists() else {}
        if not wanted.covered(found):
            ids = torch.from_numpy(self.job.profile.ids)
            found = measurements(self.model, ids, wanted, tick=partial(self.report, "measuring"))
            with atomic_file(path, force=True) as temporary:
                save_file(found, temporary)
        return found

    def _reference(self) -> list[float]:
        """Nats per token of the dense model on every text."""
        cell = self.folder.cell("dense")
        if cell is None:
            found = [asdict(one) for one in self._likelihoods(self.model)]
            texts = [{**f, "nll": f["nll_sum"] / f["tokens"]} for f in found]
            cell = {"attn_params": self.dense_params, "texts": texts}
            cell["weights_sha256"] = self.job.profile.record.weights_sha256
            self.folder.put("dense", cell)
        return [float(text["nll"]) for text in cell["texts"]]

    def _likelihoods(self, model: Any) -> list[Likelihood]:
        tick = partial(self.report, "token")
        return [
            likelihood(model, stream, window=self.window, stride=self.window, tick=tick)
            for stream in self.streams
        ]

    def _put(self, layers: Sequence[Weights]) -> None:
        for attention, weights in zip(self.model.attentions(), layers, strict=True):
            load_projections(attention, weights)

    def _place(self, budget: Limit) -> Path:
        return self.folder.work / str(budget).replace("%", "pct")

    def _check_weights(self) -> None:
        """Refuse a profile of other weights, where the two can be compared."""
        record = self.job.profile.record
        alike = record.dtype == str(self.model.dtype).removeprefix("torch.")
        if alike and weights_sha256(self.model) != record.weights_sha256:
            raise HeadwiseError(
                f"the profile was made of other weights than {self.job.model} has now; make the "
                "profile again, or name another with --profile."
            )


def _scores(found: Likelihood, dense_nll: float) -> dict[str, float | None]:
    gap = found.nll - dense_nll
    return {
        "nll": found.nll,
        "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
        "ratio": math.exp(gap) if gap < 709 else None,
    }

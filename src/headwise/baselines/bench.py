"""The bench of a comparison: the dense model, its texts, and one method after another put into it.

A rival's cut is four projections of the dense shape per layer. They take the place of the model's
own while they are measured; those are never written to, for a live model shares them.
Ours is the checkpoint that `compress` writes, read back and counted in its files.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from headwise.artifacts import atomic_file
from headwise.baselines.by_weights import clover, magnitude
from headwise.baselines.catalogue import OURS, RECOVERED, CompareSettings
from headwise.baselines.comparison_folder import ComparisonFolder
from headwise.baselines.heads import head_pruning
from headwise.baselines.measured import Wanted, measurements
from headwise.baselines.parts import Cut, Subject
from headwise.baselines.record import ComparisonCell, DenseCell, DenseText, Score
from headwise.baselines.svd_llm import svd_llm
from headwise.baselines.whitened import energy, uniform
from headwise.cutting.run import CutRequest, cut_model, is_cut, refuse_other_weights
from headwise.cutting.settings import CutSettings
from headwise.data.text import Text
from headwise.errors import BudgetError, HeadwiseError
from headwise.measure.likelihood import (
    Likelihood,
    likelihood,
    scored_stream,
    window_of,
)
from headwise.measure.size import counted
from headwise.models.backbones_headwise import projections_of
from headwise.models.build import replaced_projections
from headwise.plan import Budget, Limit
from headwise.planning.cost import dense_cost
from headwise.planning.fit import WidthRules, fit
from headwise.profiling.format import Profile
from headwise.profiling.source import load_for_profiling
from headwise.profiling.worth import fit_problem
from headwise.progress import Progress
from headwise.source import Source, open_source

RIVALS: dict[str, Callable[[Subject, int], Cut]] = {
    "svd-llm": svd_llm,
    "clover": clover,
    "magnitude": magnitude,
    "energy": energy,
    "head-pruning": head_pruning,
    "uniform": uniform,
}
Recover = Callable[[Path, Path], None]  # a cut model's folder, the recovered one's


@dataclass(frozen=True)
class Comparison:
    """What is compared, on what; the first text is of the calibration text's kind."""

    source: Source
    profile: Profile
    texts: tuple[Text, ...]
    methods: tuple[str, ...]
    budgets: tuple[Limit, ...]
    settings: CompareSettings
    recover: Recover | None = None
    recovery: dict[str, Any] | None = None  # its settings, for the record
    command: str = ""


class Bench:
    """The dense model with its texts, into which one method after another is put."""

    def __init__(self, job: Comparison, folder: ComparisonFolder, report: Progress) -> None:
        self.job, self.folder, self.report = job, folder, report
        if job.profile.record.objective != "next-token":
            raise HeadwiseError(
                "a comparison is of causal language models by perplexity, but "
                f"{job.source.name} is not one; compare encoders with `headwise compress`."
            )
        self.source = job.source
        refuse_other_weights(job.profile, self.source)
        self.model = load_for_profiling(self.source)
        words, most = self.source.tokenizer, job.settings.max_tokens
        self.streams = [scored_stream(words, text, most)[0] for text in job.texts]
        self.window = window_of(self.model.backbone, job.settings.window)
        self.dense_params = dense_cost(job.profile.plan.shape).attn_params
        self._subject: Subject | None = None
        self.reference = self._reference()

    def cell(self, method: str, budget: Limit) -> ComparisonCell:
        """One method at one budget."""
        whole = Budget(attn_params=budget)
        amount = whole.amount("attn_params", dense_cost(self.job.profile.plan.shape))
        found = ComparisonCell(method=method, budget=str(budget), amount=amount)
        try:
            if method in RIVALS:
                params, scores = self._rival(method, amount)
            else:
                params, scores = self._ours(method, budget, whole)
        except BudgetError as error:
            return found.model_copy(update={"problem": str(error)})
        assert params <= amount, f"{method} went over its budget"
        return ComparisonCell(
            method=method,
            budget=str(budget),
            amount=amount,
            attn_params=params,
            share=params / self.dense_params,
            texts=tuple(_score(s, nll) for s, nll in zip(scores, self.reference, strict=True)),
            cut=None if method in RIVALS else CutSettings().to_dict(),
            recovery=self.job.recovery if method == RECOVERED else None,
        )

    def tidy(self, budget: Limit, left: Sequence[tuple[Limit, str]]) -> None:
        """Remove our models of a budget that no cell needs any more."""
        if not any(b == budget and m in (OURS, RECOVERED) for b, m in left):
            shutil.rmtree(self._place(budget), ignore_errors=True)

    def _rival(self, method: str, amount: int) -> tuple[int, list[Likelihood]]:
        cut = RIVALS[method](self.subject, amount)
        with replaced_projections(self.model, dict(enumerate(cut.layers))):
            return cut.attn_params, self._likelihoods(self.model)

    def _ours(self, method: str, budget: Limit, whole: Budget) -> tuple[int, list[Likelihood]]:
        """The real checkpoint: cut, perhaps recovered, read back and counted in its files."""
        job, place = self.job, self._place(budget)
        rules = WidthRules(multiple_of=job.settings.multiple_of)
        plan = fit(fit_problem(job.profile, "sensitivity", rules), whole).plan
        origin = plan.origin.model_copy(update={"profile_sha256": job.profile.sha256})
        plan = plan.model_copy(update={"origin": origin})
        request = CutRequest(self.source, job.profile, plan, CutSettings(), job.command)
        out = place / "cut"
        if not is_cut(request, out):
            shutil.rmtree(place / "recovered", ignore_errors=True)
            cut_model(request, out, force=True, progress=self.report)
        if method == RECOVERED:
            assert job.recover is not None
            if not (place / "recovered").exists():
                job.recover(out, place / "recovered")
            out = place / "recovered"
        made = open_source(out)
        return counted(made).attn_params, self._likelihoods(made.load())

    @property
    def subject(self) -> Subject:
        """What the rivals see; measured when the first of them asks."""
        if self._subject is None:
            attentions = self.model.attentions()
            tied = any(hasattr(a, "q_norm") and a.norm_over == "all" for a in attentions)
            dense = tuple(projections_of(a).map(torch.Tensor.cpu) for a in attentions)
            self._subject = Subject(self.job.profile, dense, self._measured(), tied)
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
        cell = self.folder.dense
        if cell is None:
            cell = DenseCell(
                attn_params=self.dense_params,
                texts=tuple(
                    DenseText(tokens=f.tokens, window=f.window, stride=f.stride, nll=f.nll)
                    for f in self._likelihoods(self.model)
                ),
                weights_sha256=self.job.profile.record.weights_sha256,
            )
            self.folder.put("dense", cell)
        return [text.nll for text in cell.texts]

    def _likelihoods(self, model: Any) -> list[Likelihood]:
        return [
            likelihood(model, stream, window=self.window, stride=self.window, progress=self.report)
            for stream in self.streams
        ]

    def _place(self, budget: Limit) -> Path:
        return self.folder.work / str(budget).replace("%", "pct")


def _score(found: Likelihood, dense_nll: float) -> Score:
    gap = found.nll - dense_nll
    return Score(
        nll=found.nll,
        perplexity=found.perplexity if math.isfinite(found.perplexity) else None,
        ratio=math.exp(gap) if gap < 709 else None,
    )

"""Several methods at several budgets, all counted and measured in the same way.

    budgets × methods ──► cells       rivals: projections of the dense shape, put into the model
                                      ours:   the checkpoint that `compress` writes
    every cell: counted parameters, of attention or of all, perplexity ÷ dense on every text

DIR/run.json                  model, texts and settings; another comparison is refused
    profile/                  the profile, unless another was given
    cells/dense.json          the dense model on every text
          svd-llm@75pct.json  one method at one budget, written when it finishes
    work/                     intermediate measurements and models; removed at the end
    compare.json, pareto.*    the result
    report.html               the same as a page

A cell is saved when it finishes and never run twice. A budget that a method cannot reach is a cell
with a problem. A rival's projections replace those of the model while they are measured; the
model's own are never written to, because a live model shares them. Our model is read back and
counted in its files.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from headwise.artifacts import atomic_file, versions, write_text
from headwise.baselines.measured import Measure, measurements, missing_measures
from headwise.baselines.modegpt import modegpt
from headwise.baselines.narrowing import clover, energy, magnitude, uniform
from headwise.baselines.parts import Cut, Subject
from headwise.baselines.pruning import flap, head_pruning, llm_pruner
from headwise.baselines.record import (
    COMPARE_RECORD,
    METHODS,
    ComparedText,
    CompareSettings,
    ComparisonCell,
    ComparisonRecord,
    Counts,
    DenseCell,
    DenseText,
    Score,
    described,
    is_recovered,
    leaves_mlps,
    policy_of,
)
from headwise.baselines.svd_llm import svd_llm
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
from headwise.measure.size import Counted, counted
from headwise.models.backbones_headwise import layer_mlp, projections_of, stock_attentions
from headwise.models.build import inner, replaced_projections
from headwise.plan import Budget, Limit
from headwise.planning.cost import dense_cost
from headwise.planning.fit import fit
from headwise.planning.rules import WidthRules, qk_weight
from headwise.profiling.format import Profile
from headwise.profiling.source import load_for_profiling
from headwise.profiling.worth import fit_problem
from headwise.progress import Progress, silent
from headwise.records import parse_value, read_json, write_record
from headwise.source import Source, open_source

Cell = TypeVar("Cell", ComparisonCell, DenseCell)


@dataclass(frozen=True, slots=True)
class ComparisonFolder:
    """The files of a comparison; `cut` are the current settings of our cells."""

    path: Path
    cut: Callable[[str], Mapping[str, Any]] | None = None  # the settings of a method of ours

    @property
    def profile(self) -> Path:
        """The profile, unless the user named one."""
        return self.path / "profile"

    @property
    def work(self) -> Path:
        """Intermediate files, removed when all cells are finished."""
        return self.path / "work"

    @property
    def result(self) -> Path:
        """The finished document."""
        return self.path / COMPARE_RECORD

    @property
    def dense(self) -> DenseCell | None:
        """The dense model's figures, if they exist."""
        return _read_cell(self._cell("dense"), DenseCell)

    def cell(self, name: str) -> ComparisonCell | None:
        """A finished cell, if it exists, is intact and was made with the current settings."""
        return self._current(_read_cell(self._cell(name), ComparisonCell))

    def cells(self) -> Iterator[ComparisonCell]:
        """Every finished cell of a method."""
        for path in sorted((self.path / "cells").glob("*@*.json")):
            found = self._current(_read_cell(path, ComparisonCell))
            if found is not None:
                yield found

    def missing(self, budgets: Sequence[Limit], methods: Sequence[str]) -> list[tuple[Limit, str]]:
        """The requested cells that are not finished, budget by budget."""
        return [(b, m) for b in budgets for m in methods if self.cell(f"{m}@{b}") is None]

    def put(self, name: str, cell: ComparisonCell | DenseCell) -> None:
        """Save a finished cell atomically."""
        text = json.dumps(cell.to_dict(), indent=2, allow_nan=False)
        write_text(self._cell(name), f"{text}\n", force=True)

    def _current(self, cell: ComparisonCell | None) -> ComparisonCell | None:
        """The cell, or None for a cell of ours that was cut with other settings."""
        if cell is None or self.cut is None or cell.cut is None:
            return cell
        return cell if cell.cut == self.cut(cell.method) else None

    def _cell(self, name: str) -> Path:
        return self.path / "cells" / f"{_file_name(name)}.json"


def _file_name(cell: str) -> str:
    return cell.replace("%", "pct").replace(":", "-")


def _read_cell(path: Path, kind: type[Cell]) -> Cell | None:
    """A cell, or None if it is missing or damaged and must be made again."""
    try:
        return parse_value(read_json(path), kind, str(path))
    except HeadwiseError:
        return None


RIVALS: dict[str, Callable[[Subject, int], Cut]] = {
    "svd-llm": svd_llm,
    "clover": clover,
    "magnitude": magnitude,
    "energy": energy,
    "head-pruning": head_pruning,
    "uniform": uniform,
}
BLOCK_RIVALS: dict[str, Callable[[Subject, int], Cut]] = {  # of attention and MLPs together
    "svd-llm": partial(svd_llm, blocks=True),
    "flap": flap,
    "llm-pruner": llm_pruner,
    "modegpt": modegpt,
    "magnitude": partial(magnitude, blocks=True),
}
_NEEDS: dict[str, tuple[Measure, ...]] = {  # what no profile has
    "svd-llm": ("moments", "mlps"),
    "head-pruning": ("gates",),
    "flap": ("spread",),
    "llm-pruner": ("taylor",),
    "modegpt": ("moments", "mlps", "influence"),
}
Recover = Callable[[Path, Path], None]  # a cut model's folder, the recovered one's


@dataclass(frozen=True)
class Comparison:
    """The inputs of a comparison; the first `n_own` texts are of the calibration texts' kinds."""

    source: Source
    profile: Profile
    texts: tuple[Text, ...]
    methods: tuple[str, ...]
    budgets: tuple[Limit, ...]
    settings: CompareSettings
    n_own: int = 1
    counts: Counts = "attn_params"  # what the budgets count
    recover: Recover | None = None
    recovery: dict[str, Any] | None = None  # its settings, for the record
    command: str = ""


def cut_settings(method: str) -> CutSettings:
    """How our cells are cut: as by `compress`; cells that are trained are only folded."""
    return CutSettings(refit=False, fit=0) if is_recovered(method) else CutSettings()


def made_by(method: str) -> dict[str, Any]:
    """What our cells of a method depend on besides the comparison's settings."""
    weight = qk_weight(None, recovered=is_recovered(method))
    return {**cut_settings(method).to_dict(), "qk_weight": weight}


class Bench:
    """The dense model with its texts, into which one method after another is put."""

    def __init__(self, job: Comparison, folder: ComparisonFolder, report: Progress) -> None:
        self.job, self.folder, self.report = job, folder, report
        if job.profile.record.objective != "next-token":
            raise HeadwiseError(
                "compare measures perplexity, which needs a causal language model, but "
                f"{job.source.name} is not one; cut and verify it with `headwise compress`."
            )
        self.source = job.source
        refuse_other_weights(job.profile, self.source)
        self.model = load_for_profiling(self.source)
        words, most = self.source.tokenizer, job.settings.max_tokens
        self.streams = [scored_stream(words, text, most)[0] for text in job.texts]
        self.window = window_of(self.model.backbone, job.settings.window)
        self.dense_params = dense_cost(job.profile.plan.shape)
        self.rivals = BLOCK_RIVALS if job.counts == "params" else RIVALS
        self._subject: Subject | None = None
        self.reference = self._reference()

    def cell(self, method: str, budget: Limit) -> ComparisonCell:
        """One method at one budget."""
        counts = self.job.counts
        whole = Budget(**{counts: budget})
        amount = whole.amount(counts, self.dense_params)
        found = ComparisonCell(method=method, budget=str(budget), amount=amount)
        try:
            if method in self.rivals:
                size, scores = self._rival(method, amount)
            else:
                size, scores = self._ours(method, budget, whole)
        except BudgetError as error:
            return found.model_copy(update={"problem": str(error)})
        spent: int = getattr(size, counts)
        assert spent <= amount, f"{method} went over its budget"
        return ComparisonCell(
            method=method,
            budget=str(budget),
            amount=amount,
            attn_params=size.attn_params,
            params=size.params,
            share=spent / self.dense_params.counted(counts),
            texts=tuple(_score(s, nll) for s, nll in zip(scores, self.reference, strict=True)),
            cut=None if method in self.rivals else made_by(method),
            recovery=self.job.recovery if is_recovered(method) else None,
        )

    def tidy(self, budget: Limit, method: str) -> None:
        """Remove our models of a finished cell."""
        shutil.rmtree(self._place(budget, method), ignore_errors=True)

    def _rival(self, method: str, amount: int) -> tuple[Counted, list[Likelihood]]:
        dense, whole = self.dense_params, self.job.counts == "params"
        blocks = dense.attn_params + dense.ffn_params
        left = amount - (dense.params - blocks) * whole
        if left < 1:
            raise BudgetError(
                f"embeddings, norms and the rest have {dense.params - blocks} parameters, so a "
                f"budget of {amount} leaves nothing for the blocks; raise the budget."
            )
        cut = self.rivals[method](self.subject, left)
        layers, mlps = (dict(enumerate(some)) for some in (cut.layers, cut.mlps))
        with replaced_projections(self.model, layers, mlps):
            scores = self._likelihoods(self.model)
        kept = cut.attn_params + (cut.ffn_params if cut.mlps else dense.ffn_params)
        return Counted(cut.attn_params, dense.params - blocks + kept), scores

    def _ours(self, method: str, budget: Limit, whole: Budget) -> tuple[Counted, list[Likelihood]]:
        """The real checkpoint: cut, perhaps recovered, read back and counted in its files."""
        job, policy = self.job, policy_of(method)
        assert policy is not None
        place = self._place(budget, method)
        rules = WidthRules(
            job.settings.granularity,
            job.settings.multiple_of,
            ffn_multiple_of=job.settings.ffn_multiple_of,
            cut_ffn=not leaves_mlps(method),
            qk_weight=qk_weight(None, recovered=is_recovered(method)),
        )
        plan = fit(fit_problem(job.profile, policy, rules), whole).plan
        origin = plan.origin.model_copy(update={"profile_sha256": job.profile.sha256})
        plan = plan.model_copy(update={"origin": origin})
        settings = cut_settings(method)
        request = CutRequest(self.source, job.profile, plan, settings, job.command)
        out = place / "cut"
        if not is_cut(request, out):
            shutil.rmtree(place / "recovered", ignore_errors=True)
            cut_model(request, out, force=True, progress=self.report)
        if is_recovered(method):
            assert job.recover is not None
            if not (place / "recovered").exists():
                job.recover(out, place / "recovered")
            out = place / "recovered"
        made = open_source(out)
        return counted(made), self._likelihoods(made.load())

    @property
    def subject(self) -> Subject:
        """The rivals' inputs; measured when first needed."""
        if self._subject is None:
            attentions = self.model.attentions()
            tied = any(hasattr(a, "q_norm") and a.norm_over == "all" for a in attentions)
            dense = tuple(projections_of(a).map(torch.Tensor.cpu) for a in attentions)
            stock = inner(self.model)
            mlps = tuple(
                layer_mlp(layer, stock.config).map(torch.Tensor.cpu)
                for layer, _ in (stock_attentions(stock) if self.job.counts == "params" else ())
            )
            self._subject = Subject(self.job.profile, dense, self._measured(), tied, mlps)
        return self._subject

    def _measured(self) -> dict[str, np.ndarray]:
        pending = {m for _, m in self.folder.missing(self.job.budgets, self.job.methods)}
        wanted = {need for method in pending for need in _NEEDS.get(method, ())}
        if self.job.counts == "attn_params":
            wanted.discard("mlps")
        path = self.folder.work / "measured.safetensors"
        found = load_file(path) if path.exists() else {}
        missing = missing_measures(wanted, found)
        if missing:
            ids = torch.from_numpy(self.job.profile.ids)
            found |= measurements(self.model, ids, missing, progress=self.report)
            with atomic_file(path, force=True) as temporary:
                save_file(found, temporary)
        return found

    def _reference(self) -> list[float]:
        """Nats per token of the dense model on every text."""
        cell = self.folder.dense
        if cell is None:
            cell = DenseCell(
                attn_params=self.dense_params.attn_params,
                params=self.dense_params.params,
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

    def _place(self, budget: Limit, method: str) -> Path:
        return self.folder.work / _file_name(f"{method}@{budget}")


def _score(found: Likelihood, dense_nll: float) -> Score:
    gap = found.nll - dense_nll
    return Score(
        nll=found.nll,
        perplexity=found.perplexity if math.isfinite(found.perplexity) else None,
        ratio=math.exp(gap) if gap < 709 else None,
    )


def run_comparison(
    job: Comparison, folder: ComparisonFolder, *, progress: Progress = silent
) -> ComparisonRecord:
    """Fill in the missing cells and write the record of all cells of the folder."""
    cells = folder.missing(job.budgets, job.methods)
    if cells or folder.dense is None:
        bench = Bench(job, folder, _report(progress, 0, len(cells), "dense"))
        for done, (budget, method) in enumerate(cells):
            bench.report = _report(progress, done, len(cells), f"{method} at {budget}")
            started = time.perf_counter()
            cell = bench.cell(method, budget)
            seconds = round(time.perf_counter() - started, 1)
            folder.put(f"{method}@{budget}", cell.model_copy(update={"seconds": seconds}))
            bench.tidy(budget, method)
    record = _record(job, folder)
    write_record(folder.result, record)
    shutil.rmtree(folder.work, ignore_errors=True)
    return record


def _report(progress: Progress, done: int, total: int, cell: str) -> Progress:
    """Report progress within a cell as progress over all cells."""

    def report(what: str, part: int, parts: int) -> None:
        progress(f"comparing ({cell}: {what} {part} of {parts})", done, total)

    return report


def _record(job: Comparison, folder: ComparisonFolder) -> ComparisonRecord:
    dense, record = folder.dense, job.profile.record
    assert dense is not None
    order = {name: place for place, name in enumerate(METHODS)}
    cells = sorted(
        folder.cells(), key=lambda cell: (-cell.amount, order.get(cell.method, len(order)))
    )
    used = {cell.method for cell in cells}
    ours = [name for name in METHODS if name in used]
    texts = tuple(
        ComparedText(
            source=text.source,
            sha256=text.sha256,
            role="calibration domain" if i < job.n_own else "other text",
            tokens=score.tokens,
            window=score.window,
            stride=score.stride,
            dense_nll=score.nll,
            dense_perplexity=math.exp(score.nll) if score.nll < 709 else None,
        )
        for i, (text, score) in enumerate(zip(job.texts, dense.texts, strict=True))
    )
    seeds = {"profile": record.settings.get("seed", 0)}
    return ComparisonRecord(
        model=job.source.name,
        weights_sha256=record.weights_sha256,
        attn_params=dense.attn_params,
        params=dense.params,
        counts=job.counts,
        calibration=record.calibration,
        profile_sha256=job.profile.sha256,
        texts=texts,
        methods={name: described(name) for name in [*ours, *sorted(used - set(ours))]},
        cells=tuple(cells),
        notes=record.notes,
        settings=asdict(job.settings) | {"cut": CutSettings().to_dict()},
        seeds=seeds | _recovery_seed(cells),
        command=job.command,
        versions=dict(versions(("headwise", "torch", "transformers", "numpy"))),
    )


def _recovery_seed(cells: Sequence[ComparisonCell]) -> dict[str, int]:
    seeds = [cell.recovery["seed"] for cell in cells if cell.recovery]
    return {"recovery": seeds[0]} if seeds and isinstance(seeds[0], int) else {}

"""The layers cut one after another, each fitted to the actual output of the cut layers before it.

    dense stream   h ─► layer 0 ─► layer 1 ─► …        gives the targets
    cut stream     h ─► cut 0   ─► cut 1   ─► …        gives the inputs

A layer is fitted in three steps: W_O by regression, all four projections by the layer fit, W_O once
more. Where its MLP is cut, neurons that fire together may be merged, W_down is regressed after W_O,
and the fit trains attention and MLP together; a whole MLP stays unchanged bit for bit. The
criterion is the error of the layer's output against the dense layer's, on batches held aside.

Only one layer is in memory at a time. A finished layer is saved at once. After a kill it is read
back and only run, so the result is that of an uninterrupted run.

The text comes in batches of whole windows, and many short openings:

    windows    ▮▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯…        one first token each
    openings   ▮▯▯▯  ▮▯▯▯  ▮▯▯▯  ▮▯▯▯  …    as many first tokens as possible

A causal model uses the first token it sees as an attention sink: heads that look for nothing attend
to it. Windows contain few such tokens, and where a cut fails at one, it fails for the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.cutting.cut import cut_mlp, cut_projections
from headwise.cutting.layer_fit import (
    FitRecord,
    LayerBatches,
    LayerTask,
    attention_of,
    dense_outputs,
    fit_layer,
    fit_schedule,
)
from headwise.cutting.merging import COSINES, NeuronMoment, neuron_moment
from headwise.cutting.refit import (
    NormRegression,
    RefitRecord,
    down_regressions,
    fitted_norms,
    norm_regressions,
    refit_output,
    regressions,
)
from headwise.cutting.settings import CutSettings
from headwise.models.backbones_headwise import Projections, layer_mlp
from headwise.models.layer_stream import LayerStream
from headwise.plan import Plan
from headwise.profiling.format import Profile
from headwise.progress import Progress, silent
from headwise.records import Frozen
from headwise.runs import Run

NO_ERROR = 1e-9  # squared and relative: float32 runs of equal layers differ by less
OPENING = 4  # tokens
OPENINGS_EVERY = 6  # batches of windows
MIN_BATCHES = 8  # of fewer, none is held aside
HELD_ASIDE_EVERY = 12  # one batch of so many is held aside


@dataclass(frozen=True, slots=True)
class CalibrationBatches:
    """Batches of tokens or pixels, and the numbers of those that are held aside."""

    ids: list[Tensor]
    held_aside: tuple[int, ...]


def calibration_batches(
    ids: Tensor, settings: CutSettings, *, causal: bool, length: int | None = None
) -> CalibrationBatches:
    """The batches of a profile's windows, or of its images, which are `length` tokens each."""
    rows = max(1, settings.batch_tokens // (length or ids.shape[1]))
    windows = list(torch.split(ids, rows))
    short = _openings(ids, len(windows) // OPENINGS_EVERY, settings) if causal else []
    openings_aside = [len(windows) + b for b in held_aside(len(short))]
    return CalibrationBatches([*windows, *short], (*held_aside(len(windows)), *openings_aside))


def held_aside(n_batches: int) -> range:
    """The numbers of the batches held aside, of so many."""
    last = n_batches if n_batches >= MIN_BATCHES else 0
    return range(HELD_ASIDE_EVERY // 2, last, HELD_ASIDE_EVERY)


def _openings(ids: Tensor, n_batches: int, settings: CutSettings) -> list[Tensor]:
    """Short sequences from all over the text."""
    if not settings.openings or not n_batches or ids.shape[1] < 2 * OPENING:
        return []
    short = ids.reshape(-1)[: ids.numel() // OPENING * OPENING].view(-1, OPENING)
    rows = max(1, settings.batch_tokens // OPENING)
    chosen = torch.linspace(0, len(short) - 1, min(len(short), n_batches * rows)).long()
    return list(torch.split(short[chosen], rows))


class AttentionError(Frozen):
    """The attention's squared error as a share of its square, before and after the first refit."""

    folded: float
    refitted: float | None = None


class LayerRecord(Frozen):
    """How a layer was cut, and its error against the dense one; no error if no text was run."""

    error: AttentionError | None = None
    refit: RefitRecord | None = None
    merged_neurons: int | None = None  # neurons that others stand for
    mlp_refit: RefitRecord | None = None
    fit: FitRecord | None = None
    second_refit: RefitRecord | None = None
    second_mlp_refit: RefitRecord | None = None


@dataclass(frozen=True, slots=True)
class CutJob:
    """The inputs of a cut: the model's layers on text, the directions, the plan, the settings."""

    stream: LayerStream
    held_aside: tuple[int, ...]  # batches used to choose; empty when there are too few
    profile: Profile
    plan: Plan
    settings: CutSettings
    run: Run


@torch.no_grad()
def cut_layers(job: CutJob, progress: Progress = silent) -> None:
    """Save the cut projections of every layer as parts of the job's run."""
    stream = job.stream
    if job.settings.folds_only:
        _fold_layers(job, progress)
        return
    dense, cut = list(stream.first), list(stream.first)
    for i in stream:
        stock, mlp = _stored(job, i)
        whole = stream.planned(i, job.profile.plan.layers[i], stock)
        attention = attention_of(whole)
        cuts_mlp = mlp is not None and not job.run.has(layer_part(i))
        down = whole.get_submodule(stream.family.mlp.down) if cuts_mlp else None
        with (
            norm_regressions(attention, job.plan.layers[i], planes=stream.planes) as norms,
            neuron_moment(down if job.settings.refit else None) as moment,
        ):
            attended, after, mlp_outputs = dense_outputs(stream, whole, i, dense, mlp=cuts_mlp)
        del whole, attention, down
        if not job.run.has(layer_part(i)):
            batches = LayerBatches(cut, dense, attended, after, mlp_outputs, job.held_aside)
            task = LayerTask(stream, i, job.plan.layers[i], batches)
            start = _folded(job, i, stock, mlp).with_norms(fitted_norms(norms))
            merged = _merged(job, i, mlp, moment)
            del moment
            _keep(job, i, *_cut_layer(job, task, start, merged))
            del batches, task, merged
        del attended, mlp_outputs, mlp
        dense = after
        if i < len(stream) - 1:
            # Read back, in the checkpoint's number format: what later layers will really get, and
            # what a resumed run sees too.
            made = Projections.of_tensors(job.run.get(layer_part(i)))
            narrow = stream.planned(i, job.plan.layers[i], made)
            cut = [stream.run(narrow, i, h, b) for b, h in enumerate(cut)]
        progress("cutting", i + 1, len(stream))


def _fold_layers(job: CutJob, progress: Progress) -> None:
    """Fold the kept directions of every layer into its projections.

    No text is run, except for query and key norms, which are fitted to the dense model's.
    """
    stream, dense = job.stream, list(job.stream.first)
    for i in stream:
        stock, mlp = _stored(job, i)
        norms: dict[str, NormRegression] = {}
        if stream.family.norm:
            whole = stream.planned(i, job.profile.plan.layers[i], stock)
            attention = attention_of(whole)
            with norm_regressions(attention, job.plan.layers[i], planes=stream.planes) as norms:
                dense = [stream.run(whole, i, h, b) for b, h in enumerate(dense)]
        if not job.run.has(layer_part(i)):
            made = _folded(job, i, stock, mlp)
            _keep(job, i, made.with_norms(fitted_norms(norms)), LayerRecord())
        progress("cutting", i + 1, len(stream))


def _stored(job: CutJob, i: int) -> tuple[Projections, Projections | None]:
    """The projections of a layer's attention, and of its MLP if the plan cuts it."""
    layer = job.stream.load(i)
    cuts = job.plan.ffn_dims[i] != job.profile.plan.ffn_dims[i]
    return job.stream.projections(layer), layer_mlp(layer, job.stream.config) if cuts else None


def _folded(job: CutJob, i: int, stock: Projections, mlp: Projections | None) -> Projections:
    """What the plan keeps of a layer."""
    made = cut_projections(job.profile, job.plan, i, stock)
    if mlp is None:
        return made
    return made.replaced(**cut_mlp(job.profile, job.plan, i, mlp).by_side)


def _merged(
    job: CutJob, i: int, mlp: Projections | None, moment: NeuronMoment
) -> list[tuple[Projections, int]]:
    """Other cuts of the MLP, in which neurons stand for their twins, and for how many."""
    if mlp is None or moment.sum is None:
        return []
    sensitivity = job.profile.get(i, "ffn_sensitivity")
    tried = COSINES if job.held_aside else COSINES[:1]
    found = moment.mergings(sensitivity, job.plan.ffn_dims[i], tried)
    return [(cut_mlp(job.profile, job.plan, i, mlp, one), len(one.merged)) for one in found]


def _keep(job: CutJob, i: int, made: Projections, record: LayerRecord) -> None:
    """Save a finished layer, in the checkpoint's number format."""
    stored = made.to(_stored_dtype(job.stream, i))
    job.run.put(layer_part(i), stored.tensors(), record.to_dict())


def layer_part(i: int) -> str:
    """The name of a cut layer among the parts of a run."""
    return f"layer-{i:05d}"


def _cut_layer(
    job: CutJob, task: LayerTask, made: Projections, merged: Sequence[tuple[Projections, int]]
) -> tuple[Projections, LayerRecord]:
    """The fitted projections of a cut layer, and their error against the dense layer.

    If `made` contains an MLP, it was cut too and is fitted with the attention; `merged` are other
    cuts of it.
    """
    settings, batches = job.settings, task.batches
    cuts_mlp = "down" in made.by_side
    sums = regressions(task, made)
    attention = sums["attention"].all
    error = AttentionError(folded=attention.error(made["output"]))
    # Nothing was lost so far: a refit could only add rounding.
    lossless = error.folded <= NO_ERROR
    if lossless and not cuts_mlp:
        return made, LayerRecord(error=error)
    refit = n_merged = mlp_refit = fit = second = second_mlp = None
    if settings.refit and not lossless and (task.plan.heads or made.has_bias("output")):
        made, refit = refit_output(task, made, sums, settings.ridge)
        refitted = attention.error(made["output"])
        error = AttentionError(folded=error.folded, refitted=refitted)
    if settings.refit and cuts_mlp:
        made, n_merged, mlp_refit = _best_mlp(task, made, merged, settings)
    schedule = fit_schedule(settings, len(batches.inputs), batches.held_aside)
    # A bias alone has its optimum already.
    if schedule is not None and (task.plan.heads or cuts_mlp):
        better, fit = fit_layer(task, made, schedule)
        made = made if better is None else better
        if better is not None and settings.refit:
            least = fit.unseen_error.after
            assert least is not None
            if task.plan.heads or made.has_bias("output"):
                again, record = refit_output(task, made, regressions(task, made), settings.ridge)
                assert record.unseen_error is not None
                if record.unseen_error < least:
                    made, second = again, record
            if cuts_mlp:
                made, second_mlp = _refit_mlp(task, made, settings)
    return made, LayerRecord(
        error=error,
        refit=refit,
        merged_neurons=n_merged,
        mlp_refit=mlp_refit,
        fit=fit,
        second_refit=second,
        second_mlp_refit=second_mlp,
    )


def _best_mlp(
    task: LayerTask,
    start: Projections,
    merged: Sequence[tuple[Projections, int]],
    settings: CutSettings,
) -> tuple[Projections, int | None, RefitRecord | None]:
    """The MLP refitted, with neurons merged where that serves the batches held aside.

    Where there are none, those that are most alike are merged.
    """
    candidates = [(start, None), *((start.replaced(**mlp.by_side), n) for mlp, n in merged)]
    if not task.batches.held_aside:
        candidates = candidates[-1:]
    made = [(*_refit_mlp(task, one, settings), n) for one, n in candidates]
    best = min(made, key=lambda one: task.error(one[0])) if len(made) > 1 else made[0]
    return best[0], best[2], best[1]


def _refit_mlp(
    task: LayerTask, start: Projections, settings: CutSettings
) -> tuple[Projections, RefitRecord | None]:
    """W_down by regression; unchanged if that is no better on the batches held aside."""
    sums = down_regressions(task, start)
    made, record = refit_output(task, start, sums, settings.ridge, "down")
    if record.unseen_error is not None and record.unseen_error >= task.error(start):
        return start, None
    return made, record


def _stored_dtype(stream: LayerStream, i: int) -> torch.dtype:
    """The number format of layer `i`'s attention in the source."""
    start = f"{stream.prefix}.{i}.{stream.family.attention}."
    name = next(theirs for ours, theirs in stream.names.items() if ours.startswith(start))
    return stream.checkpoint.stored[name].dtype

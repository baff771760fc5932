"""Designing a model with proxies: small models are trained on the text and profiled.

    text, context ─► proxies (one per seed) ─► profiles ─► curves by depth ─► Plan of the target

    PROXY/run.json          inputs of the proxies; other designs with the same inputs reuse them
    PROXY/seed-0/           a training run of the proxy with seed 0, resumable
    PROXY/seed-0.profile/   its profile
    …

The text and the context are the user's, so the plan is for this length and this kind of text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.artifacts import versions
from headwise.data.mixture import read_mixture
from headwise.errors import HeadwiseError
from headwise.pipeline import is_unfinished, profile
from headwise.plan import Budget, Limit, ModelShape, Plan
from headwise.planning.design import DesignRules, new_shape
from headwise.planning.proxy import (
    Evidence,
    ProxyCurves,
    plan_from_proxies,
    proxy_curves,
    uniform_rival,
)
from headwise.planning.targets import target_of
from headwise.plans import check_plan_file, refuse_unless_run, write_plan
from headwise.profiling.format import RECORD, Profile
from headwise.profiling.worth import neuron_worths, worths
from headwise.progress import Progress, silent
from headwise.recipe import DesignRecipe
from headwise.reporting.card import REPORT
from headwise.runs import RUN, complete, differences, read_run, resume_in_place
from headwise.source import open_source
from headwise.training.loop import ProgressObserver
from headwise.training.settings import TrainSettings
from headwise.training.train import train

PROXY_HEADS = 4
OVER_WIDE = 2.0  # × the usual attention and MLP: room for layers wider than uniform
PROXY_VOCAB = 1024
LEARNING_RATE = 3e-3  # small models take more


@dataclass(frozen=True, slots=True)
class DesignResult:
    """The plan, the evidence for it over the seeds, and the folder of the proxies."""

    plan: Plan
    evidence: Evidence
    proxies: Path


def design(
    *,
    out: str | Path,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
    **options: Any,
) -> DesignResult:
    """Design a model with small proxies that are trained on a text at its context.

    `options` are those below. The plan is written to `out`, the proxies next to it; call it again
    with the same arguments to resume after a kill.

    >>> import headwise as hw
    >>> sizes = {"layers": 6, "d_model": 64, "heads": 4, "context": 32}
    >>> quick = {"seeds": 1, "steps": 2, "proxy_layers": 2, "proxy_d_model": 32, "tokens": 64}
    >>> made = hw.design(text="notes.txt", attn_params="75%", out="plan.json", **sizes, **quick)
    """
    recipe = DesignRecipe.of(**options)
    target = Path(out)
    check_plan_file(target, recipe, force)
    shape = recipe.shape
    if shape.family == "vit":
        raise HeadwiseError(
            "proxies are trained on text, and a vit model reads images; plan it with "
            "`headwise plan new`."
        )
    folder = Path(recipe.proxy) if recipe.proxy else target.with_name(f"{target.name}.proxy")
    if recipe.ffn_params is not None and not shape.ffn_dim:
        raise HeadwiseError(
            "--ffn-params limits MLPs, and the model has none, got an ffn-dim of 0; leave one of "
            "them out."
        )
    budget = recipe.budget if recipe.budget.limited else Budget(attn_params=Limit(share=1.0))
    rules = DesignRules(
        recipe.multiple_of,
        recipe.min_dim,
        batch=recipe.batch,
        ffn_multiple_of=recipe.ffn_multiple_of,
    ).tied_for(recipe.for_)
    # What no width changes, such as the family, is refused before the proxies are trained.
    rival = uniform_rival(shape, budget, rules)
    refuse_unless_run(rival, recipe.for_, "the sizes make a plan")
    with resume_in_place(folder, "design", _made_of(recipe, folder), command=command):
        curves = [_proxy(recipe, shape, folder, seed, progress) for seed in range(recipe.seeds)]
        complete(folder)
    plan, evidence = plan_from_proxies(curves, shape, budget, rules)
    if not all(target_of(name).runs(plan).yes for name in recipe.for_):
        # Classes that have keys and values of two widths have fewer biases, and no windows.
        equal = replace(rules, equal_sides=True)
        plan, evidence = plan_from_proxies(curves, shape, budget, equal)
    refuse_unless_run(plan, recipe.for_, "the proxies lead to a plan")
    told = (
        f"fitted to {recipe.seeds} proxies of {recipe.proxy_layers} layers, d_model "
        f"{recipe.proxy_d_model}, trained for {recipe.steps} steps on {' + '.join(recipe.text)} at "
        f"{shape.context} tokens"
    )
    origin = plan.origin.model_copy(
        update={
            "command": command,
            "versions": versions(),
            "notes": (told, *plan.origin.notes),
        }
    )
    plan = plan.model_copy(update={"origin": origin})
    write_plan(plan, target, recipe, force)
    return DesignResult(plan, evidence, folder)


def _made_of(recipe: DesignRecipe, folder: Path) -> dict[str, Any]:
    """What the proxies depend on, each beside its seed; those of another design are refused."""
    names = ("family", "context", "steps", "batch_size", "proxy_layers", "proxy_d_model", "tokens")
    text = read_mixture(recipe.text).sha256
    made_of = {"text": text, **{name: getattr(recipe, name) for name in names}}
    made_of["over_wide"] = {"attention": OVER_WIDE, "mlp": OVER_WIDE}
    differ = differences(read_run(folder).inputs, made_of) if (folder / RUN).exists() else {}
    if differ:
        raise HeadwiseError(
            f"{folder} holds proxies that differ in {', '.join(differ)}; name another folder with "
            "--proxy, or remove it."
        )
    return made_of


def _proxy(
    recipe: DesignRecipe, shape: ModelShape, folder: Path, seed: int, progress: Progress
) -> ProxyCurves:
    """Train the proxy of a seed, or resume it, and measure what its widths are worth."""
    run, measured = folder / f"seed-{seed}", folder / f"seed-{seed}.profile"
    small = new_shape(
        family=shape.family,
        n_layers=recipe.proxy_layers,
        d_model=recipe.proxy_d_model,
        n_heads=PROXY_HEADS,
        head_dim=round(OVER_WIDE * recipe.proxy_d_model / PROXY_HEADS),
        context=shape.context,
        vocab_size=PROXY_VOCAB,
    )
    small = small.model_copy(update={"ffn_dim": round(OVER_WIDE * small.ffn_dim)})
    settings = TrainSettings(
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        lr=LEARNING_RATE,
        seed=seed,
        device=recipe.device,  # type: ignore[arg-type]
    )
    result = train(
        Plan.uniform(small),
        recipe.text,
        run,
        settings=settings,
        observer=ProgressObserver(progress, f"proxy {seed + 1} of {recipe.seeds}"),
        progress=progress,
    )
    if result.model is None:
        raise HeadwiseError(
            f"the proxy in {run} was stopped; run the same command again to resume."
        )
    source = open_source(result.model)
    if not (measured / RECORD).is_file() or is_unfinished(measured, RECORD, (REPORT,)):
        length = min(shape.context, 512)
        profile(
            result.model,
            text=recipe.text,
            tokens=max(recipe.tokens, length),
            length=length,
            device=recipe.device,
            out=measured,
            progress=progress,
        )
    found = Profile.read(measured)
    if found.record.weights_sha256 != source.weights_sha256:
        raise HeadwiseError(
            f"{measured} is the profile of another proxy than {result.model}; remove it, or give "
            "another folder with --proxy."
        )
    return proxy_curves(
        found.plan, worths(found, "sensitivity"), neuron_worths(found, "sensitivity")
    )

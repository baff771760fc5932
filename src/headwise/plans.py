"""Plans: designed for a new model from its sizes, or fitted to a profile of a trained one.

    sizes, budget   ─► new_plan ─► Plan
    profile, budget ─► fit      ─► Plan that loses least, with the loss it predicts

Does not import torch: planning is quick and needs no model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwise.artifacts import check_output, versions, write_text
from headwise.errors import BudgetError, HeadwiseError, PlanError, did_you_mean, quoted
from headwise.plan import RESOURCES, Budget, Limit, Plan, Resource
from headwise.planning import design
from headwise.planning.design import DesignRules
from headwise.planning.fit import Fit, FitProblem, least_fit
from headwise.planning.fit import fit as fit_widths
from headwise.planning.portable import fit_for
from headwise.planning.rules import WidthRules
from headwise.planning.targets import target_of
from headwise.profiling.format import Profile
from headwise.profiling.worth import fit_problem
from headwise.recipe import FitRecipe, NewPlanRecipe, Recipe
from headwise.records import read_file
from headwise.theory.estimators import Spectrum, lag_kernel, read_vectors, token_spectrum


def new_plan(
    *,
    out: str | Path | None = None,
    force: bool = False,
    command: str = "",
    **options: Any,
) -> Plan:
    """A plan for a new model under limits such as attn_params or traffic.

    `options` are those below. With `out` the plan is also written to that file.

    >>> import headwise as hw
    >>> plan = hw.new_plan(layers=4, d_model=64, heads=4, context=128, attn_params="75%")
    """
    recipe = NewPlanRecipe.of(**options)
    check_plan_file(out, recipe, force)
    shape = recipe.shape
    tokens, kernel = _tokens(recipe)
    rules = DesignRules(
        multiple_of=recipe.multiple_of,
        min_dim=recipe.min_dim,
        batch=recipe.batch,
        token_dim=tokens,
        kernel=kernel,
        score_bound=recipe.score_bound,
        identity=recipe.identity,
        ffn_multiple_of=recipe.ffn_multiple_of,
        refill_ffn=recipe.refill_ffn,
    )
    plan = design.new_plan(shape, recipe.budget, recipe.policy, rules.tied_for(recipe.for_))
    refuse_unless_run(plan, recipe.for_, f"policy {recipe.policy} makes a plan")
    origin = plan.origin.model_copy(update={"command": command, "versions": versions()})
    made = plan.model_copy(update={"origin": origin})
    write_plan(made, out, recipe, force)
    return made


def refuse_unless_run(plan: Plan, targets: Sequence[str], made: str) -> None:
    """Raise if one of the targets does not run a plan for a new model."""
    for name in targets:
        answer = target_of(name).runs(plan)
        if not answer.yes:
            raise PlanError(
                f"{made} that {name} does not run: {answer.why_not}; `headwise plan new --policy "
                "uniform` gives all layers one width."
            )


def _tokens(recipe: NewPlanRecipe) -> tuple[int | Spectrum | None, tuple[float, ...]]:
    """Inputs of the theory policy: the tokens' width or spectrum, and the weight of each lag."""
    told = {name: getattr(recipe, name) for name in ("token_dim", "vectors", "kernel")}
    given = [f"--{name.replace('_', '-')}" for name, value in told.items() if value is not None]
    if recipe.policy != "theory" and given:
        raise HeadwiseError(
            f"{given[0]} is for --policy theory, got {quoted(recipe.policy)}; leave it out or "
            "change the policy."
        )
    if recipe.vectors is None:
        return recipe.token_dim, recipe.kernel or (1.0,)
    if recipe.token_dim is not None:
        raise HeadwiseError("--token-dim assumes what --vectors measures; give only one of them.")
    rows = read_vectors(Path(recipe.vectors))
    return token_spectrum(rows), recipe.kernel or lag_kernel(rows, None, recipe.lags).weights


def fit(
    profile: Profile | str | Path,
    *,
    out: str | Path | None = None,
    force: bool = False,
    command: str = "",
    **options: Any,
) -> Plan:
    """The plan that loses least under limits, or saves most under a limit on the loss.

    `options` are those below. With `out` the plan is also written to that file.

    >>> import headwise as hw
    >>> profile = hw.profile("./model", text="notes.txt")
    >>> plan = hw.fit(profile, attn_params="75%", kv_bytes="50%")
    """
    recipe = FitRecipe.of(profile=_name(profile), **options)
    check_plan_file(out, recipe, force)
    plan = best_fit(profile, recipe, command).plan
    write_plan(plan, out, recipe, force)
    return plan


def best_fit(profile: Profile | str | Path, recipe: FitRecipe, command: str = "") -> Fit:
    """The fit that a recipe describes, with how close to the optimum it is."""
    budget, resource = recipe.budget, resource_named(recipe.resource)
    rise = None if recipe.max_loss is None else loss_rise(recipe.max_loss)
    if rise is None and not budget.limited:
        raise BudgetError("a fit needs a budget such as --attn-params 75%, or --max-loss 0.05.")
    read = read_profile(profile)
    problem = _problem(read, recipe)

    def solve(one: FitProblem) -> Fit:
        if rise is None:
            return fit_widths(one, budget)
        return least_fit(one, rise, resource, budget)

    found = fit_for(problem, recipe.for_, solve)
    return replace(found, plan=with_origin(found.plan, read, command))


def _problem(profile: Profile, recipe: FitRecipe) -> FitProblem:
    """The problem of a fit; a cut of a model that predicts the next token will be recovered."""
    rules = recipe.rules(recovered=profile.record.recoverable)
    return fit_problem(profile, recipe.policy, rules)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The best fits along a list of limits on one resource."""

    problem: FitProblem
    resource: Resource
    fits: tuple[tuple[Limit, Fit], ...]


def sweep(profile: Profile | str | Path, limits: str, **options: Any) -> Sweep:
    """Fit the widths to several limits on one resource, such as 90%,75%,50%.

    `options` are those of `fit`.

    >>> import headwise as hw
    >>> profile = hw.profile("./model", text="notes.txt")
    >>> losses = [fit.loss_increase for _, fit in hw.sweep(profile, "90%,75%").fits]
    """
    return sweep_recipe(profile, FitRecipe.of(profile=_name(profile), **options), limits)


def sweep_recipe(profile: Profile | str | Path, recipe: FitRecipe, limits: str) -> Sweep:
    """`sweep` with the options as a recipe."""
    if recipe.max_loss is not None:
        raise BudgetError("a sweep goes over budgets, so it takes no --max-loss; leave it out.")
    resource, budget = resource_named(recipe.resource), recipe.budget
    parts = [Limit.parse(part, f"--pareto ({resource})") for part in limits.split(",")]
    problem = _problem(read_profile(profile), recipe)

    def at(one: Limit) -> Fit:
        limited = budget.model_copy(update={resource: one})
        return fit_for(problem, recipe.for_, lambda p: fit_widths(p, limited))

    fits = [(one, at(one)) for one in parts]
    return Sweep(problem, resource, tuple(fits))


def fit_plan(
    profile: Profile,
    budget: Budget,
    rules: WidthRules,
    *,
    policy: str = "sensitivity",
    command: str = "",
    targets: Sequence[str] = (),
) -> Plan:
    """The fitted plan, with the command, versions and profile it came from."""
    problem = fit_problem(profile, policy, rules)
    found = fit_for(problem, targets, lambda one: fit_widths(one, budget))
    return with_origin(found.plan, profile, command)


def with_origin(plan: Plan, profile: Profile, command: str = "") -> Plan:
    """A fitted plan that says which profile and versions it came from."""
    origin = plan.origin.model_copy(
        update={
            "command": command,
            "versions": versions(),
            "profile_sha256": profile.sha256,
            "notes": (*profile.record.notes, *plan.origin.notes),
        }
    )
    return plan.model_copy(update={"origin": origin})


def resource_named(name: str) -> Resource:
    """A resource by its name in Python (kv_bytes) or on the command line (kv-bytes)."""
    for resource in RESOURCES:
        if name.replace("-", "_") == resource:
            return resource
    known = [r.replace("_", "-") for r in RESOURCES]
    raise HeadwiseError(
        f"--resource must be a resource, got {quoted(name)}. {did_you_mean(name, known)}"
    )


def loss_rise(text: str) -> float:
    """A rise of the loss in nats; a percentage is one of perplexity."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BudgetError(
            f"--max-loss must be a rise in nats per token (0.05) or in perplexity (5%), got "
            f"{quoted(text)}."
        )
    return math.log1p(value / 100) if text.strip().endswith("%") else value


def read_plan(plan: Plan | str | Path) -> Plan:
    """A plan, or the one in a file."""
    if isinstance(plan, Plan):
        return plan
    advice = "give a plan file, such as `headwise plan fit` writes"
    return Plan.from_json(read_file(Path(plan), advice=advice), str(plan))


def read_profile(profile: Profile | str | Path) -> Profile:
    """A profile, or the one in a folder."""
    return profile if isinstance(profile, Profile) else Profile.read(Path(profile))


def _name(profile: Profile | str | Path) -> str:
    return profile.record.model if isinstance(profile, Profile) else str(profile)


def check_plan_file(out: str | Path | None, recipe: Recipe, force: bool) -> None:
    """Raise if a plan may not be written there; call it before long work."""
    if out is not None:
        check_output(Path(out), force=force, inputs=recipe.reads, kind="file")


def write_plan(plan: Plan, out: str | Path | None, recipe: Recipe, force: bool) -> None:
    """Write a plan to the file that was named, if one was."""
    if out is not None:
        write_text(Path(out), plan.to_json(), force=force, inputs=recipe.reads)

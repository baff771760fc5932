"""`headwise plan`: make a plan from a budget, look at it, count what it costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.console import command_line, draw, say, show, table
from headwise.cli.options import Common, PlotFile, options_command
from headwise.errors import BudgetError
from headwise.plan import RESOURCE_NAMES, RESOURCES, LayerPlan, Plan
from headwise.planning.cost import cost as plan_cost
from headwise.planning.cost import dense_cost
from headwise.planning.targets import runs_in
from headwise.plans import (
    Sweep,
    best_fit,
    check_plan_file,
    new_plan,
    read_plan,
    sweep_recipe,
    write_plan,
)
from headwise.recipe import CostOptions, DesignRecipe, FitRecipe, NewPlanRecipe, PlanOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.planning.fit import Fit

app = typer.Typer(
    help="Plan the heads and the MLP of every layer under a budget.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Pareto = Annotated[
    str | None,
    typer.Option("--pareto", help="Print a table over budgets of --resource: 90%,75%,50%."),
]


@app.command()
@options_command(NewPlanRecipe, out="Write the plan here.", argument=None, required=False)
def new(recipe: NewPlanRecipe, common: Common) -> None:
    """Design a plan for a new model under one or several budgets.

    Example: headwise plan new --layers 12 --d-model 768 --heads 12 --context 1024
    --attn-params 75% --kv-bytes 50% -o plan.json
    """
    how: dict[str, Any] = {"force": common.force, "command": command_line()}
    plan = new_plan(out=common.out, **how, **recipe.stated)
    _show(plan, common, costs(plan, None, recipe.batch))


@app.command()
@options_command(DesignRecipe, out="Write the plan here.", argument=None, required=True)
def design(recipe: DesignRecipe, common: Common) -> None:
    """Design a plan with small proxies trained on your text at your context, in minutes.

    Run the same command again to resume after a kill; the proxies are kept in --proxy.

    Example: headwise plan design --layers 12 --d-model 768 --heads 12 --context 256
    --attn-params 60% --text notes.txt -o plan.json
    """
    from headwise.cli.console import quiet_transformers, stderr_progress
    from headwise.designing import design as design_plan

    quiet_transformers()
    assert common.out is not None
    with stderr_progress() as progress:
        made = design_plan(
            out=common.out,
            force=common.force,
            progress=progress,
            command=command_line(),
            **recipe.stated,
        )
    counted = costs(made.plan, None, recipe.batch)
    _show(made.plan, common, counted, evidence=asdict(made.evidence), proxies=str(made.proxies))


def _show(plan: Plan, common: Common, counted: dict[str, Any], **more: Any) -> None:
    document = _document(plan, counted, **more)
    show(document, as_json=common.as_json, render=picture(plan, counted))
    if common.out:
        say(f"Wrote {common.out}.")


@app.command(name="show")
@options_command(PlanOptions, argument="plan", force=True, plot=PlotFile)
def show_plan(options: PlanOptions, common: Common) -> None:
    """Show the layers as a table with bars, and the costs.

    Example: headwise plan show plan.json --plot plan.svg
    """
    plan, plot = read_plan(options.plan), common.extra["plot"]
    if plot:
        draw(
            plot, lambda charts: charts.plan_chart(plan), force=common.force, inputs=[options.plan]
        )
    show(_document(plan, costs(plan)), as_json=common.as_json, render=picture(plan))


@app.command()
@options_command(CostOptions, argument="plan")
def cost(options: CostOptions, common: Common) -> None:
    """Count what a plan costs, next to its uniform dense model.

    Example: headwise plan cost plan.json --context 4096 --batch 16
    """
    document = costs(read_plan(options.plan), options.context, options.batch)
    show(document, as_json=common.as_json, render=_cost_table(document))


def costs(plan: Plan, context: int | None = None, batch: int = 1) -> dict[str, Any]:
    """The costs of a plan and of its dense model, JSON-ready."""
    spent, dense = plan_cost(plan, context, batch), dense_cost(plan.shape, context, batch)
    shares = {
        r: getattr(spent, r) / getattr(dense, r) if getattr(dense, r) else None for r in RESOURCES
    }
    return {"cost": spent.model_dump(), "dense": dense.model_dump(), "share": shares}


def _cost_table(document: dict[str, Any]) -> RenderableType:
    rows = []
    for resource, name in RESOURCE_NAMES.items():
        share = document["share"][resource]
        spent, dense = document["cost"][resource], document["dense"][resource]
        numbers = (f"{spent:,.0f}", f"{dense:,.0f}")
        rows.append((name, *numbers, "–" if share is None else f"{share:.1%}"))
    where = document["cost"]
    title = f"Cost at context {where['context']}, batch {where['batch']}"
    return table(title, ("", ">plan", ">uniform dense", ">share"), rows)


def picture(plan: Plan, counted: dict[str, Any] | None = None) -> RenderableType:
    """The layers as a table with bars, runs of equal layers in one row, then the costs."""
    from rich.console import Group
    from rich.text import Text

    widest = max(1, *(max(x.query_width, x.output_width) for x in plan.layers))
    neurons = max(1, *plan.ffn_dims)
    rows = []
    start = 0
    for layer, run in itertools.groupby(plan.layers):
        n = len(list(run))
        where = f"{start}" if n == 1 else f"{start}–{start + n - 1}"
        bars = [_bar(layer.query_width, widest), _bar(layer.output_width, widest)]
        if plan.shape.ffn_dim:
            bars.append(_bar(plan.ffn_dims[start], neurons))
        rows.append((where, _heads(layer), *bars))
        start += n
    columns = ["layers", "heads × qk/vo width", "query-key", "value-output"]
    columns += ["MLP"] if plan.shape.ffn_dim else []
    notes = [Text(f"Note: {note}.") for note in plan.origin.notes]
    layers = table(_title(plan), columns, rows)
    spent = _cost_table(counted or costs(plan))
    return Group(layers, *notes, spent, *_prediction(plan), _runs_in(plan))


def _runs_in(plan: Plan) -> RenderableType:
    """Which engines run the plan."""
    rows = [
        (f"{one.target} ({one.engine})", "yes" if one.yes else "no", one.how or one.why_not)
        for one in runs_in(plan)
    ]
    return table("Runs in", ("target", "runs", "details"), rows)


def _document(plan: Plan, counted: dict[str, Any], **more: Any) -> dict[str, Any]:
    engines = [
        {"target": one.target, "engine": one.engine, "runs": one.yes, "why": one.how or one.why_not}
        for one in runs_in(plan)
    ]
    written = plan.to_dict() | {"format": plan.format}
    return {"plan": written, **counted, **more, "runs_in": engines}


def _prediction(plan: Plan) -> list[str]:
    """What the profile of a fitted plan predicts, as a line."""
    rise, unit = plan.origin.predicted_loss, plan.origin.loss_unit
    if rise is None or unit is None:
        return []
    if unit == "1 − cosine of embeddings":
        return [f"Predicted {unit}: {rise:.4g}."]
    ratio = math.exp(rise) if rise < 709 else math.inf
    perplexity = f", perplexity ×{ratio:.4g}" if unit == "nats per token" else ""
    return [f"Predicted: loss +{rise:.4g} {unit}{perplexity}."]


def _title(plan: Plan) -> str:
    shape = plan.shape
    policy = f", policy {plan.origin.policy}" if plan.origin.policy else ""
    return f"{shape.family}, {shape.n_layers} layers, d_model {shape.d_model}{policy}"


def _heads(layer: LayerPlan) -> str:
    """`12 × 64/64`, grouped queries as `3 × 64/64 (3 queries each)`, then what is not learned."""
    parts = []
    for head, run in itertools.groupby(layer.heads, key=lambda h: (h.qk_dim, h.vo_dim, h.queries)):
        qk, vo, queries = head
        grouped = f" ({queries} queries each)" if queries > 1 else ""
        parts.append(f"{len(list(run))} × {qk}/{vo}{grouped}")
    identities = [f"{side} = identity" for side in layer.identities]
    return ", ".join(parts + identities) or "no attention"


def _bar(width: int, widest: int) -> str:
    """A bar of up to 9 cells, in eighths, and the number."""
    eighths = round(72 * width / widest)
    return (
        "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8]) + f" {width}"
    )


@app.command()
@options_command(
    FitRecipe, out="Write the plan here.", argument="profile", required=False, pareto=Pareto
)
def fit(recipe: FitRecipe, common: Common) -> None:
    """Find the plan that loses least under budgets, or saves most under a limit on the loss.

    Example: headwise plan fit model.profile --attn-params 75% -o plan.json

    Example: headwise plan fit model.profile --traffic 70% --batch 16 --context 4096
    """
    pareto = common.extra.get("pareto")
    if pareto is not None:
        if common.out is not None or recipe.max_loss is not None:
            raise BudgetError(
                "--pareto prints a table and makes no plan, so it cannot be combined with --out or "
                "--max-loss; leave one of them out."
            )
        _show_sweep(sweep_recipe(recipe.profile, recipe, pareto), as_json=common.as_json)
        return
    check_plan_file(common.out, recipe, common.force)
    found = best_fit(recipe.profile, recipe, command_line())
    write_plan(found.plan, common.out, recipe, common.force)
    counted = costs(found.plan, recipe.context, recipe.batch)
    _show(found.plan, common, counted, predicted=_predicted(found))


def _predicted(found: Fit) -> dict[str, float | bool | None]:
    ratio = found.perplexity_ratio
    return {
        "loss_increase": found.loss_increase,
        "perplexity_ratio": ratio if math.isfinite(ratio) else None,
        "exact": found.exact,
        "gap": found.gap,
    }


def _show_sweep(found: Sweep, *, as_json: bool) -> None:
    problem, resource = found.problem, found.resource
    where = problem.context, problem.rules.batch
    spent = [costs(one.plan, *where)["share"] for _, one in found.fits]
    document = {
        "resource": resource,
        "policy": problem.policy,
        "rows": [
            {"budget": str(limit), "share": share, **_predicted(one)}
            for (limit, one), share in zip(found.fits, spent, strict=True)
        ],
    }
    in_nats = problem.loss_unit == "nats per token"  # only then there is a perplexity
    rows = [
        (
            str(limit),
            *("–" if s is None else f"{s:.1%}" for s in share.values()),
            f"{one.loss_increase:.4g}",
            *([f"{one.perplexity_ratio:.4g}"] if in_nats else []),
        )
        for (limit, one), share in zip(found.fits, spent, strict=True)
    ]
    embedding = problem.loss_unit == "1 − cosine of embeddings"
    columns = (
        ">budget",
        *(f">{name}" for name in RESOURCE_NAMES.values()),
        ">1 − cosine" if embedding else ">loss increase",
        *([">perplexity ×"] if in_nats else []),
    )
    title = f"Budgets for {RESOURCE_NAMES[resource]}, policy {problem.policy}"
    show(document, as_json=as_json, render=table(title, columns, rows))

"""`headwise plan`: make a plan from a budget, look at it, count what it costs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli import parsing
from headwise.cli.console import (
    ForceFlag,
    JsonFlag,
    PlotFile,
    command_line,
    draw,
    read_text,
    say,
    show,
    table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.plan import Budget, LayerPlan, Plan, Resource
    from headwise.planning.fit import Fit, FitProblem
    from headwise.profiling.format import Profile

app = typer.Typer(help="Plan the attention of every layer under a budget.", no_args_is_help=True)

PlanFile = Annotated[Path, typer.Argument(help="A plan file (JSON).", show_default=False)]
Limits = list[str] | None
_LIMIT_HELP = "a share of the uniform model (75%) or a number (1.2M)"


def limit_option(what: str) -> Any:
    """An option for one limit of a budget."""
    # A list, so that an option given twice can be refused instead of silently winning.
    return typer.Option(help=f"{what}: {_LIMIT_HELP}.", metavar="LIMIT")


@app.command()
def new(
    layers: Annotated[int, typer.Option(help="Number of layers.")],
    d_model: Annotated[int, typer.Option(help="Width of the model.")],
    heads: Annotated[int, typer.Option(help="Query heads per layer of the uniform model.")],
    context: Annotated[int, typer.Option(help="Tokens a head attends to.")],
    attn_params: Annotated[Limits, limit_option("Attention parameters")] = None,
    params: Annotated[Limits, limit_option("All parameters")] = None,
    kv_bytes: Annotated[Limits, limit_option("KV bytes per token")] = None,
    flops: Annotated[Limits, limit_option("FLOPs per token")] = None,
    policy: Annotated[str, typer.Option(help="theory, uniform or more-heads-late.")] = "theory",
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads (default: --heads).")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a uniform head.")] = None,
    family: Annotated[str, typer.Option(help="What surrounds the attention.")] = "llama",
    ffn_dim: Annotated[int | None, typer.Option(help="Width of the MLP.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens in the vocabulary.")] = None,
    multiple_of: Annotated[int, typer.Option(help="Head widths are multiples of this.")] = 8,
    min_dim: Annotated[int | None, typer.Option(help="No head gets narrower than this.")] = None,
    token_dim: Annotated[
        int | None, typer.Option(help="theory: width a token fills (default: the head width).")
    ] = None,
    kernel: Annotated[str, typer.Option(help="theory: weight of each lag.")] = "1",
    identity: Annotated[
        list[str] | None,
        typer.Option(help="A projection to drop: query, key or value.", metavar="NAME"),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--out", help="Write the plan here.")] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """A plan for a new model under one or several budgets.

    Example: headwise plan new --layers 12 --d-model 768 --heads 12 --context 1024
    --attn-params 75% --kv-bytes 50% -o plan.json
    """
    from headwise.artifacts import check_output, versions, write_text
    from headwise.planning.design import DesignRules, new_plan, new_shape

    budget = parsing.budget(
        {
            "attn_params": attn_params,
            "params": params,
            "kv_bytes": kv_bytes,
            "flops": flops,
        }
    )
    if output:
        check_output(output, force=force)
    shape = new_shape(
        n_layers=layers,
        d_model=d_model,
        n_heads=heads,
        context=context,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        family=family,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
    )
    rules = DesignRules(
        multiple_of=multiple_of,
        min_dim=min_dim,
        token_dim=token_dim,
        kernel=parsing.numbers(kernel, "--kernel"),
        identity=parsing.projections(identity or []),
    )
    plan = new_plan(shape, budget, policy, rules)
    origin = plan.origin.model_copy(update={"command": command_line(), "versions": versions()})
    plan = plan.model_copy(update={"origin": origin})
    if output:
        write_text(output, plan.to_json(), force=force)
    document = {"plan": plan.to_dict() | {"format": plan.format}, **costs(plan, None)}
    show(document, as_json=json, render=picture(plan))
    if output:
        say(f"Wrote {output}.")


@app.command(name="show")
def show_plan(
    plan_file: PlanFile, plot: PlotFile = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """A table of the layers and a small picture.

    Example: headwise plan show plan.json --plot plan.svg
    """
    plan = _read(plan_file)
    if plot:
        draw(plot, lambda charts: charts.plan_chart(plan), force=force)
    document = {"plan": plan.to_dict() | {"format": plan.format}, **costs(plan, None)}
    show(document, as_json=json, render=picture(plan))


@app.command()
def cost(
    plan_file: PlanFile,
    context: Annotated[
        int | None, typer.Option(help="Tokens attended to, for FLOPs (default: the plan's).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """What a plan costs, beside its uniform dense model.

    Example: headwise plan cost plan.json --context 4096
    """
    plan = _read(plan_file)
    document = costs(plan, context)
    show(document, as_json=json, render=_cost_table(document))


def _read(path: Path) -> Plan:
    from headwise.plan import Plan

    return Plan.from_json(read_text(path, "a plan file"), str(path))


def costs(plan: Plan, context: int | None) -> dict[str, Any]:
    """The costs of a plan and of its dense model, JSON-ready."""
    from headwise.plan import RESOURCES
    from headwise.planning.cost import cost as plan_cost
    from headwise.planning.cost import dense_cost

    spent, dense = plan_cost(plan, context), dense_cost(plan.shape, context)
    shares = {
        r: getattr(spent, r) / getattr(dense, r) if getattr(dense, r) else None for r in RESOURCES
    }
    return {"cost": spent.model_dump(), "dense": dense.model_dump(), "share": shares}


def _cost_table(document: dict[str, Any]) -> RenderableType:
    from headwise.plan import RESOURCE_NAMES

    rows = []
    for resource, name in RESOURCE_NAMES.items():
        share = document["share"][resource]
        spent, dense = document["cost"][resource], document["dense"][resource]
        rows.append((name, f"{spent:,}", f"{dense:,}", "–" if share is None else f"{share:.1%}"))
    title = f"Cost at context {document['cost']['context']}"
    return table(title, ("", ">plan", ">uniform dense", ">share"), rows)


def picture(plan: Plan) -> RenderableType:
    """The layers as a table with bars, runs of equal layers in one row, then the costs."""
    from rich.console import Group
    from rich.text import Text

    widest = max(max(x.query_width, x.output_width) for x in plan.layers)
    rows = []
    start = 0
    for layer, run in itertools.groupby(plan.layers):
        n = len(list(run))
        where = f"{start}" if n == 1 else f"{start}–{start + n - 1}"
        bars = (_bar(layer.query_width, widest), _bar(layer.output_width, widest))
        rows.append((where, _heads(layer), *bars))
        start += n
    columns = ("layers", "heads × qk/vo width", "query-key", "value-output")
    notes = [Text(f"Note: {note}.") for note in plan.origin.notes]
    layers = table(_title(plan), columns, rows)
    return Group(layers, *notes, _cost_table(costs(plan, None)), *_prediction(plan))


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
    return ", ".join(parts + identities)


def _bar(width: int, widest: int) -> str:
    """A bar of up to 16 cells, in eighths, and the number."""
    eighths = round(128 * width / widest)
    return (
        "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8]) + f" {width}"
    )


@app.command()
def fit(
    profile: Annotated[Path, typer.Argument(help="A profile folder.", show_default=False)],
    attn_params: Annotated[Limits, limit_option("Attention parameters")] = None,
    params: Annotated[Limits, limit_option("All parameters")] = None,
    kv_bytes: Annotated[Limits, limit_option("KV bytes per token")] = None,
    flops: Annotated[Limits, limit_option("FLOPs per token")] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            help="Cut as far as the predicted loss rises by at most this: nats per token (0.05) "
            "or perplexity (5%).",
            metavar="RISE",
        ),
    ] = None,
    least: Annotated[
        str, typer.Option(help="What --max-loss makes small and --pareto goes through.")
    ] = "attn-params",
    pareto: Annotated[
        str | None, typer.Option(help="A table over budgets, such as 90%,75%,50%.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="sensitivity, uniform, narrower-late, saturation or energy.")
    ] = "sensitivity",
    granularity: Annotated[
        str, typer.Option(help="Widths free per head, or equal per layer or in the whole model.")
    ] = "head",
    multiple_of: Annotated[int, typer.Option(help="Head widths are multiples of this.")] = 8,
    min_dim: Annotated[int | None, typer.Option(help="No head gets narrower than this.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens attended to, for FLOPs [the model's].")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--out", help="Write the plan here.")] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """The plan that loses least under budgets, or cuts most under a loss target.

    Example: headwise plan fit model.profile --attn-params 75% -o plan.json
    """
    from headwise.artifacts import check_output, write_text
    from headwise.errors import BudgetError
    from headwise.planning.fit import WidthRules, least_fit
    from headwise.planning.fit import fit as best_fit
    from headwise.profiling.format import Profile
    from headwise.profiling.worth import fit_problem

    given = {
        "attn_params": attn_params,
        "params": params,
        "kv_bytes": kv_bytes,
        "flops": flops,
    }
    budget = parsing.budget(given)  # type: ignore[arg-type]
    resource = _resource(least)
    rise = None if max_loss is None else _rise(max_loss)
    if pareto is not None and (output is not None or rise is not None):
        raise BudgetError(
            "--pareto prints a table over budgets and makes no plan, so it goes with neither "
            "--out nor --max-loss; leave one of them out."
        )
    if pareto is None and rise is None and not budget.limited:
        raise BudgetError("a fit needs a budget such as --attn-params 75%, or --max-loss 0.05.")
    if output:
        check_output(output, force=force)
    read = Profile.read(profile)
    problem = fit_problem(read, policy, WidthRules(granularity, multiple_of, min_dim, context))
    if pareto is not None:
        _show_pareto(problem, read, budget, resource, pareto, json=json)
        return
    found = (
        best_fit(problem, budget) if rise is None else least_fit(problem, rise, resource, budget)
    )
    plan = with_origin(found, read)
    if output:
        write_text(output, plan.to_json(), force=force)
    document = {
        "plan": plan.to_dict() | {"format": plan.format},
        **costs(plan, context),
        "predicted": _predicted(found),
    }
    show(document, as_json=json, render=picture(plan))
    if output:
        say(f"Wrote {output}.")


def _resource(name: str) -> Resource:
    from headwise.errors import HeadwiseError, did_you_mean
    from headwise.plan import RESOURCES

    for resource in RESOURCES:
        if name.replace("-", "_") == resource:
            return resource
    known = [r.replace("_", "-") for r in RESOURCES]
    raise HeadwiseError(f"--least must be a resource, got {name!r}. {did_you_mean(name, known)}")


def _rise(text: str) -> float:
    """A rise of the loss in nats; a percentage is one of perplexity."""
    import math

    from headwise.errors import BudgetError

    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BudgetError(
            f"--max-loss must be nats per token (0.05) or a rise of perplexity (5%), got {text!r}."
        )
    return math.log1p(value / 100) if text.strip().endswith("%") else value


def with_origin(found: Fit, profile: Profile) -> Plan:
    """The fitted plan, with the command, versions and profile it came from."""
    from headwise.artifacts import versions

    origin = found.plan.origin.model_copy(
        update={
            "command": command_line(),
            "versions": versions(),
            "profile_sha256": profile.sha256,
            "notes": tuple(profile.record.notes),
        }
    )
    return found.plan.model_copy(update={"origin": origin})


def _predicted(found: Fit) -> dict[str, float | bool | None]:
    ratio = found.perplexity_ratio
    return {
        "loss_increase": found.loss_increase,
        "perplexity_ratio": ratio if ratio < float("inf") else None,
        "exact": found.exact,
        "gap": found.gap,
    }


def _show_pareto(
    problem: FitProblem,
    profile: Profile,
    budget: Budget,
    resource: Resource,
    shares: str,
    *,
    json: bool,
) -> None:
    from headwise.plan import RESOURCE_NAMES, Limit
    from headwise.planning.fit import fit as best_fit

    option = f"--pareto {resource.replace('_', '-')}"
    limits = [Limit.parse(part, option) for part in shares.split(",")]
    found = [(x, best_fit(problem, budget.model_copy(update={resource: x}))) for x in limits]
    spent = [costs(f.plan, problem.context)["share"] for _, f in found]
    document = {
        "resource": resource,
        "policy": problem.policy,
        "rows": [
            {"budget": str(x), "share": share, **_predicted(f)}
            for (x, f), share in zip(found, spent, strict=True)
        ],
    }
    rows = [
        (
            str(x),
            *("–" if s is None else f"{s:.1%}" for s in share.values()),
            f"{f.loss_increase:.4g}",
            f"{f.perplexity_ratio:.4g}",
        )
        for (x, f), share in zip(found, spent, strict=True)
    ]
    embedding = profile.record.objective == "embedding"
    columns = (
        ">budget",
        *(f">{name}" for name in RESOURCE_NAMES.values()),
        ">1 − cosine" if embedding else ">loss increase",
        ">perplexity ×",
    )
    if embedding or profile.record.of_images:  # it has no perplexity
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    title = f"Budgets for {RESOURCE_NAMES[resource]}, policy {problem.policy}"
    show(document, as_json=json, render=table(title, columns, rows))

"""`headwise plan fit`: the widths a profile asks for, under budgets or a loss target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli import parsing
from headwise.cli import plan as plan_cli
from headwise.cli.console import ForceFlag, JsonFlag, command_line, say, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.plan import Budget, Plan, Resource
    from headwise.planning.fit import Fit, Task
    from headwise.profile.format import Profile


def fit(
    profile: Annotated[Path, typer.Argument(help="A profile folder.", show_default=False)],
    attn_params: Annotated[plan_cli.Limits, plan_cli.limit_option("Attention parameters")] = None,
    total_params: Annotated[plan_cli.Limits, plan_cli.limit_option("All parameters")] = None,
    kv_bytes: Annotated[plan_cli.Limits, plan_cli.limit_option("KV bytes per token")] = None,
    flops: Annotated[plan_cli.Limits, plan_cli.limit_option("FLOPs per token")] = None,
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
        str, typer.Option(help="sensitivity, uniform, linear, saturation or energy.")
    ] = "sensitivity",
    granularity: Annotated[
        str, typer.Option(help="Widths free per head, or equal per layer or in the whole model.")
    ] = "head",
    multiple_of: Annotated[int, typer.Option(help="Head widths are multiples of this.")] = 8,
    min_dim: Annotated[int | None, typer.Option(help="No head gets narrower than this.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens attended to, for FLOPs [the model's].")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """The plan that loses least under budgets, or cuts most under a loss target.

    Example: headwise plan fit model.profile --attn-params 75% -o plan.json
    """
    from headwise.artifacts import refuse_existing, write_text
    from headwise.errors import BudgetError
    from headwise.planning.fit import fit as best_fit
    from headwise.planning.fit import least_fit
    from headwise.planning.worth_curves import FitRules
    from headwise.profile.format import Profile
    from headwise.profile.worth import fit_task

    given = {
        "attn_params": attn_params,
        "total_params": total_params,
        "kv_bytes": kv_bytes,
        "flops": flops,
    }
    budget = parsing.budget(given)  # type: ignore[arg-type]
    resource = _resource(least)
    rise = None if max_loss is None else _rise(max_loss)
    if pareto is not None and (output is not None or rise is not None):
        raise BudgetError(
            "--pareto prints a table over budgets and makes no plan, so it goes with neither "
            "--output nor --max-loss; leave one of them out."
        )
    if pareto is None and rise is None and not budget.limited:
        raise BudgetError("a fit needs a budget such as --attn-params 75%, or --max-loss 0.05.")
    if output:
        refuse_existing(output, force=force)
    read = Profile.read(profile)
    task = fit_task(read, policy, FitRules(granularity, multiple_of, min_dim, context))
    if pareto is not None:
        _show_pareto(task, read, budget, resource, pareto, json=json)
        return
    found = best_fit(task, budget) if rise is None else least_fit(task, rise, resource, budget)
    plan = with_origin(found, read)
    if output:
        write_text(output, plan.to_json(), force=force)
    document = {
        "plan": plan.to_dict() | {"format": plan.format},
        **plan_cli.costs(plan, context),
        "predicted": _predicted(found),
    }
    show(document, as_json=json, render=_picture(plan, found, read))
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

    notes = (*profile.record.notes, f"predicted loss increase {found.loss_increase:.6g}")
    origin = found.plan.origin.model_copy(
        update={
            "command": command_line(),
            "versions": versions(),
            "profile_sha256": profile.sha256,
            "notes": notes,
        }
    )
    return found.plan.model_copy(update={"origin": origin})


def _predicted(found: Fit) -> dict[str, float | bool | None]:
    ratio = found.perplexity_ratio
    return {
        "loss_increase": found.loss_increase,
        "perplexity_ratio": ratio if ratio < float("inf") else None,
        "exact": found.exact,
    }


def _words(found: Fit, profile: Profile) -> str:
    if profile.record.objective == "embedding":
        return f"Predicted 1 − cosine of embeddings: {found.loss_increase:.4g}."
    rise = f"Predicted: loss +{found.loss_increase:.4g} {profile.record.unit}"
    if profile.record.of_images:  # it has no perplexity
        return f"{rise}."
    return f"{rise}, perplexity ×{found.perplexity_ratio:.4g}."


def _picture(plan: Plan, found: Fit, profile: Profile) -> RenderableType:
    from rich.console import Group

    return Group(plan_cli.picture(plan), _words(found, profile))


def _show_pareto(
    task: Task, profile: Profile, budget: Budget, resource: Resource, shares: str, *, json: bool
) -> None:
    from headwise.plan import RESOURCE_NAMES, Limit
    from headwise.planning.fit import fit as best_fit

    option = f"--pareto {resource.replace('_', '-')}"
    limits = [Limit.parse(part, option) for part in shares.split(",")]
    found = [(x, best_fit(task, budget.model_copy(update={resource: x}))) for x in limits]
    costs = [plan_cli.costs(f.plan, task.context)["share"] for _, f in found]
    document = {
        "resource": resource,
        "policy": task.policy,
        "rows": [
            {"budget": str(x), "share": share, **_predicted(f)}
            for (x, f), share in zip(found, costs, strict=True)
        ],
    }
    rows = [
        (
            str(x),
            *("–" if s is None else f"{s:.1%}" for s in share.values()),
            f"{f.loss_increase:.4g}",
            f"{f.perplexity_ratio:.4g}",
        )
        for (x, f), share in zip(found, costs, strict=True)
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
    title = f"Budgets for {RESOURCE_NAMES[resource]}, policy {task.policy}"
    show(document, as_json=json, render=table(title, columns, rows))

"""`headwise plan`: make a plan from a budget, look at it, count what it costs."""

from __future__ import annotations

import itertools
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

    from headwise.plan import LayerPlan, Plan

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
    total_params: Annotated[Limits, limit_option("All parameters")] = None,
    kv_bytes: Annotated[Limits, limit_option("KV bytes per token")] = None,
    flops: Annotated[Limits, limit_option("FLOPs per token")] = None,
    policy: Annotated[str, typer.Option(help="theory, uniform or linear.")] = "theory",
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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """A plan for a new model under one or several budgets.

    Example: headwise plan new --layers 12 --d-model 768 --heads 12 --context 1024
    --attn-params 75% --kv-bytes 50% -o plan.json
    """
    from headwise.artifacts import refuse_existing, versions, write_text
    from headwise.planning.families import new_shape
    from headwise.planning.policies import Rules, new_plan

    budget = parsing.budget(
        {
            "attn_params": attn_params,
            "total_params": total_params,
            "kv_bytes": kv_bytes,
            "flops": flops,
        }
    )
    if output:
        refuse_existing(output, force=force)
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
    rules = Rules(
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
    return Group(layers, *notes, _cost_table(costs(plan, None)))


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

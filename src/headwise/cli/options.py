"""Commands generated from their options, which are the fields of a recipe.

    @options_command(ProfileRecipe, out="The profile's folder.")
    def profile(recipe, common): …          ──►   headwise profile MODEL --text … -o …

Names, defaults, help and checks are those of `headwise.recipe`, so the command line, Python and
recipe.yaml always agree. An invalid value is reported with the option's name.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

import headwise as hw
from headwise.cli.console import command_line, quiet_transformers, stderr_progress
from headwise.errors import BudgetError, HeadwiseError
from headwise.plan import RESOURCES, Limit
from headwise.recipe import CommandOptions, Numbers, Recipe, flag
from headwise.records import first_problem

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ForceFlag = Annotated[
    bool, typer.Option("--force", help="Replace an output that headwise wrote earlier.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw a chart: a .png, .svg or .html file.")
]


@dataclass(frozen=True, slots=True)
class Common:
    """The common options of commands; `extra` are the options of a single command."""

    out: Path | None
    force: bool
    as_json: bool
    extra: Mapping[str, Any] = field(default_factory=dict)

    def run(self, recipe: Recipe) -> Any:
        """Run a recipe, with its progress on stderr."""
        quiet_transformers()
        how: dict[str, Any] = {"out": self.out, "force": self.force, "command": command_line()}
        with stderr_progress() as progress:
            return hw.run(recipe, progress=progress, **how)


def options_command(
    kind: type[CommandOptions],
    *,
    out: str | None = None,
    argument: str | tuple[str, ...] | None = "model",
    required: bool = True,
    force: bool | None = None,
    **extra: Any,
) -> Callable[[Callable[[Any, Common], None]], Callable[..., None]]:
    """Make a typer command of a function that takes options of this kind.

    `out` is the help of --out, which is optional if it is not `required` (None: the command
    has none); `argument` names the positional options; `force` says whether there is a --force
    (None: if there is an --out); `extra` are annotations of further options, whose default is
    None or False.
    """

    positional = (argument,) if isinstance(argument, str) else argument or ()

    def decorate(function: Callable[[Any, Common], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            common = Common(
                values.pop("out", None),
                values.pop("force", False),
                values.pop("as_json"),
                {name: values.pop(name) for name in extra},
            )
            given = {name: value for name, value in values.items() if _was_given(ctx, name)}
            function(read_options(kind, given), common)

        own = [
            inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(_parameter(n, f, n in positional) for n, f in kind.options().items()),
        ]
        if out is not None:
            path: Any = Path if required else Path | None
            place = Annotated[path, typer.Option("-o", "--out", help=out)]
            own.append(_keyword("out", place, inspect.Parameter.empty if required else None))
        if force if force is not None else out is not None:
            own.append(_keyword("force", ForceFlag, False))
        own += [
            _keyword(n, hint, False if get_args(hint)[0] is bool else None)
            for n, hint in extra.items()
        ]
        own.append(_keyword("as_json", JsonFlag, False))
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own}
        command.act = function  # type: ignore[attr-defined]  # for `headwise run`
        return command

    return decorate


def read_options(kind: type[CommandOptions], values: Mapping[str, Any]) -> Any:
    """The options given on the command line, checked."""
    stated: dict[str, Any] = {}
    for name, value in values.items():
        if _is_limit(name, kind.options()[name]):
            stated[name] = one_limit(name, value)
        else:
            stated[name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind.model_validate(stated)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
        problem = first_problem(error, kind, {})
        raise HeadwiseError(problem.replace(name, flag(name), 1) if name else problem) from error


def one_limit(name: str, texts: list[str]) -> str | None:
    """A limit that may be given once, or several times with the same value."""
    limits = {str(Limit.parse(text, flag(name))): None for text in texts}
    if len(limits) > 1:
        raise BudgetError(
            f"{flag(name)} must be given once, got {' and '.join(limits)}, which contradict each "
            "other; keep one of them."
        )
    return next(iter(limits), None)


def _parameter(name: str, field: FieldInfo, positional: bool) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.is_required() else field.default
    help_text = field.description or ""
    kind = _typer_type(name, field)
    if isinstance(default, tuple):
        default = ",".join(f"{value:g}" for value in default) or None
    if positional:
        return _keyword(
            name, Annotated[kind, typer.Argument(help=help_text, show_default=False)], default
        )
    metavar = "LIMIT" if _is_limit(name, field) else None
    option = typer.Option(flag(name), help=help_text, metavar=metavar)
    if kind in (bool, bool | None):
        names = (flag(name),) if default is False else (f"{flag(name)}/--no-{flag(name)[2:]}",)
        option = typer.Option(*names, help=help_text)
    return _keyword(name, Annotated[kind, option], default)


def _is_limit(name: str, field: FieldInfo) -> bool:
    """Whether an option is one limit of a budget; given twice, the two must agree."""
    checked = any(isinstance(rule, BeforeValidator) for rule in field.metadata)  # a `LimitText`
    return name in RESOURCES and checked


def _typer_type(name: str, field: FieldInfo) -> Any:
    """What typer reads: plain types; anything else is text that the recipe checks."""
    if _is_limit(name, field):
        return list[str] | None
    kind = field.annotation
    optional = False
    if get_origin(kind) in (Union, types.UnionType):
        inner = [a for a in get_args(kind) if a is not type(None)]
        optional, kind = len(inner) < len(get_args(kind)), inner[0]
    if get_origin(kind) is tuple and kind != get_args(Numbers)[0]:
        return list[str] | None
    plain = kind if kind in (int, float, bool) else str
    return plain | None if optional else plain


def _keyword(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _was_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name not in {"DEFAULT", "DEFAULT_MAP"}

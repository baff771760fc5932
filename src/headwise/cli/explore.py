"""`headwise explore`: try budgets on a profile with sliders, in a browser."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from headwise.artifacts import check_output, write_text
from headwise.cli.console import say, show, shown
from headwise.cli.options import ForceFlag, JsonFlag
from headwise.errors import HeadwiseError
from headwise.profiling.format import Profile
from headwise.reporting.explorer.answers import Answers


def explore(
    profile: Annotated[Path, typer.Argument(help="A profile folder.", show_default=False)],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 8137,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the page as one file instead of serving it.")
    ] = None,
    step: Annotated[
        float, typer.Option(min=1, max=50, help="With --save: percent between budgets.")
    ] = 5.0,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens attended to, for FLOPs and traffic.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 1,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Try budgets with sliders: the page shows the plan, its costs and the predicted loss.

    Serves the page on 127.0.0.1 until you press Ctrl-C.

    Example: headwise explore model.profile --save plans.html
    """
    if save is not None:
        check_output(save, force=force)
        if open_page:
            raise HeadwiseError("--open is for the served page; leave it out, or leave out --save.")
    answers = Answers(Profile.read(profile), context, batch)
    if save is not None:
        _save(answers, str(profile), save, step, force=force, json=json)
    else:
        _serve(answers, str(profile), port, open_page=open_page, json=json)


def _save(
    answers: Answers, where: str, save: Path, step: float, *, force: bool, json: bool
) -> None:
    from headwise.reporting.explorer.server import saved_page  # jinja2 is an extra

    with shown() as progress:
        page = saved_page(answers, where, step, progress)
    write_text(save, page, force=force)
    show({"page": str(save), "bytes": len(page.encode())}, as_json=json, render=f"Wrote {save}.")


def _serve(answers: Answers, where: str, port: int, *, open_page: bool, json: bool) -> None:
    from headwise.reporting.explorer.server import Server, live_page  # jinja2 is an extra

    with Server(answers, live_page(answers, where), port) as server:
        show({"url": server.url}, as_json=json, render=server.url)
        sys.stdout.flush()
        say("Press Ctrl-C to stop.")
        if open_page:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("Stopped.")

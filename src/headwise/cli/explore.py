"""`headwise explore`: try budgets on a profile with sliders, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.console import ForceFlag, JsonFlag, say, show
from headwise.errors import HeadwiseError


def explore(
    profile: Annotated[Path, typer.Argument(help="A profile folder.", show_default=False)],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 8137,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write one file that needs no server, then end.")
    ] = None,
    step: Annotated[
        float, typer.Option(min=1, max=50, help="--save: percent between two budgets.")
    ] = 5.0,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Sliders for budgets; the plan, its costs and the predicted loss follow.

    Serves on 127.0.0.1 until Ctrl-C.

    Example: headwise explore model.profile --save plans.html
    """
    from headwise.artifacts import refuse_existing
    from headwise.profile.format import Profile
    from headwise.report.explorer.answers import Answers

    if save is not None:
        refuse_existing(save, force=force)
        if open_page:
            raise HeadwiseError("--open shows the served page, and --save serves none; open it.")
    answers = Answers(Profile.read(profile))
    if save is not None:
        _save(answers, str(profile), save, step, force=force, json=json)
    else:
        _serve(answers, str(profile), port, open_page=open_page, json=json)


def _save(answers: object, where: str, save: Path, step: float, *, force: bool, json: bool) -> None:
    from headwise.artifacts import write_text
    from headwise.cli.progress import shown
    from headwise.report.explorer.answers import Answers
    from headwise.report.explorer.page import saved_page

    assert isinstance(answers, Answers)
    with shown("solving") as progress:
        page = saved_page(answers, where, step, progress.update)
    write_text(save, page, force=force)
    show({"page": str(save), "bytes": len(page.encode())}, as_json=json, render=f"Wrote {save}.")


def _serve(answers: object, where: str, port: int, *, open_page: bool, json: bool) -> None:
    import sys
    import webbrowser

    from headwise.report.explorer.answers import Answers
    from headwise.report.explorer.page import live_page
    from headwise.report.explorer.server import Server

    assert isinstance(answers, Answers)
    with Server(answers, live_page(answers, where), port) as server:
        show({"url": server.url}, as_json=json, render=server.url)
        sys.stdout.flush()
        say("Ctrl-C ends it.")
        if open_page:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("Ended.")

"""`headwise explore`: try budgets on a profile with sliders, in a browser."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path

from headwise.artifacts import check_output, write_text
from headwise.cli.console import say, show, stderr_progress
from headwise.cli.options import Common, options_command
from headwise.errors import HeadwiseError
from headwise.profiling.format import Profile
from headwise.recipe import ExploreOptions
from headwise.reporting.explorer.answers import Answers


@options_command(ExploreOptions, argument="profile", force=True)
def explore(options: ExploreOptions, common: Common) -> None:
    """Try budgets with sliders: the page shows the plan, its costs and the predicted loss.

    Serves the page on 127.0.0.1 until you press Ctrl-C.

    Example: headwise explore model.profile --save plans.html
    """
    if options.save is not None:
        check_output(Path(options.save), force=common.force, inputs=[options.profile], kind="page")
        if options.open:
            raise HeadwiseError("--open is for the served page; leave it out, or leave out --save.")
    read = Profile.read(Path(options.profile))
    answers = Answers(read, options.context, options.batch, options.for_, options.qk_weight)
    if options.save is not None:
        _save(answers, options, Path(options.save), common)
    else:
        _serve(answers, options, as_json=common.as_json)


def _save(answers: Answers, options: ExploreOptions, save: Path, common: Common) -> None:
    from headwise.reporting.explorer.server import saved_page  # jinja2 is an extra

    with stderr_progress() as progress:
        page = saved_page(answers, options.profile, options.step, progress)
    write_text(save, page, force=common.force, inputs=[options.profile], kind="page")
    document = {"page": str(save), "bytes": len(page.encode())}
    show(document, as_json=common.as_json, render=f"Wrote {save}.")


def _serve(answers: Answers, options: ExploreOptions, *, as_json: bool) -> None:
    from headwise.reporting.explorer.server import Server, live_page  # jinja2 is an extra

    with Server(answers, live_page(answers, options.profile), options.port) as server:
        show({"url": server.url}, as_json=as_json, render=server.url)
        sys.stdout.flush()
        say("Press Ctrl-C to stop.")
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("Stopped.")

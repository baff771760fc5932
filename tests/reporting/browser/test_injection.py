"""No name runs as a script, in any page, in a real browser."""

import threading

import pytest

from headwise.baselines.record import read_comparison
from headwise.plan import Origin
from headwise.profiling.format import Profile
from headwise.reporting.charts import pareto_chart, plan_chart, save_chart
from headwise.reporting.explorer.answers import Answers
from headwise.reporting.explorer.server import Server, live_page, saved_page
from headwise.reporting.pages import report
from headwise.reporting.sources import read_report_source

from ..payloads import HIT, PAYLOADS, write_everything

pytestmark = pytest.mark.slow

KINDS = ("script", "image", "end of script", "end of style", "attribute", "template")
DRAWN = "return document.querySelectorAll('svg').length > 0"
LIVE = "return !busy && document.querySelectorAll('#now svg.map').length === 2"


def unharmed(browser, address, ready=DRAWN):
    browser.open(address)
    browser.wait(ready)
    assert browser.run("return window.hit === undefined"), address
    assert browser.console() == []
    assert not [
        url for url in browser.requests() if url.startswith("http") and "127.0.0.1" not in url
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_runs_as_a_script(browser, made, tmp_path, kind):
    payload = PAYLOADS[kind]
    paths = write_everything(made, tmp_path / "in", payload)
    for name in ("profile", "cut", "run", "compare"):
        page = report(paths[name], tmp_path / f"{name}.html")
        unharmed(browser, page.as_uri())
    plan = read_report_source(paths["run"]).plan
    plan = plan.model_copy(update={"origin": Origin(policy=payload)})
    record = read_comparison(paths["compare"])
    for name, chart in (("plan", plan_chart(plan)), ("pareto", pareto_chart(record))):
        for ending in ("html", "svg"):
            save_chart(chart, tmp_path / f"{name}.{ending}")
            unharmed(browser, (tmp_path / f"{name}.{ending}").as_uri())
    answers = Answers(Profile.read(paths["profile"]))
    where = str(paths["profile"])
    (tmp_path / "saved.html").write_text(saved_page(answers, where, 50))
    unharmed(browser, (tmp_path / "saved.html").as_uri(), LIVE)
    with Server(answers, live_page(answers, where)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            unharmed(browser, server.url, LIVE)
        finally:
            server.shutdown()
            thread.join()


def test_the_check_can_fail(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(f"<svg></svg><script>{HIT}</script>")
    with pytest.raises(AssertionError):
        unharmed(browser, bad.as_uri())

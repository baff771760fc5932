"""Figures in a real browser, whose font may be wider than the one the figure was laid out in."""

from pathlib import Path

import pytest

from headwise.papers.harness.charts import Axes, Point, curves
from headwise.papers.harness.judging import summary
from headwise.reporting import charts

pytestmark = pytest.mark.slow

COMMITTED = sorted(Path(__file__).parents[3].glob("docs/reproduce/full/figures/*.svg"))
CUT_OFF = """
const page = document.documentElement.getBoundingClientRect();
return [...document.querySelectorAll("text")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && (box.left < page.left || box.right > page.left + arguments[0]);
}).map(one => one.textContent);
"""
WIDTH = "return document.documentElement.viewBox.baseVal.width"


def cut_off(browser, figure):
    """The words that do not fit into the figure."""
    browser.open(figure.as_uri())
    return browser.run(CUT_OFF, browser.run(WIDTH))


@pytest.fixture
def long_legend():
    names = ("random start, fine-tuned", "with the wider of two weights, moved more than once")
    points = [Point(x, summary([x, x + 1.0]), name) for name in names for x in (1, 2)]
    return curves(points, Axes("A title", "across", "up"))


def test_legends_fit(browser, tmp_path, long_legend):
    charts.save_chart(long_legend, tmp_path / "roomy.svg")
    assert cut_off(browser, tmp_path / "roomy.svg") == []


def test_words_that_do_not_fit_are_seen(browser, tmp_path, long_legend, monkeypatch):
    monkeypatch.setitem(charts.SVG_PADDING, "right", -30)
    charts.save_chart(long_legend, tmp_path / "tight.svg")
    assert cut_off(browser, tmp_path / "tight.svg")


@pytest.mark.skipif(not COMMITTED, reason="the documentation is not here")
def test_the_words_of_the_documented_figures_fit(browser):
    assert {path.name: words for path in COMMITTED if (words := cut_off(browser, path))} == {}

"""`headwise report`: what a page says, that it stays at home, and that it can be read by all."""

import html.parser
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from headwise.measure.record import Measured, Rate, RateChange
from headwise.planning.fit import predicted_loss
from headwise.planning.rules import WidthRules
from headwise.profiling.format import RECORD, Profile
from headwise.profiling.worth import fit_problem
from headwise.reporting.cut_page import cut_warnings
from headwise.reporting.names import text_name
from headwise.reporting.page import inline_svg, places, rows_chart
from headwise.reporting.pages import report, report_html
from headwise.reporting.profile_figures import sensitivity_figure, spectrum_figures
from headwise.reporting.sources import CutModel, read_report_source


class Reader(html.parser.HTMLParser):
    """The elements of a page with their attributes, and that they are closed in order."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def kinds(made, folder):
    return {
        "cut": made.cut(folder / "small", verification=made.verification()),
        "unverified": made.cut(folder / "bare"),
        "profile": made.profile(folder / "p"),
        "run": made.run(folder / "run"),
    }


@pytest.fixture(scope="module")
def pages(made, tmp_path_factory):
    """Every kind of page, made once."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, path in kinds(made, folder).items():
        report(path, folder / f"{name}.html")
        found[name] = (folder / f"{name}.html").read_text()
    return found


@pytest.mark.parametrize("kind", ["cut", "unverified", "profile", "run"])
def test_a_page_stays_at_home(pages, kind):
    page = pages[kind]
    reader = Reader(page)
    assert reader.open == []
    assert not reader.all("script")
    for tag, attributes in reader.found:
        for name in ("src", "href", "xlink:href", "action"):
            value = attributes.get(name, "#")
            assert value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    policy = next(m for m in reader.all("meta") if "http-equiv" in m)["content"]
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("kind", ["cut", "unverified", "profile", "run"])
def test_every_chart_has_words_and_numbers(pages, kind):
    reader = Reader(pages[kind])
    figures, images = reader.all("figure"), [a for _, a in reader.found if a.get("role") == "img"]
    assert len(figures) == len(images) == len(reader.all("details")) > 0
    assert all(len(image["aria-label"]) > 30 for image in images)
    assert all(svg["aria-hidden"] == "true" for svg in reader.all("svg"))
    assert len(reader.all("h1")) == 1
    assert reader.all("html")[0]["lang"] == "en"


@pytest.mark.parametrize("kind", ["cut", "profile"])
def test_names_inside_charts_do_not_meet(pages, kind):
    names = re.findall(r'\bid="([^"]+)"', pages[kind])
    assert len(names) == len(set(names))


def test_the_headline_says_before_and_after(pages):
    page = pages["cut"]
    for words in ("×1.050", "20.00 → 21.00 on mine.txt", "×1.250", "1,000 → 750, counted", "75.0%"):
        assert words in page
    assert "×1.20" in page  # decode
    assert "50 → 60 tokens/s, faster" in page


def test_texts_are_named_with_one_pair_of_brackets():
    facts = {"sha256": "", "role": "calibration domain", "is_calibration_text": False}
    assert text_name(Measured(source="a.txt", **facts)) == "a.txt (calibration domain)"
    held = Measured(source="a.txt (held out)", **facts)
    assert text_name(held) == "a.txt (held out, calibration domain)"


@pytest.mark.slow
def test_speeds_that_overlap_are_neither_good_nor_bad(made, tmp_path, headwise):
    def change(low, high):
        dense, cut = Rate(median=50, low=45, high=55), Rate(median=40, low=low, high=high)
        return RateChange(dense=dense, cut=cut, ratio=0.8).direction

    assert change(30.0, 44.0) == "slower"
    assert change(30.0, 46.0) == change(54.0, 60.0) == "within the spread"
    assert change(56.0, 60.0) == "faster"
    verification = made.verification(1.01, 1.02)
    for side in ("dense", "cut"):
        verification["speed"]["points"][0][side] |= {"low": 10.0, "high": 190.0}
    path = made.cut(tmp_path / "small", verification=verification)
    assert headwise("report", path, "-o", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "100 → 80 tokens/s, within the spread" in page
    assert "not always faster" not in page


def test_warnings_are_plain_words_and_not_always_there(made, tmp_path, pages):
    for words in (
        "the perplexity is 25% higher than before",
        "mine.txt is the text the model was calibrated on.",
        "A target was missed: --max-ratio must be at most 1.01, but is 1.05.",
        "It is smaller but not always faster: prefill of 51 tokens runs at 80%",
        "It scores worse on piqa: -10.0% ± 2.0% of 200 questions.",
        "serving, longer was left out: no time.",
        "calibrated on only 88 tokens",
    ):
        assert words in pages["cut"], words
    assert "decode after 51 tokens runs" not in pages["cut"]
    assert "This model has not been measured yet" in pages["unverified"]
    assert "has not been measured" not in pages["cut"]
    quiet = made.verification(1.01, 1.02) | {
        "warnings": [],
        "targets": [],
        "speed": None,
        "tasks": [],
    }
    used = {"source": "mine.txt", "sha256": "3" * 64, "tokens": 99999}
    path = made.cut(tmp_path / "good", verification=quiet, calibration=used)
    source = read_report_source(path)
    assert cut_warnings(source, math.log(1.01)) == []
    assert len(cut_warnings(source, 9 * math.log(1.01))) == 1


def test_the_prediction_is_the_planners(made, tmp_path, pages):
    source = read_report_source(made.cut(tmp_path / "small"))
    assert isinstance(source, CutModel)
    task = fit_problem(source.profile, "sensitivity", WidthRules())
    loss = predicted_loss(task, source.plan)
    assert loss > 0
    assert f"Predicted {loss:+.3f}, measured {math.log(1.05):+.3f} on mine.txt" in pages["cut"]
    # What the layers drop adds up to it, and to nothing when the plan drops nothing.
    figure = sensitivity_figure(source.profile, source.plan)
    dropped = [figure.columns.index(f"{side}, dropped") for side in ("query-key", "value-output")]
    assert sum(row[c] for row in figure.rows for c in dropped) == pytest.approx(loss)
    whole = sensitivity_figure(source.profile, source.profile.plan)
    assert sum(row[c] for row in whole.rows for c in dropped) == pytest.approx(0, abs=1e-12)


def test_without_the_profile_the_plan_says_what_was_predicted(made, tmp_path):
    path = made.cut(tmp_path / "small", verification=made.verification())
    predicted = read_report_source(path).plan.origin.predicted_loss
    assert predicted > 0
    shutil.rmtree(tmp_path / "small.profile")
    source = read_report_source(path)
    assert source.profile is None
    assert f"Predicted {predicted:+.3f}, measured" in report_html(source)


@pytest.mark.slow
def test_names_from_files_are_escaped(made, tmp_path, headwise):
    evil = "<script>alert(1)</script>&\"'"
    verification = made.verification()
    verification["texts"][0]["source"] = evil
    path = made.cut(tmp_path / "small", verification=verification, model=evil, command=evil)
    assert headwise("report", path, "-o", tmp_path / "r.html").code == 0
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert Reader(page).open == []


def test_a_training_run(made, tmp_path, pages):
    page = pages["run"]
    assert "Held-out loss" in page
    assert "0.300" in page  # 6 / 20
    assert "saw every token about 23 times" in page
    stopped = made.run(tmp_path / "stopped", status="interrupted", steps=3)
    page = report_html(read_report_source(stopped))
    assert "The run is interrupted." in page
    assert "Samples" not in page
    empty = made.run(tmp_path / "empty", steps=0, status="running")
    assert "No step has been taken yet" in report_html(read_report_source(empty))


@pytest.mark.slow
def test_a_comparison_beside_a_cut_or_alone(made, tmp_path, headwise):
    path, file = made.cut(tmp_path / "small"), tmp_path / "compare.json"
    file.write_text(json.dumps(made.comparison()))
    for k, words in enumerate(((path, "--compare", file), (file,))):
        done = headwise("report", *words, "-o", tmp_path / f"{k}.html")
        assert done.code == 0, done.err
        page = (tmp_path / f"{k}.html").read_text()
        assert "headwise loses least at 75% (×1.100)" in page
        assert "not reached" in page


def test_a_profile_beside_that_is_another_is_left_out(made, tmp_path, headwise):
    path = made.cut(tmp_path / "small", profile_sha256="f" * 64)
    assert read_report_source(path).profile is None
    assert read_report_source(made.cut(tmp_path / "own")).profile is not None
    done = headwise("report", path, "--profile", tmp_path / "small.profile", "-o", tmp_path / "r")
    assert done.code == 2
    assert "is not the profile that" in done.err


def test_output_is_not_overwritten(made, tmp_path, headwise):
    path, out = made.profile(tmp_path / "p"), tmp_path / "r.html"
    out.write_text("mine")
    done = headwise("report", path, "-o", out)
    assert done.code == 2
    assert out.read_text() == "mine"
    done = headwise("report", path, "-o", out, "--force", "--json")
    assert json.loads(done.out)["bytes"] == len(out.read_bytes())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("nowhere", (), "does not exist"),
        ("empty", (), "holds none of them"),
        ("p", ("--compare", "p"), "p/compare.json does not exist"),
        ("small", ("--compare", "small/headwise.json"), "the format 'headwise-compare/2', got"),
        ("broken", (), "broken/headwise.json holds invalid JSON at line 1"),
        ("listed", (), "listed/headwise.json must have the format 'headwise-cut/2', got 'list'"),
    ],
)
def test_wrong_input_is_one_sentence(made, tmp_path, headwise, monkeypatch, name, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    made.profile(tmp_path / "p")
    made.cut(tmp_path / "small")
    for folder, text in (("broken", "{"), ("listed", "[]")):
        made.cut(tmp_path / folder)
        (tmp_path / folder / "headwise.json").write_text(text)
    done = headwise("report", name, *words, "-o", "r.html")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not Path("r.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rotary": 12},
        pytest.param({"rotary": 0}, marks=pytest.mark.slow),
        {"qk_whole": True, "notes": ("queries and keys are left alone",)},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"objective": "embedding", "loss": None},
                {"layers": 1, "groups": 1},
                {"layers": 13, "groups": 11},
            )
        ),
    ],
)
def test_profiles_of_every_kind_have_a_page(made, tmp_path, options):
    page = report_html(read_report_source(made.profile(tmp_path / "p", **options)))
    assert Reader(page).open == []
    if "notes" in options:
        assert "Queries and keys are left alone." in page
        assert "Spectra, query-key" not in page


def test_places_are_spread_from_first_to_last():
    assert places(3, 5) == [0, 1, 2]
    assert places(11, 3) == [0, 5, 10]
    assert places(101, 11)[-1] == 100


def test_inner_names_get_the_charts_own():
    chart = rows_chart([{"x": 1, "y": 2}]).mark_line(clip=True).encode(x="x:Q", y="y:Q")
    first, second = inline_svg(chart, "a"), inline_svg(chart, "b")
    names = set(re.findall(r'id="([^"]+)"', first))
    assert names
    assert not names & set(re.findall(r'id="([^"]+)"', second))
    for target in re.findall(r"url\(#([^)]+)\)", first):
        assert target in names
    assert "currentColor" in first


def test_a_map_of_profiles_spectra_marks_what_is_kept(made, tmp_path):
    source = read_report_source(made.cut(tmp_path / "small"))
    figures = {figure.title: figure for figure in spectrum_figures(source.profile, source.plan)}
    rows = figures["Spectra, value-output"].rows
    widths = [head.vo_dim for layer in source.plan.layers for head in layer.heads]
    assert [row[1] for row in rows] == widths
    sensitivity = source.profile.get(0, "vo_sensitivity")[0]
    assert rows[0][3] == pytest.approx(0.5 * float(np.max(sensitivity)))


def test_a_profile_that_is_damaged_is_refused(made, tmp_path, headwise):
    path = made.profile(tmp_path / "p")
    (path / RECORD).write_text("{}")
    done = headwise("report", path, "-o", tmp_path / "r.html")
    assert done.code == 2
    with pytest.raises(Exception, match="format"):
        Profile.read(path)


def test_speed_tasks_and_samples_are_shown_side_by_side(pages):
    for words in (
        "decode after 16 × 13 tokens",
        "2.00 GiB → 1.00 GiB",
        "×1.25",  # of the dense model with the same code
        "40 → 80 of 51 tokens in 24.00 GiB",
        "70.0% ± 3.0%",
        "-10.0% ± 2.0%",
        "5 / 25",
        "a mime",
    ):
        assert words in pages["cut"], words

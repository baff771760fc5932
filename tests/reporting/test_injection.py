"""Names that are HTML, Markdown, templates or terminal escapes stay names in every output."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from headwise.baselines.record import read_comparison
from headwise.cli.console import say, show, table
from headwise.errors import printable
from headwise.exporting.card import write_export_card
from headwise.exporting.record import ExportRecord
from headwise.plan import Origin, Plan
from headwise.planning.design import new_shape
from headwise.profiling.format import Profile
from headwise.reporting.card import CARD, code, plain, write_card
from headwise.reporting.charts import pareto_chart, plan_chart, save_chart
from headwise.reporting.explorer.answers import Answers
from headwise.reporting.explorer.server import live_page, saved_page
from headwise.reporting.pages import report
from headwise.reporting.sources import read_report_source
from tests import lanes

from .payloads import (
    DRAWING,
    PAYLOADS,
    Elements,
    broken_name,
    is_quiet_text,
    poisoned,
    write_everything,
)

HARMLESS = "name"
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
EVERY = pytest.mark.parametrize("kind", PAYLOADS)


def pages_of(made, folder, payload):
    """Every HTML output there is, as text."""
    paths = write_everything(made, folder / "in", payload)
    found = {}
    for kind, path in paths.items():
        found[kind] = report(path, folder / f"{kind}.html").read_text()
    both = report(paths["cut"], folder / "both.html", compare=paths["compare"])
    found["cut and compare"] = both.read_text()
    answers = Answers(Profile.read(paths["profile"]))
    found["explorer"] = live_page(answers, str(paths["profile"]))
    found["saved explorer"] = saved_page(answers, str(paths["profile"]), 50)
    origin = Origin(policy=payload, notes=(payload,))
    plan = read_report_source(paths["run"]).plan.model_copy(update={"origin": origin})
    for name, chart in (
        ("pareto", pareto_chart(read_comparison(paths["compare"]))),
        ("plan", plan_chart(plan)),
    ):
        save_chart(chart, folder / f"{name}.html")
        found[name] = (folder / f"{name}.html").read_text()
    return found


@pytest.fixture(scope="module")
def harmless(made, tmp_path_factory):
    return pages_of(made, tmp_path_factory.mktemp("harmless"), HARMLESS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "attribute", "end of script"])
def test_a_name_never_becomes_an_element(made, tmp_path, harmless, kind):
    payload = " ".join(PAYLOADS.values()) if kind == "all" else PAYLOADS[kind]
    found = pages_of(made, tmp_path, payload)
    assert found.keys() == harmless.keys()
    for name, page in found.items():
        ours, theirs = Elements(harmless[name]), Elements(page)
        assert theirs.tags == ours.tags, name
        assert theirs.drawn <= DRAWING, name
        assert theirs.bad == [], name


@pytest.mark.slow
@pytest.mark.parametrize("kind", lanes.slow_but(("attribute", "end of script"), PAYLOADS))
def test_a_drawing_is_valid_and_has_no_script(made, tmp_path, kind):
    record = read_comparison(write_everything(made, tmp_path / "in", PAYLOADS[kind])["compare"])
    save_chart(pareto_chart(record), tmp_path / "x.svg")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    tags = {element.tag.rpartition("}")[2].lower() for element in root.iter()}
    assert tags <= DRAWING
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)


def card_html(folder):
    """The card as the Hub would draw it."""
    _, _, body = (folder / CARD).read_text().split("---\n", 2)
    return MARKDOWN.render(body)


@pytest.fixture(scope="module")
def cut_folder(made, tmp_path_factory):
    """A cut model with its weights, so that a card can be written."""
    from headwise.models.build import build_model

    folder = tmp_path_factory.mktemp("card") / "small"
    made.cut(folder, verification=made.verification())
    shape = new_shape(n_layers=2, d_model=24, n_heads=3, context=31, vocab_size=53, family="llama")
    build_model(Plan.uniform(shape), task="causal-lm", seed=1).save_pretrained(folder)
    return folder, {n: (folder / n).read_text() for n in ("headwise.json", "verify.json")}


@EVERY
def test_a_name_in_a_card_never_becomes_markdown(cut_folder, kind):
    folder, records = cut_folder
    drawn = []
    for payload in (HARMLESS, PAYLOADS[kind]):
        (folder / CARD).unlink(missing_ok=True)
        for name, text in records.items():
            (folder / name).write_text(json.dumps(poisoned(json.loads(text), payload)))
        write_card(folder, name=payload)
        assert is_quiet_text((folder / CARD).read_text())
        drawn.append(Elements(card_html(folder)))
    ours, theirs = ([tag for tag in page.tags if tag != "code"] for page in drawn)
    assert ours == theirs
    assert drawn[1].bad == []


@EVERY
def test_a_name_in_the_card_of_an_export_never_becomes_markdown(tmp_path, kind):
    shape = new_shape(n_layers=2, d_model=24, n_heads=3, context=31, vocab_size=53, family="llama")
    source = SimpleNamespace(plan=Plan.uniform(shape), task="causal-lm")
    drawn = []
    for name in (HARMLESS, PAYLOADS[kind]):
        record = ExportRecord(
            key="", model=name, target="stock", architecture=name, dtype="float32", notes=(name,)
        )
        write_export_card(tmp_path, record, source, name=name)
        assert is_quiet_text((tmp_path / CARD).read_text())
        drawn.append(Elements(card_html(tmp_path)))
    ours, theirs = ([tag for tag in page.tags if tag != "code"] for page in drawn)
    assert ours == theirs
    assert drawn[1].bad == []


def test_markdown_names_are_read_as_they_are():
    for payload in PAYLOADS.values():
        shown = printable(" ".join(payload.split()), keep="")
        for escaped in (plain(payload), code(payload)):
            (line,) = MARKDOWN.parseInline(escaped)
            assert "".join(child.content for child in line.children) == shown
            assert MARKDOWN.render(f"| a |\n|---|\n| {escaped} |\n").count("<td>") == 1
    assert code("my_model") == "`my_model`"
    assert plain("my_model-2") == "my_model-2"


@EVERY
def test_a_terminal_is_only_shown_text(made, tmp_path, headwise, kind):
    payload = PAYLOADS[kind]
    run = read_report_source(made.run(tmp_path / "run"))
    origin = Origin(policy=payload, notes=(payload,), command=payload)
    plan = tmp_path / "plan.json"
    plan.write_text(run.plan.model_copy(update={"origin": origin}).to_json())
    for words in (
        ("plan", "show", plan),
        ("plan", "show", tmp_path / payload.replace("/", "")),
        ("report", tmp_path / payload.replace("/", "")),
        ("plan", "new", "--policy", payload, "--layers", 2, "--d-model", 8, "--heads", 2),
    ):
        done = headwise(*words)
        assert is_quiet_text(done.out), done.out
        assert is_quiet_text(done.err), done.err


def test_markup_and_emoji_codes_are_only_text(capsys):
    for payload in PAYLOADS.values():
        say(payload)
        show({}, as_json=False, render=table(payload, (payload,), [(payload,)]))
        show({}, as_json=False, render=payload)
        shown = capsys.readouterr()
        assert is_quiet_text(shown.out)
        assert is_quiet_text(shown.err)
        assert printable(payload) in shown.err
    say(PAYLOADS["markup"])
    assert ":bomb:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_whose_name_is_not_utf8_has_a_page(made, tmp_path):
    folder = broken_name(tmp_path)
    try:
        made.run(folder)
    except OSError:
        pytest.skip("the file system has UTF-8 names only")
    page = report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Training run: bad" in page


def test_the_checks_can_fail(made, tmp_path):
    paths = write_everything(made, tmp_path / "in", PAYLOADS["end of script"])
    raw = pareto_chart(read_comparison(paths["compare"])).to_html()
    assert Elements(raw).tags.count("script") > 4  # as altair writes it
    page = "<p>{}</p>"
    assert Elements(page.format(PAYLOADS["script"])).tags == ["p", "script"]
    assert Elements(page.format(PAYLOADS["image"])).bad
    assert not is_quiet_text(PAYLOADS["terminal"])
    assert not is_quiet_text(PAYLOADS["direction"])

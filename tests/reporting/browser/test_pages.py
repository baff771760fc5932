"""The pages in a real browser: moved, read, downloaded, reloaded; quiet and at home throughout."""

import json
import shlex
import threading
import time

import pytest

from headwise.plan import Plan
from headwise.profiling.format import Profile
from headwise.reporting.explorer.answers import Answers
from headwise.reporting.explorer.server import Server, live_page, saved_page
from headwise.reporting.pages import report

pytestmark = pytest.mark.slow

READY = "return !busy && document.querySelectorAll('#now svg.map').length === 2"
BIG = "return document.querySelector('#now .big').textContent"


@pytest.fixture(scope="module")
def place(made, tmp_path_factory):
    """A profile, its explorer served and saved, and reports of every kind."""
    folder = tmp_path_factory.mktemp("pages with spaces")
    path = made.profile(folder / "my profile", rotary=20)
    answers = Answers(Profile.read(path))
    (folder / "saved.html").write_text(saved_page(answers, str(path), 10))
    report(path, folder / "profile.html")
    report(made.cut(folder / "small", verification=made.verification()), folder / "cut.html")
    report(made.run(folder / "run"), folder / "run.html")
    with Server(answers, live_page(answers, str(path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield {
            "profile": path,
            "live": server.url,
            **{n: (folder / f"{n}.html").as_uri() for n in ("saved", "profile", "cut", "run")},
            "folder": path,
        }
        server.shutdown()
        thread.join()


def quiet_and_at_home(browser, home):
    assert browser.console() == []
    asked = browser.requests()
    assert asked
    for url in asked:
        assert url.startswith((home.split("#")[0], f"{home}plan?", "blob:", "data:")), url


def downloaded(browser):
    end = time.monotonic() + 60
    # The name is there before its content is.
    while not (found := [p for p in browser.downloads.glob("plan*.json") if p.stat().st_size]):
        assert time.monotonic() < end
        time.sleep(0.05)
    text = found[0].read_text()
    found[0].unlink()
    return text


@pytest.mark.parametrize("kind", ["live", "saved"])
def test_a_moved_slider_moves_the_numbers(browser, place, kind):
    browser.open(place[kind])
    browser.wait(READY)
    before = browser.run(BIG), browser.text("#now table"), browser.text("#fit")
    browser.press("#attn_params", "left", "left")
    browser.wait(READY)
    after = browser.run(BIG), browser.text("#now table"), browser.text("#fit")
    assert all(a != b for a, b in zip(before, after, strict=True))
    ratio = [float(words.split("×")[1]) for words in (before[0], after[0])]
    assert ratio[1] > ratio[0] > 1
    # A moved slider survives a reload.
    browser.reload()
    browser.wait(READY)
    assert browser.run(BIG) == after[0]
    assert browser.text("#fit") == after[2]
    quiet_and_at_home(browser, place[kind])


@pytest.mark.parametrize("kind", ["live", "saved"])
def test_the_downloaded_plan_is_the_command_lines(browser, place, kind, headwise, tmp_path):
    browser.open(place[kind])
    browser.wait(READY)
    moves = (
        (),
        (("#attn_params", "left", "left"),),
        (("#kv_bytes", "left"), ('input[value="layer"]', "right")),
        (("#flops", "left"), ('input[name="multiple_of"]:checked', "left")),
    )
    seen = set()
    for k, move in enumerate(moves):
        for target, *keys in move:
            browser.press(target, *keys)
        browser.wait(READY)
        assert browser.text("#problem") == ""
        browser.click("#download")
        found = Plan.from_json(downloaded(browser))
        words = shlex.split(browser.text("#fit"))
        assert words[:3] == ["headwise", "plan", "fit"]
        out = tmp_path / f"{k}.json"
        done = headwise(*words[1:-1], out)
        assert done.code == 0, done.err
        expected = Plan.from_json(out.read_text())
        assert (found.layers, found.shape) == (expected.layers, expected.shape)
        own, theirs = found.origin, expected.origin
        assert (own.profile_sha256, own.policy) == (theirs.profile_sha256, theirs.policy)
        assert (own.predicted_loss, own.loss_unit) == (theirs.predicted_loss, theirs.loss_unit)
        assert own.notes == theirs.notes
        assert shlex.split(own.command) == words
        seen.add(found.layers)
    assert len(seen) == len(moves)
    quiet_and_at_home(browser, place[kind])


def head_widths(plan):
    return sum(h.qk_dim + h.vo_dim for layer in plan.layers for h in layer.heads)


@pytest.mark.parametrize("kind", ["live", "saved"])
def test_one_budget_narrows_heads_and_mlps(browser, made, headwise, tmp_path, kind):
    """Limits over both: both maps, the plan of the command line; then MLPs left whole."""
    path = made.profile(tmp_path / "p", neurons=320)
    answers = Answers(Profile.read(path))
    page = tmp_path / "page.html"
    page.write_text(saved_page(answers, str(path), 10))
    ready = READY.replace("2", "3")
    with Server(answers, live_page(answers, str(path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            home = server.url if kind == "live" else page.as_uri()
            browser.open(home)
            browser.wait(ready)
            browser.press("#params", "left", "left")
            browser.press("#kv_bytes", "left")  # the made-up heads are worth more than neurons
            browser.wait(ready)
            assert "MLP widths by layer: from " in browser.run(
                "return document.querySelectorAll('#now svg.map')[2].getAttribute('aria-label')"
            )
            browser.click("#download")
            found = Plan.from_json(downloaded(browser))
            assert found.changes_ffn
            assert head_widths(found) < head_widths(answers.profile.plan)
            words = shlex.split(browser.text("#fit"))
            assert "--params" in words
            done = headwise(*words[1:-1], tmp_path / "plan.json")
            assert done.code == 0, done.err
            expected = Plan.from_json((tmp_path / "plan.json").read_text())
            assert found.layers == expected.layers
            assert found.origin.predicted_loss == expected.origin.predicted_loss
            # Left whole: the slider of all parameters goes, those of attention come.
            browser.click('input[value="whole"]')
            browser.wait(f"{ready} && current.choice.mlps === 'whole'")
            assert browser.run("return $('params').offsetParent === null")
            browser.press("#attn_params", "left", "left")
            browser.wait(f"{ready} && current.choice.attn_params < 100")
            browser.click("#download")
            assert not Plan.from_json(downloaded(browser)).changes_ffn
            browser.wait("return document.querySelectorAll('#pareto circle.dot').length >= 4")
            quiet_and_at_home(browser, home)
        finally:
            server.shutdown()
            thread.join()


def test_two_plans_stand_side_by_side(browser, place):
    browser.open(place["saved"])
    browser.wait(READY)
    assert browser.run("return document.querySelectorAll('#then svg').length") == 0
    first = browser.run(BIG)
    browser.click("#keep")
    browser.press("#attn_params", "left")
    browser.wait(f"{BIG} !== arguments[0]", first)
    assert browser.text("#then .big") == first
    assert browser.run("return document.querySelectorAll('#pareto circle.then').length") == 1
    browser.click("#return")
    browser.wait(f"{BIG} === arguments[0]", first)
    browser.click("#drop")
    assert browser.run("return document.querySelectorAll('#then svg').length") == 0
    quiet_and_at_home(browser, place["saved"])


@pytest.mark.parametrize("kind", ["live", "saved"])
def test_the_curve_is_filled_and_the_plan_lies_on_it(browser, place, kind):
    browser.open(place[kind])
    browser.wait(READY)
    browser.wait("return document.querySelectorAll('#pareto circle.dot').length >= 4")
    browser.wait("return document.getElementById('spoken').textContent.includes('Predicted')")
    rows = browser.run(
        "return [...document.querySelectorAll('#pareto-table tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => parseFloat(cell.textContent)))"
    )
    losses = [row[2] for row in rows]
    assert losses == sorted(losses)
    assert losses[-1] > losses[0]
    browser.run(
        "const axis = document.getElementById('axis'); axis.value = 'flops';"
        "axis.dispatchEvent(new Event('change'));"
    )
    browser.wait("return document.querySelector('#pareto').textContent.includes('FLOPs')")
    quiet_and_at_home(browser, place[kind])


def test_a_server_that_is_gone_is_said(browser, place):
    browser.open(place["live"])
    browser.wait(READY)
    browser.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    browser.press("#attn_params", "home")
    browser.wait("return document.getElementById('problem').textContent.includes('not answer')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", ["live", "saved", "cut", "profile", "run"])
def test_pages_fit_a_phone_in_light_and_dark(browser, place, page, scheme):
    browser.size(360, 740, phone=True)
    browser.theme(scheme)
    browser.open(place[page])
    browser.wait("return document.querySelectorAll('svg').length > 0")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    paper, ink = browser.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    assert (_light(paper) > 0.8 and _light(ink) < 0.2) == (scheme == "light")
    assert (_light(paper) < 0.2 and _light(ink) > 0.8) == (scheme == "dark")
    colours = browser.run(
        "return [...document.querySelectorAll('figure svg text')]"
        ".map((text) => getComputedStyle(text).fill)"
    )
    if page in ("cut", "profile", "run"):
        assert colours
        assert all(abs(_light(c) - _light(paper)) > 0.5 for c in set(colours))
    quiet_and_at_home(browser, place[page])


def _light(colour):
    """The mean of a computed rgb colour's parts, from 0 to 1."""
    parts = [float(x) for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(parts) / 765


def test_colours_of_the_page_reach_into_its_charts(browser, place):
    script = (
        "return [...document.querySelectorAll('figure svg *')]"
        ".map((x) => getComputedStyle(x).fill).find((c) => c === arguments[0])"
    )
    browser.open(place["cut"])
    assert browser.run(script, "rgb(11, 98, 168)")  # --accent
    browser.theme("dark")
    assert browser.run(script, "rgb(108, 182, 255)")
    assert not browser.run(script, "rgb(11, 98, 168)")


@pytest.mark.parametrize("page", ["live", "cut"])
def test_everything_can_be_reached_by_key_and_has_a_name(browser, place, page):
    browser.open(place[page])
    browser.wait("return document.querySelectorAll('svg').length > 0")
    nodes = browser.devtools("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "slider", "radio", "combobox", "img", "image"}
    seen = [n for n in nodes if not n["ignored"] and n["role"]["value"] in wanted]
    assert len(seen) > 4
    assert all(n.get("name", {}).get("value") for n in seen)
    browser.press("body", "tab")
    assert browser.run("return document.activeElement.className") == "skip"


@pytest.mark.parametrize("page", ["cut", "live"])
def test_pages_print(browser, place, page):
    browser.theme("dark", "print")
    browser.open(place[page])
    browser.wait("return document.querySelectorAll('svg').length > 0")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert browser.pdf().startswith(b"%PDF")


def test_the_checks_can_fail(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<p style='width:900px'>wide</p><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.error('loud')</script>"
    )
    browser.size(360, 740, phone=True)
    browser.open(bad.as_uri())
    assert browser.run("return document.documentElement.scrollWidth") > 360
    with pytest.raises(AssertionError):
        quiet_and_at_home(browser, bad.as_uri())
    browser.open(bad.as_uri())
    browser.console()
    with pytest.raises(AssertionError):
        quiet_and_at_home(browser, bad.as_uri())


def test_the_page_is_told_when_no_plan_is_that_small(browser, place):
    browser.open(place["live"])
    browser.wait(READY)
    browser.press('input[name="multiple_of"]:checked', "right")
    browser.press("#attn_params", "home")
    browser.wait("return document.getElementById('problem').textContent.includes('smallest')")
    assert browser.run(READY)  # the last plan there was stays in view
    quiet_and_at_home(browser, place["live"])


def test_the_command_shown_cuts_the_model_to_the_plan(
    browser, headwise, tmp_path, monkeypatch, tiny_model
):
    """From the downloaded file and the page's own words to a cut model."""
    monkeypatch.chdir(tmp_path)
    common = ("--length", 16, "--tokens", 160, "--multiple-of", 2, "--no-verify")
    model, text = tiny_model / "model", tiny_model / "text.txt"
    done = headwise("compress", model, "--text", text, "--attn-params", "80%", "-o", "a", *common)
    assert done.code == 0, done.err
    answers = Answers(Profile.read(tmp_path / "a.profile"))
    page = tmp_path / "page.html"
    page.write_text(saved_page(answers, "a.profile", 20))
    browser.open(page.as_uri())
    browser.wait(READY.replace("2", "3"))  # the profile knows the MLPs too
    browser.click("#download")
    (tmp_path / "plan.json").write_text(downloaded(browser))
    words = shlex.split(browser.text("#cut"))
    done = headwise(*words[1:], "--no-verify")
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "smaller" / "config.json").read_text())
    wanted = Plan.from_json((tmp_path / "plan.json").read_text())
    assert Plan.from_dict(config["plan"]).layers == wanted.layers

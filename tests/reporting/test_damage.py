"""Folders with damaged files: a report of them is a page or one sentence, never a traceback."""

import json

import pytest

from headwise.errors import HeadwiseError
from headwise.reporting.pages import report_html
from headwise.reporting.sources import read_report_source
from tests.damage import changed, paths

VALUES = (..., "x", -1, None, [], {"a": 1}, 1e308, True)
FILES = {
    "cut": ("headwise.json", "verify.json", "config.json"),
    "run": ("run.json", "plan.json"),
    "compare": ("compare.json",),
    "profile": ("profile.json",),
}
PAIRS = [(kind, file) for kind, files in FILES.items() for file in files]


@pytest.fixture
def folder(made, tmp_path):
    """Makes one folder of a kind."""

    def make(kind):
        path = tmp_path / kind
        if kind == "cut":
            made.cut(path, verification=made.verification())
        elif kind == "compare":
            path.mkdir()
            (path / "compare.json").write_text(json.dumps(made.comparison()))
        else:
            getattr(made, kind)(path)
        return path

    return make


def problem_of(path):
    """The sentence with which a report is refused; None for a page."""
    try:
        read_report_source(path)
    except HeadwiseError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), PAIRS)
def test_every_changed_value_is_a_page_or_a_sentence(folder, kind, file):
    path = folder(kind)
    data = json.loads((path / file).read_text())
    refused = 0
    for k, place in enumerate(paths(data)):
        for j, value in enumerate(VALUES):
            (path / file).write_text(json.dumps(changed(data, place, value)))
            problem = problem_of(path)
            if problem is not None:
                refused += 1
                assert str(path) in problem or "profile" in problem, problem
                assert "\n" not in problem
                assert len(problem) < 1000
            elif (7 * k + j) % 101 == 0:  # drawing takes its time, so not every page is drawn
                draw(path)
    assert refused > 10


def draw(path):
    try:
        assert report_html(read_report_source(path)).startswith("<!doctype html>")
    except HeadwiseError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 99_999, b"\xff\xfe", b'{"a":1,"a":2}', b"7"])
@pytest.mark.parametrize(("kind", "file"), PAIRS)
def test_a_truncated_or_foreign_file_is_a_sentence(folder, kind, file, content):
    path = folder(kind)
    (path / file).write_bytes(content)
    problem = problem_of(path)
    assert problem is not None
    assert file in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "content", [b"{}\n", b"7\n", b"[]\n", b'{"step": "x"}\n', b"\xff\n", b'{"step": 1}\n{"st']
)
def test_damaged_metrics_are_a_sentence_or_left_out(folder, content):
    path = folder("run")
    (path / "metrics.jsonl").write_bytes(content)
    problem = problem_of(path)
    assert problem is None or ("metrics.jsonl" in problem and "\n" not in problem)


@pytest.mark.parametrize(("kind", "file"), PAIRS)
def test_a_device_or_a_folder_in_the_place_of_a_file(folder, tmp_path, kind, file):
    path = folder(kind)
    (path / file).unlink()
    (path / file).symlink_to("/dev/zero")
    assert problem_of(path) is not None
    (path / file).unlink()
    (path / file).mkdir()
    assert problem_of(path) is not None

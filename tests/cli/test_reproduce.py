"""`headwise reproduce`: choosing, running, continuing, drawing, and what it refuses."""

import json

import pytest

EXACT = ("reproduce", "bound-curve", "allocation-256", "--quick", "--workers", "1")


def test_the_claims_are_listed_without_running(headwise):
    result = headwise("reproduce", "--list")
    assert result.code == 0
    assert "bound-curve" in result.out
    document = json.loads(headwise("reproduce", "relu-skip", "--list", "--json").out)
    assert [claim["id"] for claim in document["claims"]] == ["relu-skip"]


@pytest.mark.slow
def test_two_claims_are_run_judged_and_drawn_again(headwise, tmp_path):
    folder = tmp_path / "run"
    result = headwise(*EXACT, "-o", folder, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert [c["verdict"] for c in document["claims"]] == ["holds", "holds"]
    assert "index.html" in result.err
    trial = folder / "trials" / "bound-curve.jsonl"
    before = trial.stat().st_mtime_ns
    assert headwise(*EXACT, "-o", folder).code == 0
    assert trial.stat().st_mtime_ns == before
    (folder / "table.md").unlink()
    again = headwise("reproduce", "--draw", "-o", folder)
    assert again.code == 0
    assert "holds" in again.out
    assert (folder / "table.md").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "needs a folder"),
        (("four-gramm", "-o", "x"), "Did you mean 'four-gram'?"),
        (("--seeds", "0", "-o", "x"), "--seeds must be at least 1, got 0"),
        (("--workers", "0", "-o", "x"), "--workers must be at least 1, got 0"),
        (("--draw", "--quick", "-o", "x"), "give it only -o"),
        (("--draw", "--workers", "5", "-o", "x"), "give it only -o"),
        (("--draw", "--seeds", "2", "-o", "x"), "give it only -o"),
        (("--ray", "10.0.0.5:6379", "--workers", "3", "-o", "x"), "leave it out"),
        (("--draw", "-o", "x"), "holds no results yet"),
    ],
)
def test_what_is_refused_is_refused_in_one_sentence(headwise, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    result = headwise("reproduce", *words)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_size_is_refused(headwise, tmp_path):
    assert headwise(*EXACT, "-o", tmp_path / "run").code == 0
    result = headwise("reproduce", "bound-curve", "-o", tmp_path / "run")
    assert result.code == 2
    assert "holds a quick run, but a full one" in result.err


def test_failed_trials_are_told_and_the_exit_code_says_so(headwise, tmp_path, monkeypatch):
    from headwise.papers.harness.workers import run_trial

    def fails(trial):
        raise ValueError("no such luck")

    def outcomes(pool, jobs):
        return ((trial, run_trial((fails, trial))) for _, trial in jobs)

    monkeypatch.setattr("headwise.papers.harness.workers.LocalPool.outcomes", outcomes)
    result = headwise("reproduce", "bound-curve", "--quick", "-o", tmp_path / "run")
    assert result.code == 1
    assert "1 trials failed (see table.md). Run the same command again to retry them." in result.err
    assert "no such luck" in (tmp_path / "run" / "table.md").read_text()
    assert headwise("reproduce", "--draw", "-o", tmp_path / "run").code == 0


@pytest.mark.slow
def test_a_ray_on_this_machine(headwise, tmp_path):
    pytest.importorskip("ray")
    result = headwise(*EXACT, "--ray", "local", "-o", tmp_path / "run", "--json")
    assert result.code == 0, result.err
    assert [c["verdict"] for c in json.loads(result.out)["claims"]] == ["holds", "holds"]

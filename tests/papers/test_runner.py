"""The frame: what is run, what is kept, what is judged, what is drawn; killed in the middle."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headwise.artifacts import one_writer
from headwise.errors import OutputError
from headwise.papers.claims import known_claims
from headwise.papers.harness.claim import ReproduceError, Results, Trial
from headwise.papers.harness.runner import RunRequest, judge_folder, redraw, reproduce
from headwise.papers.harness.store import Store
from headwise.papers.harness.workers import MAX_DEATHS, LocalPool, RayPool, run_trial


class HerePool:
    """Trials in this process."""

    def __init__(self):
        self.ran = []

    def check(self):
        """It always can."""

    def outcomes(self, jobs):
        for run, trial in jobs:
            self.ran.append((trial.name, trial.seed))
            yield trial, run_trial((run, trial))


def start(claims, folder, n_seeds, pool=None, **others):
    """Run these claims at toy size as the only ones there are."""
    claims = claims if isinstance(claims, tuple) else (claims,)
    known = {claim.id: claim for claim in claims}
    request = RunRequest(claims, others.pop("size", "quick"), n_seeds)
    return reproduce(request, folder, pool or HerePool(), known, **others)


def with_trials(claim, trials):
    return dataclasses.replace(
        claim, trials=lambda size, seeds: [t for t in trials if t.seed in seeds]
    )


def test_everything_is_run_once_seed_by_seed_and_drawn(toy, tmp_path):
    pool, seen = HerePool(), []
    folder = tmp_path / "run"
    (found,) = start(toy.CLAIM, folder, 2, pool, progress=lambda *told: seen.append(told)).claims
    assert pool.ran == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert found.measured == "Numbers 1, 1, 11, 11 at seeds (0, 1)."
    assert [told[1:] for told in seen] == [(done, 4) for done in range(5)]
    assert seen[-1][0] == "trials, about 0.0 s left"
    names = {p.name for p in folder.iterdir()}
    assert names == {"run.json", "trials", "figures", "table.md", "results.json", "index.html"}
    assert [p.name for p in (folder / "trials").iterdir()] == ["toy.jsonl"]

    again = HerePool()
    start(toy.CLAIM, folder, 3, again)
    assert again.ran == [("a", 2), ("b", 2)]


def test_drawing_again_runs_nothing_and_gives_the_same_files(toy, tmp_path):
    first = start(toy.CLAIM, tmp_path, 2)
    drawn = ("table.md", "results.json", "index.html", "figures/toy.svg")
    before = {name: (tmp_path / name).read_bytes() for name in drawn}
    for name in drawn:
        (tmp_path / name).unlink()
    assert redraw(tmp_path, {"toy": toy.CLAIM}) == first
    assert {name: (tmp_path / name).read_bytes() for name in drawn} == before


def test_outputs_hold_the_numbers_and_no_place_or_machine(toy, tmp_path):
    request = RunRequest((toy.CLAIM,), "quick", 2)
    reproduce(request, tmp_path, HerePool(), {**known_claims(), "toy": toy.CLAIM})
    document = json.loads((tmp_path / "results.json").read_text())
    (claim,) = document["claims"]
    assert (claim["verdict"], claim["seeds"], claim["trials"]) == ("holds", [0, 1], 4)
    assert document["provenance"]["cores"] == [os.cpu_count()]
    assert "python" in document["provenance"]["versions"]
    table = (tmp_path / "table.md").read_text()
    assert "y \\| 10. (nowhere)" in table
    page = (tmp_path / "index.html").read_text()
    assert "A toy &lt;claim&gt;." in page
    assert "data:image/svg+xml;base64," in page
    assert "*On fingers.*" in table
    assert "On fingers." in page
    assert 'alt="Toy: y over seed"' in page
    assert "Not run: bound-curve, " in page
    for place in ("http://", "https://", "<script"):
        assert place not in page
    for text in (table, page, json.dumps(document)):
        assert str(Path.home()) not in text
        assert str(tmp_path) not in text


def test_seeds_with_gaps_are_left_out_of_the_judgement(toy, tmp_path):
    trials = [Trial("toy", n, s) for s in (0, 1) for n in ("a", "b")]
    trials[2] = Trial("toy", "fails", 1)
    claim = with_trials(toy.CLAIM, trials)
    seen = []
    (found,) = start(claim, tmp_path, 2, progress=lambda what, *_: seen.append(what)).claims
    assert found.measured == "Numbers 1, 1 at seeds (0,)."
    assert (found.missing, found.trials) == (1, 3)
    assert [f.error for f in found.failures] == ["ValueError: no such luck"]
    assert any("failed: toy fails, seed 1: ValueError: no such luck" in what for what in seen)
    assert seen[-1].endswith(", 1 failed")
    assert "failed: fails, seed 1: ValueError: no such luck" in (tmp_path / "table.md").read_text()
    retried = HerePool()
    start(claim, tmp_path, 2, retried)
    assert retried.ran == [("fails", 1)]


def test_a_pool_that_cannot_run_leaves_the_folder_as_it_was(toy, tmp_path):
    class Broken(HerePool):
        def check(self):
            raise ReproduceError("No cluster.")

    with pytest.raises(ReproduceError, match="No cluster"):
        start(toy.CLAIM, tmp_path / "run", 1, Broken(), size="full")
    assert Store(tmp_path / "run").asked() is None
    start(toy.CLAIM, tmp_path / "run", 1)


def test_a_rule_that_fails_spoils_no_other_claim(toy, tmp_path):
    def fails(results: Results):
        raise KeyError("y")

    other = dataclasses.replace(toy.CLAIM, id="other", judge=fails)
    other = with_trials(other, [Trial("other", "a", 0)])
    spoiled, whole = start((other, toy.CLAIM), tmp_path, 1).claims
    assert spoiled.verdict == "not finished"
    assert spoiled.measured == "The results could not be judged: KeyError: 'y'."
    assert whole.verdict == "holds"
    page = (tmp_path / "index.html").read_text()
    assert "could not be judged" in page
    assert page.count("<img") == 1


def test_results_of_different_versions_are_told(toy, tmp_path):
    start(toy.CLAIM, tmp_path, 1)
    path = tmp_path / "trials" / "toy.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    changed = json.loads(first)
    changed["versions"]["python"] = "2.7"
    path.write_text(json.dumps(changed) + "\n" + "".join(rest))
    (found,) = redraw(tmp_path, {"toy": toy.CLAIM}).claims
    assert "different versions (python 2.7/3." in found.reasons[-1]


@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("absent", "cannot be tested here", "Unavailable: It needs a telescope."),
        ("fails", "not finished", "fails, seed 0: ValueError: no such luck"),
        ("nan", "not finished", "nan, seed 0: ValueError"),
    ],
)
def test_a_claim_without_a_whole_seed_says_why(toy, tmp_path, name, verdict, reason):
    claim = with_trials(toy.CLAIM, [Trial("toy", name, 0), Trial("toy", "a", 0)])
    (found,) = start(claim, tmp_path, 1).claims
    assert found.verdict == verdict
    assert found.reasons[0].startswith(reason)
    assert found.measured == "1 of 2 trials are done; no seed is whole."
    assert not (tmp_path / "figures").exists()


def test_a_new_version_runs_again_and_the_old_results_are_ignored(toy, tmp_path):
    start(toy.CLAIM, tmp_path, 1)
    pool = HerePool()
    start(dataclasses.replace(toy.CLAIM, version=2), tmp_path, 1, pool)
    assert len(pool.ran) == 2
    (judged,) = judge_folder(tmp_path, {"toy": toy.CLAIM})[1]  # the older ones are still there
    assert len(judged.stored) == 2


def test_a_refused_run_leaves_what_was_asked_for_as_it_was(toy, tmp_path):
    other = dataclasses.replace(toy.CLAIM, id="other")
    start(toy.CLAIM, tmp_path / "run", 1)
    before = (tmp_path / "run" / "run.json").read_bytes()
    for folder in (tmp_path / "run", tmp_path / "new"):
        pool = HerePool()
        with (
            one_writer(folder),
            pytest.raises(OutputError, match="another run is using"),
        ):
            start((toy.CLAIM, other), folder, 4, pool)
        assert pool.ran == []
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert Store(tmp_path / "new").asked() is None


def test_drawing_nothing_is_refused(tmp_path):
    with pytest.raises(ReproduceError, match="holds no results yet"):
        redraw(tmp_path / "nowhere", known_claims())


# --- processes ---------------------------------------------------------------------------------


def deadly(tmp_path, always):
    return Trial("toy", "dies", 3, {"died": str(tmp_path / "died"), "always": always})


@pytest.mark.slow
def test_a_dead_worker_is_replaced_and_its_trial_given_out_again(toy, tmp_path):
    jobs = [(toy.run, Trial("toy", "a", s)) for s in range(3)]
    jobs.insert(1, (toy.run, deadly(tmp_path, always=False)))
    jobs.append((toy.run, Trial("toy", "fails", 7)))
    found = {(t.name, t.seed): o for t, o in LocalPool(2).outcomes(jobs)}
    assert len(found) == len(jobs)
    assert found["dies", 3].values == {"y": 34}
    assert [found["a", s].values["y"] for s in range(3)] == [1, 11, 21]
    assert found["fails", 7].error == "ValueError: no such luck"
    assert found["fails", 7].trace[-1].startswith("toy_claim.py:")


@pytest.mark.slow
def test_a_trial_that_always_kills_its_worker_is_a_failure_and_no_more(toy, tmp_path):
    jobs = [(toy.run, deadly(tmp_path, always=True)), (toy.run, Trial("toy", "a", 1))]
    found = {t.name: o for t, o in LocalPool(1).outcomes(jobs)}
    assert found["dies"].error == f"its process ended {MAX_DEATHS} times, last with signal 9"
    assert found["a"].values == {"y": 11}


RUNNER = """
import sys, toy_claim
from pathlib import Path
from headwise.papers.harness.claim import Trial
from headwise.papers.harness.runner import RunRequest, reproduce
from headwise.papers.harness.workers import LocalPool
import dataclasses
folder = Path(sys.argv[1])
log, go = str(folder.parent / "log"), str(folder.parent / "go")
trials = [Trial("toy", "a", s, {"log": log}) for s in range(3)]
trials += [Trial("toy", "a", s, {"log": log, "wait": go}) for s in range(3, 5)]
claim = dataclasses.replace(toy_claim.CLAIM, trials=lambda size, seeds: trials)
if __name__ == "__main__":
    reproduce(RunRequest((claim,), "quick", 5), folder, LocalPool(2), {"toy": claim})
"""


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks processes up in /proc")
def test_a_killed_runner_takes_its_workers_along_and_goes_on_where_it_was(toy, tmp_path):
    script, folder, log = tmp_path / "script.py", tmp_path / "run", tmp_path / "log"
    script.write_text(RUNNER)
    started = subprocess.Popen([sys.executable, str(script), str(folder)])
    done = folder / "trials" / "toy.jsonl"
    # Three trials are done and the two that wait have begun.
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) == 5)
    wait_for(lambda: done.exists() and done.read_bytes().count(b"\n") == 3)
    workers = {int(row.split()[2]) for row in log.read_text().splitlines()}
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    wait_for(lambda: not any(map(is_running, workers)))
    before = done.read_bytes()
    assert before.count(b"\n") == 3
    (tmp_path / "go").touch()
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    after = done.read_bytes()
    assert after.count(b"\n") == 5
    assert after.startswith(before)
    ran = [row.split()[1] for row in log.read_text().splitlines()]
    assert sorted(ran) == ["0", "1", "2", "3", "3", "4", "4"]
    (claim,) = json.loads((folder / "results.json").read_text())["claims"]
    assert (claim["trials"], claim["missing"], claim["seeds"]) == (5, 0, [0, 1, 2, 3, 4])


# --- Ray ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_loses_nothing_when_a_worker_is_killed(toy, tmp_path):
    pytest.importorskip("ray")
    folder, log, go = tmp_path / "run", tmp_path / "log", tmp_path / "go"
    waiting = {"log": str(log), "wait": str(go)}
    trials = [Trial("toy", "a", 0, waiting), Trial("toy", "b", 0, {"log": str(log)})]
    trials += [Trial("toy", "a", 1, {"log": str(log)}), Trial("toy", "fails", 2)]
    claim = with_trials(toy.CLAIM, trials)

    def kill_the_waiting_one():
        def rows():
            return [r.split() for r in log.read_text().splitlines()] if log.exists() else []

        wait_for(lambda: any(row[:2] == ["a", "0"] for row in rows()))
        victim = next(int(row[2]) for row in rows() if row[:2] == ["a", "0"])
        os.kill(victim, signal.SIGKILL)
        go.touch()

    killer = threading.Thread(target=kill_the_waiting_one)
    killer.start()
    (found,) = start(claim, folder, 3, RayPool("local", 2)).claims
    killer.join()
    assert found.measured == "Numbers 1, 1, 11 at seeds (0, 1)."
    assert [f.error for f in found.failures] == ["ValueError: no such luck"]
    lines = (folder / "trials" / "toy.jsonl").read_text().splitlines()
    assert len(lines) == 4  # three done, one failed
    starts = [row.split()[:2] for row in log.read_text().splitlines()]
    assert starts.count(["a", "0"]) == 2  # killed once, begun again
    assert Store(folder).asked().seeds == {"toy": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_an_address_without_a_cluster_is_one_sentence(toy):
    pytest.importorskip("ray")
    jobs = [(toy.run, Trial("toy", "a", 1))]
    with pytest.raises(ReproduceError, match="No Ray cluster answers at"):
        RayPool("127.0.0.1:1", 1).check()
    with pytest.raises(ReproduceError, match="No Ray cluster answers at"):
        list(RayPool("127.0.0.1:1", 1).outcomes(jobs))

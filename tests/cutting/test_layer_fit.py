"""Layer-local fitting and the refit's ridge: judged on batches that neither of them saw."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.cutting.cut import cut_projections
from headwise.cutting.layer_fit import (
    FitSchedule,
    LayerBatches,
    LayerTask,
    dense_outputs,
    fit_layer,
    fit_schedule,
    log1p_relative_error,
)
from headwise.cutting.refit import (
    FEW_TOKENS_RIDGE,
    RIDGES,
    OutputRegression,
    best_ridge,
    refit_output,
    regressions,
)
from headwise.cutting.run import CutRequest, cut_model
from headwise.cutting.sequential import calibration_batches, held_aside
from headwise.cutting.settings import CutSettings
from headwise.models.backbones_headwise import Projection
from headwise.source import open_source

PLACE = 1


class Bench:
    """A layer to be cut in its stream."""

    def __init__(self, dense, batches=13, lost=0.0):
        rng = np.random.default_rng(3)
        rows = [torch.from_numpy(rng.integers(4, 53, (3, 13))) for _ in range(batches)]
        stream = open_source(dense.path).layers(
            [{"input_ids": r} for r in rows], dtype=torch.float32
        )
        stock = stream.projections(stream.load(PLACE))
        whole = stream.planned(PLACE, dense.profile.plan.layers[PLACE], stock)
        with torch.no_grad():
            attended, after, _ = dense_outputs(stream, whole, PLACE, stream.first, mlp=False)
        # What the layers before have lost is something that this attention can give.
        arriving = [h - lost * a for h, a in zip(stream.first, attended, strict=True)]
        plan = dense.plan(0.6)
        made = LayerBatches(arriving, stream.first, attended, after, [], tuple(held_aside(batches)))
        self.task = LayerTask(stream, PLACE, plan.layers[PLACE], made)
        self.cut = cut_projections(dense.profile, plan, PLACE, stock)

    def fit(self, schedule):
        return fit_layer(self.task, self.cut, schedule)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_fit_lowers_the_error_on_batches_held_aside(subject, name):
    bench = Bench(subject(name))
    made, seen = bench.fit(FitSchedule(60, 0.03))
    assert made is not None
    assert seen.unseen_error.after < 0.97 * seen.unseen_error.before
    before, after = bench.cut.tensors(), made.tensors()
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert all(not torch.equal(made[side].weight, p.weight) for side, p in bench.cut.items())


def test_a_fit_that_runs_away_is_thrown_away(subject, monkeypatch):
    monkeypatch.setattr(FitSchedule, "rates", lambda self, error: (30.0, 20.0))
    bench = Bench(subject("llama"))
    made, seen = bench.fit(FitSchedule(9, 0.03))
    assert made is None
    assert seen.rate is None


@pytest.mark.slow
def test_the_first_rate_that_pays_is_taken(subject, monkeypatch):
    bench = Bench(subject("llama"))

    def at(*rates):
        monkeypatch.setattr(FitSchedule, "rates", lambda self, error: rates)
        return bench.fit(FitSchedule(60, 0.03))

    (made, seen), (alone, _) = at(30.0, 0.03, 0.02), at(0.03)
    assert seen.rate == 0.03
    assert all(torch.equal(t, alone.tensors()[n]) for n, t in made.tensors().items())


def test_steps_are_shorter_where_little_is_log1p_relative_error():
    schedule = FitSchedule(9, 0.01)
    assert schedule.rates(0.5) == (0.01, 0.0025)
    first, second = schedule.rates(1e-4)
    assert first == pytest.approx(1e-3)
    assert second == first / 4


def test_a_fit_depends_on_its_seed_only(subject):
    bench = Bench(subject("llama"))

    def once(seed):
        made, _ = bench.fit(FitSchedule(5, 0.02, seed))
        return made["query"].weight

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))


def test_few_batches_are_not_fitted():
    def schedule(batches, **settings):
        return fit_schedule(CutSettings(**settings), batches, held_aside(batches))

    assert schedule(7) is None
    assert schedule(100, fit=0) is None
    assert schedule(100, fit=5) == FitSchedule(5, CutSettings().fit_rate, 0)
    # One pass over the batches that are not held aside.
    assert schedule(96).steps == 96 - len(held_aside(96)) == 88
    assert list(held_aside(24)) == [6, 18]


def test_a_causal_model_is_also_fitted_on_many_openings():
    ids = torch.arange(48 * 64).view(48, 64)
    settings = CutSettings(batch_tokens=128)
    text = calibration_batches(ids, settings, causal=True)
    windows, short = text.ids[:24], text.ids[24:]
    assert torch.equal(torch.cat(windows), ids)
    assert [tuple(rows.shape) for rows in short] == [(32, 4)] * 4
    # Runs of the text, from its beginning to its end, and no two alike.
    starts = torch.cat(short)[:, 0]
    assert torch.equal(torch.cat(short), starts[:, None] + torch.arange(4))
    assert len(starts.unique()) == 128
    assert (int(starts[0]), int(starts[-1])) == (0, ids.numel() - 4)
    # Judged on both kinds, where there are many.
    assert text.held_aside == (6, 18)
    long = calibration_batches(ids.repeat(2, 1), settings, causal=True)
    assert (len(long.ids), long.held_aside) == (48 + 8, (6, 18, 30, 42, 48 + 6))


def test_encoders_and_little_text_have_no_openings():
    ids = torch.arange(48 * 64).view(48, 64)
    plain = calibration_batches(ids, CutSettings(batch_tokens=128), causal=False)
    assert (len(plain.ids), plain.held_aside) == (24, (6, 18))
    assert len(calibration_batches(ids, CutSettings(openings=False), causal=True).ids) == 2
    little = calibration_batches(ids[:10], CutSettings(batch_tokens=128), causal=True)
    assert (len(little.ids), little.held_aside) == (5, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert_bare"])
def test_the_output_projection_mends_what_was_lost_before(subject, name):
    """Aiming at the state pays where layers before have lost something, and only there."""
    dense = subject(name)

    def state_to_attention(lost):
        bench = Bench(dense, lost=lost)
        sums = regressions(bench.task, bench.cut)
        by_aim = {
            aim: refit_output(bench.task, bench.cut, {aim: sums[aim]})[1].unseen_error
            for aim in sums
        }
        _, best = refit_output(bench.task, bench.cut, sums)
        assert best.unseen_error == min(by_aim.values()) == by_aim[best.aim]
        assert best.unseen_error < bench.task.error(bench.cut)
        return by_aim["state"] / by_aim["attention"]

    assert state_to_attention(lost=0.5) < 0.99
    # The control: with nothing lost the two aims are one, up to rounding.
    assert state_to_attention(lost=0.0) == pytest.approx(1, abs=1e-4)


def test_errors_are_shares_of_each_token_and_empty_tokens_do_not_decide():
    target = torch.ones(2, 5, 3)
    target[0, 0] = 1000
    target[0, 1] = 0
    shares = log1p_relative_error(target * 1.1 + 0.0, target)
    torch.testing.assert_close(shares[target[..., 0] > 0], torch.full((9,), 0.01).log1p())
    assert log1p_relative_error(target + 0.01, target)[0, 1] == pytest.approx(math.log(2))


def test_a_token_gone_astray_does_not_outweigh_a_thousand_others():
    target = torch.ones(1, 1000, 3)
    astray = target.clone()
    astray[0, 0] = 1e4
    assert (
        log1p_relative_error(astray, target).mean()
        < log1p_relative_error(target * 1.2, target).mean()
    )


def test_without_batches_held_aside_the_aim_is_the_attention(subject):
    bench = Bench(subject("llama"), batches=3, lost=0.2)
    _, found = refit_output(bench.task, bench.cut, regressions(bench.task, bench.cut))
    assert (found.aim, found.ridge) == ("attention", FEW_TOKENS_RIDGE)
    assert found.unseen_error is None


def test_the_ridge_is_the_one_that_serves_unseen_tokens():
    """Much noise and few tokens call for a strong pull, many tokens for a weak one."""
    rng = torch.Generator().manual_seed(4)

    def sums(tokens, noise):
        z = torch.randn(tokens, 11, generator=rng, dtype=torch.float64)
        y = z @ true.mT + noise * torch.randn(tokens, 7, generator=rng, dtype=torch.float64)
        made = OutputRegression(with_bias=False)
        made.add(z, y)
        return made

    start = torch.randn(7, 11, generator=rng, dtype=torch.float64)
    true = start + 0.1 * torch.randn(7, 11, generator=rng, dtype=torch.float64)
    few = best_ridge(sums(23, 1.0), sums(997, 1.0), Projection(start))
    many = best_ridge(sums(4001, 1.0), sums(997, 1.0), Projection(start))
    assert few > many
    assert {few, many} <= set(RIDGES)


def test_sums_add_up():
    rng = torch.Generator().manual_seed(4)
    z, y = torch.randn(29, 5, generator=rng), torch.randn(29, 3, generator=rng)
    whole, first, second = (OutputRegression(with_bias=True) for _ in range(3))
    whole.add(z, y)
    first.add(z[:11], y[:11])
    second.add(z[11:], y[11:])
    start = Projection(torch.randn(3, 5, generator=rng), torch.randn(3, generator=rng))
    one, other = whole.solution(start, 0.1), (first + second).solution(start, 0.1)
    torch.testing.assert_close(one.weight, other.weight)
    torch.testing.assert_close(one.bias, other.bias)
    empty = OutputRegression(with_bias=True)
    assert (empty + whole).error(start) == whole.error(start) == (whole + empty).error(start)


def test_a_direction_that_never_occurred_stays_where_it_was():
    rng = torch.Generator().manual_seed(4)
    z = torch.randn(29, 5, generator=rng)
    z[:, 2] = 0
    regression = OutputRegression(with_bias=False)
    regression.add(z, torch.randn(29, 3, generator=rng))
    start = torch.randn(3, 5, generator=rng)
    W_O = regression.solution(Projection(start), 0.0).weight
    torch.testing.assert_close(W_O[:, 2], start[:, 2])
    assert not torch.allclose(W_O[:, 1], start[:, 1])


def test_the_record_says_what_ridge_and_fit_did(subject, tmp_path):
    dense = subject("llama")
    settings = CutSettings(batch_tokens=13, fit=3)
    ids = np.random.default_rng(8).integers(4, 53, (9, 13))
    profile = replace(dense.profile, tensors={**dense.profile.tensors, "ids": ids})
    record = cut_model(
        CutRequest(open_source(dense.path), profile, dense.plan(0.6), settings), tmp_path / "o"
    )
    layer = next(one for one in record.layers if "fit" in one)
    assert layer["refit"]["ridge"] in RIDGES
    assert layer["refit"]["aim"] in {"attention", "state"}
    assert layer["fit"]["steps"] == 3
    assert set(layer["error"]) == {"folded", "refitted"}

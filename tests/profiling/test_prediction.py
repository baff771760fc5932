"""Predicted loss orders plans as measured loss does, on a tiny model that was really trained."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.models.build import convert
from headwise.plan import Budget, Limit
from headwise.planning.cost import cost
from headwise.planning.fit import fit, most_valuable, predicted_loss
from headwise.planning.rules import WidthRules
from headwise.profiling.run import ProfileJob, profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences
from headwise.profiling.worth import fit_problem, kept_directions
from tests.profiling.gates import gated, open_gates, sequence_losses

LENGTH, VOCAB, PERIOD, NOISE = 29, 23, 7, 0.15
STEPS = 250


def noisy_repetitions(n, seed):
    """A random word of 7 tokens again and again, some tokens replaced: attention must work."""
    rng = np.random.default_rng(seed)
    words = np.tile(rng.integers(0, VOCAB, (n, PERIOD)), (1, 5))[:, :LENGTH]
    other = rng.integers(0, VOCAB, words.shape)
    return np.where(rng.random(words.shape) < NOISE, other, words)


def trained():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        ids = torch.from_numpy(noisy_repetitions(24, 100 + step))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2.2  # of log 23 = 3.14
    return model.eval()


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """The trained model's profile, and a job with other sequences to measure on."""
    model = convert(trained())

    def job(seed):
        rows = Sequences(noisy_repetitions(96, seed), "next-token", "made up", "0" * 64)
        return ProfileJob(model, "tiny", rows, ProfileSettings(LENGTH, rows.inputs.size, chunk=24))

    return job(2), profile_model(job(1), tmp_path_factory.mktemp("trained") / "profile")


def measured_increase(job, profile, plan):
    """The rise of the mean loss when what the plan drops is really gone."""
    gates = open_gates(profile, torch.float32)
    for i, layer in enumerate(plan.layers):
        for j in range(len(layer.heads)):
            kept = kept_directions(profile, plan, i, j)
            for part, places in (("plane", kept.planes), ("vo", kept.vo)):
                row = gates[i][part].data[j]
                row.zero_()
                row[list(places)] = 1
    with torch.no_grad(), gated(job.model, profile, gates):
        losses, counts = sequence_losses(job)
    with torch.no_grad():
        dense, _ = sequence_losses(job)
    return float((losses.sum() - dense.sum()) / counts.sum())


def random_plan(problem, rng, keep):
    """Widths drawn around a share; the planes are the most sensitive, as in every fitted plan."""
    dense, layers = problem.template, []
    for i, layer in enumerate(dense.layers):
        heads = []
        for j, head in enumerate(layer.heads):
            n_planes, vo_dim = (max(1, int(n)) for n in rng.binomial([6, 12], keep))
            planes = tuple(most_valuable(problem.sensitivity[i][j].planes, n_planes))
            change = {"qk_dim": 2 * n_planes, "vo_dim": vo_dim, "rotary_planes": planes}
            heads.append(head.model_copy(update=change))
        layers.append(layer.model_copy(update={"heads": tuple(heads)}))
    return dense.model_copy(update={"layers": tuple(layers)})


def rank_correlations(subject, keeps):
    """Of the predicted loss, and of the plain number of parameters, with the measured loss."""
    job, profile = subject
    problem = fit_problem(profile, "sensitivity", WidthRules())
    rng = np.random.default_rng(2)
    plans = [random_plan(problem, rng, keep) for keep in keeps]
    measured = [measured_increase(job, profile, plan) for plan in plans]
    predicted = [predicted_loss(problem, plan) for plan in plans]
    counted = [-cost(plan).attn_params for plan in plans]
    return [spearmanr(x, measured).statistic for x in (predicted, counted)]


@pytest.mark.slow
def test_predicted_loss_orders_random_plans_like_measured_loss(subject):
    predicted, _ = rank_correlations(subject, np.linspace(0.9, 0.2, 23))
    assert predicted >= 0.9


@pytest.mark.slow
def test_predicted_loss_knows_more_than_the_size(subject):
    """The control: among plans of about one size, counting parameters orders them worse."""
    predicted, counted = rank_correlations(subject, [0.5] * 23)
    assert predicted > counted + 0.1


@pytest.mark.slow
def test_the_fit_loses_less_than_rules_of_thumb_when_measured(subject):
    job, profile = subject
    budget, rules = Budget(attn_params=Limit(share=0.7)), WidthRules(multiple_of=2)
    measured, predicted = {}, {}
    for policy in ("sensitivity", "uniform", "narrower-late", "saturation", "energy"):
        found = fit(fit_problem(profile, policy, rules), budget)
        assert cost(found.plan).attn_params <= 0.7 * cost(profile.plan).attn_params
        measured[policy] = measured_increase(job, profile, found.plan)
        predicted[policy] = found.loss_increase
    assert min(predicted, key=predicted.get) == "sensitivity"
    for policy in ("uniform", "narrower-late", "energy"):
        assert measured["sensitivity"] < measured[policy]


@pytest.mark.slow
def test_the_whole_plan_loses_nothing(subject):
    job, profile = subject
    found = fit(fit_problem(profile, "sensitivity", WidthRules()), Budget())
    assert found.loss_increase == 0
    assert found.plan.layers == profile.plan.layers
    assert measured_increase(job, profile, found.plan) == pytest.approx(0, abs=1e-5)

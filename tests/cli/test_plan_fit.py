"""`headwise plan fit` as a user runs it; the profile is made by hand, no model is needed."""

import json
import math
import subprocess
import sys

import pytest

from headwise.artifacts import sha256
from headwise.plan import Plan
from headwise.planning.cost import cost
from headwise.profiling.format import RECORD
from tests.tiny_profile import write_profile

LAYERS, GROUPS, QK, VO = 5, 2, 32, 32


@pytest.fixture
def profile(tmp_path):
    folder = tmp_path / "profile"
    return write_profile(folder, layers=LAYERS, groups=GROUPS, queries=3, qk=QK, vo=VO)


def test_a_plan_is_fitted_and_written(headwise, profile, tmp_path):
    out = tmp_path / "plan.json"
    done = headwise("plan", "fit", profile, "--attn-params", "75%", "--kv-bytes", "80%", "-o", out)
    assert done.code == 0, done.err
    assert "Predicted: loss +" in done.out
    plan = Plan.from_json(out.read_text())
    assert plan.origin.profile_sha256 == sha256(profile / RECORD)
    assert plan.origin.policy == "sensitivity"
    assert "plan fit" in plan.origin.command
    assert plan.origin.predicted_loss > 0
    assert plan.origin.loss_unit == "nats per token"
    line = f"Predicted: loss +{plan.origin.predicted_loss:.4g} nats per token, perplexity ×"
    assert line in done.out
    assert line in headwise("plan", "show", out).out
    assert plan.layers[0].heads[0].score_scale == 0.3
    dense = cost(Plan.uniform(plan.shape))
    assert cost(plan).attn_params <= 0.75 * dense.attn_params
    assert cost(plan).kv_bytes <= 0.8 * dense.kv_bytes
    again = headwise("plan", "fit", profile, "--attn-params", "75%", "-o", out)
    assert again.code == 2
    assert "exists already" in again.err


def test_json_has_the_prediction(headwise, profile):
    done = headwise("plan", "fit", profile, "--attn-params", "50%", "--json")
    predicted = json.loads(done.out)["predicted"]
    assert predicted["exact"] is True
    assert predicted["perplexity_ratio"] == pytest.approx(math.exp(predicted["loss_increase"]))


@pytest.mark.parametrize(("given", "most"), [("0.05", 0.05), ("5%", math.log(1.05))])
def test_a_quality_target(headwise, profile, given, most):
    done = headwise("plan", "fit", profile, "--max-loss", given, "--multiple-of", 2, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert 0.9 * most < document["predicted"]["loss_increase"] <= most
    assert document["share"]["attn_params"] < 1


def test_another_resource_is_minimised(headwise, profile):
    options = ("plan", "fit", profile, "--max-loss", "0.1", "--json", "--multiple-of", 2)
    by_kv = json.loads(headwise(*options, "--resource", "kv-bytes").out)["cost"]["kv_bytes"]
    by_params = json.loads(headwise(*options).out)["cost"]["kv_bytes"]
    assert by_kv <= by_params


def test_pareto(headwise, profile):
    done = headwise("plan", "fit", profile, "--pareto", "90%,75%,50%")
    assert "Budgets for attention parameters, policy sensitivity" in done.out
    done = headwise("plan", "fit", profile, "--pareto", "90%,75%,50%", "--json")
    rows = json.loads(done.out)["rows"]
    assert [r["budget"] for r in rows] == ["90%", "75%", "50%"]
    losses = [r["loss_increase"] for r in rows]
    assert losses == sorted(losses)
    assert losses[0] > 0


@pytest.mark.parametrize("policy", ["uniform", "narrower-late", "saturation", "energy"])
def test_no_policy_predicts_less_than_the_sensitivities(headwise, profile, policy):
    options = ("plan", "fit", profile, "--attn-params", "70%", "--qk-weight", "1", "--json")
    ours = json.loads(headwise(*options).out)["predicted"]["loss_increase"]
    done = headwise(*options, "--policy", policy)
    assert json.loads(done.out)["predicted"]["loss_increase"] > ours
    assert json.loads(done.out)["plan"]["origin"]["policy"] == policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a fit needs a budget such as --attn-params 75%"),
        (("--attn-params", "1%"), "smallest allowed plan costs"),
        (("--max-loss", "-1"), "--max-loss must be a rise in nats per token (0.05)"),
        (("--max-loss", "often"), "got 'often'"),
        (("--max-loss", "0", "--attn-params", "50%"), "even the largest plan within the budget"),
        (("--resource", "kv", "--max-loss", "1"), "--resource must be a resource, got 'kv'"),
        (("--pareto", "90%", "--max-loss", "1"), "--pareto prints a table"),
        (("--pareto", "90%,many"), "got 'many'"),
        (("--attn-params", "75%", "--policy", "theory"), "unknown policy 'theory'"),
        (("--attn-params", "75%", "--granularity", "heads"), "--granularity must be 'layer'"),
        (("--attn-params", "75%", "--multiple-of", "0"), "--multiple-of must be at least 1"),
        (("--traffic", "75%", "--batch", "0"), "--batch must be at least 1"),
    ],
)
def test_wrong_input_is_one_sentence(headwise, profile, options, message):
    done = headwise("plan", "fit", profile, *options)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_folder_that_is_no_profile(headwise, tmp_path):
    done = headwise("plan", "fit", tmp_path, "--attn-params", "75%")
    assert done.code == 2
    assert "is not a profile (it has no profile.json)" in done.err


@pytest.mark.slow
def test_a_fit_needs_no_torch(profile):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from headwise.profiling.format import Profile\n"
        "from headwise.profiling.worth import fit_problem\n"
        "from headwise.planning.fit import fit\n"
        "from headwise.planning.rules import WidthRules\n"
        "from headwise.plan import Budget, Limit\n"
        f"task = fit_problem(Profile.read(Path({str(profile)!r})), 'sensitivity', WidthRules())\n"
        "fit(task, Budget(attn_params=Limit(share=0.75)))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

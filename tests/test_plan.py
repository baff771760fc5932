"""The data that flows: round trips, run lengths, refusals, budgets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, Cost, HeadSpec, LayerPlan, Limit, ModelShape, Origin, Plan
from tests import damage

SHAPE = ModelShape(n_layers=5, d_model=21, context=11, n_heads=6, n_kv_heads=3, qk_dim=7, vo_dim=7)
UNIFORM = Plan.uniform(SHAPE)

heads = st.builds(
    HeadSpec,
    qk_dim=st.integers(8, 99),
    vo_dim=st.integers(1, 99),
    queries=st.integers(1, 5),
    score_scale=st.none() | st.floats(0.01, 1),
    rotary_planes=st.none()
    | st.sets(st.integers(0, 31), max_size=4).map(lambda s: tuple(sorted(s))),
)
layers = st.builds(
    LayerPlan,
    heads=st.lists(heads, min_size=1, max_size=4).map(tuple),
    biases=st.sampled_from([(), ("query", "value"), ("query", "key", "value", "output")]),
)


@st.composite
def plans(draw):
    chosen = draw(st.lists(layers, min_size=1, max_size=3))
    repeated = [layer for layer in chosen for _ in range(draw(st.integers(1, 3)))]
    shape = SHAPE.model_copy(update={"n_layers": len(repeated)})
    origin = Origin(command="headwise plan new", versions=(("headwise", "1"), ("numpy", "2")))
    return Plan(
        shape=shape, layers=tuple(repeated), origin=draw(st.sampled_from([Origin(), origin]))
    )


@given(plans())
def test_json_round_trip(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()


def test_a_uniform_plan_is_short_to_read():
    data = json.loads(UNIFORM.to_json())
    head = {"repeat": 3, "qk_dim": 7, "vo_dim": 7, "queries": 2}
    assert data["layers"] == [{"repeat": 5, "heads": [head]}]
    assert data["format"] == "headwise-plan/2"


def test_every_layer_states_its_mlp_and_files_without_it_have_the_shapes():
    shape = SHAPE.model_copy(update={"ffn_dim": 13})
    plan = Plan.uniform(shape)
    assert plan.ffn_dims == (13,) * 5
    assert not plan.changes_ffn
    data = json.loads(plan.to_json())
    assert data["layers"][0]["ffn_dim"] == 13
    old = {**data, "format": "headwise-plan/1"}
    old["layers"] = [{k: v for k, v in x.items() if k != "ffn_dim"} for x in data["layers"]]
    assert Plan.from_dict(old) == plan
    narrow = LayerPlan(heads=plan.layers[0].heads, ffn_dim=7)
    cut = Plan(shape=shape, layers=(narrow, *plan.layers[1:]))
    assert cut.ffn_dims == (7, 13, 13, 13, 13)
    assert cut.changes_ffn
    assert Plan.from_json(cut.to_json()) == cut != plan


def test_plans_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        UNIFORM.layers[0].heads[0].qk_dim = 3


def test_all_kinds_of_attention_can_be_said():
    mqa = LayerPlan(heads=(HeadSpec(qk_dim=3, vo_dim=5, queries=7),))
    ragged = LayerPlan(heads=(HeadSpec(qk_dim=3, vo_dim=5), HeadSpec(qk_dim=11, vo_dim=2)))
    free = LayerPlan(heads=(HeadSpec(qk_dim=7, vo_dim=2),) * 3, query="identity", biases=("key",))
    shape = SHAPE.model_copy(update={"n_layers": 3})
    plan = Plan(shape=shape, layers=(mqa, ragged, free))
    assert Plan.from_json(plan.to_json()) == plan
    assert (ragged.query_width, ragged.value_width, mqa.output_width) == (14, 7, 35)


def changed(path, value):
    return json.dumps(damage.changed(json.loads(UNIFORM.to_json()), path, value))


HEAD = ("layers", 0, "heads", 0)
HEADS = {"qk_dim": 7, "vo_dim": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(("shap",), 1), r"unknown key 'shap' in the top level. Did you mean 'shape'\?"),
        (changed((*HEAD, "qk_dm"), 1), r"'qk_dm' in layers\[0\].heads\[0\]. Did you mean 'qk_dim'"),
        (changed(("shape", "zzz"), 1), r"unknown key 'zzz' in shape. Known: attention_biases, "),
        (changed((*HEAD, "qk_dim"), 0), r"heads\[0\].qk_dim must be at least 1, got 0"),
        (changed((*HEAD, "qk_dim"), 2.5), r"qk_dim must be a whole number, got 2.5"),
        (changed((*HEAD, "qk_dim"), True), r"qk_dim must be a whole number, got True"),
        (changed((*HEAD, "repeat"), 0), r"repeat must be a whole number from 1 to 100000, got 0"),
        (changed((*HEAD, "repeat"), 10**9), r"repeat must be .* got 1000000000"),
        (changed((*HEAD, "rotary_planes"), [2, 1]), r"rotary_planes must rise strictly"),
        (changed((*HEAD, "rotary_planes"), [0, 1, 2, 3]), r"4 rotary planes need a qk_dim of at"),
        (changed(("layers", 0, "repeat"), 4), r"n_layers 5, but 4 layers are planned"),
        (changed(("layers", 0, "key"), "identity"), None),  # 3 × 7 = 21 = d_model: allowed
        (changed(("layers", 0, "query"), "identity"), r"add up to d_model 21, got 42 in layer 0"),
        (changed(("layers", 0, "biases"), ["query", "query"]), r"biases must not repeat"),
        (changed(("shape", "n_kv_heads"), 4), r"n_kv_heads must divide n_heads, got 4 and 6"),
        (changed(("shape", "windows"), [3]), r"windows must be empty or have one entry per layer"),
        (changed(("shape",), None), r"shape"),
        (changed(("layers", 0, "ffn_dim"), 0), r"ffn_dim must be at least 1, got 0"),
        (
            changed(("layers", 0, "ffn_dim"), 5),
            r"no MLPs \(ffn_dim 0\), but layer 0 plans one of 5",
        ),
        (
            changed(("format",), "headwise-plan/9"),
            r"format 'headwise-plan/2', got 'headwise-plan/9'",
        ),
        (changed(("shape", "attention_biases"), ["key", "key"]), r"attention_biases must not rep"),
        (changed((*HEAD, "qk_dim"), 10**400), r"qk_dim must be at most"),
        (changed(("shape", "family"), "\ud800"), r"text must be writable as UTF-8"),
        (changed(("layers", 0, "heads"), [{**HEADS, "repeat": 90_000}]), r"at most 200000 heads"),
        ("[" * 100_000, r"holds invalid JSON"),
        ('{"format": ' + "9" * 5001 + "}", r"holds invalid JSON"),
        (
            UNIFORM.to_json().replace('"d_model"', '"context": 3, "d_model"'),
            r"duplicate key 'context'",
        ),
        ("[1, 2]", r"must be a JSON object with format"),
        (UNIFORM.to_json()[:50], r"invalid JSON at line"),
        ("", r"invalid JSON at line 1"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(text, message):
    if message is None:
        Plan.from_json(text)
        return
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(text, "plan.json")
    assert str(caught.value).startswith("plan.json ")
    assert "\n" not in str(caught.value)


def test_the_predicted_loss_is_a_number_that_older_files_lack():
    origin = Origin(policy="sensitivity", predicted_loss=0.0625, loss_unit="nats per token")
    plan = UNIFORM.model_copy(update={"origin": origin})
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["origin"]["predicted_loss"] == 0.0625
    older = json.loads(plan.to_json())
    older["origin"] = {"policy": "sensitivity", "notes": ["predicted loss increase 0.0625"]}
    assert Plan.from_dict(older).origin.predicted_loss is None
    with pytest.raises(PlanError, match=r"origin\.predicted_loss"):
        Plan.from_json(plan.to_json().replace("0.0625", "NaN"))


def test_an_identity_projection_has_no_bias():
    with pytest.raises(ValidationError, match="an identity key projection has no bias"):
        LayerPlan(heads=(HeadSpec(qk_dim=1, vo_dim=1),), key="identity", biases=("key",))


@pytest.mark.parametrize(
    ("text", "share", "amount"),
    [
        ("75%", 0.75, None),
        ("100%", 1.0, None),
        ("0.5%", 0.005, None),
        (" 12 ", None, 12),
        ("1.2M", None, 1_200_000),
        ("3k", None, 3000),
        ("2e6", None, 2_000_000),
        ("7B", None, 7_000_000_000),
    ],
)
def test_limits_are_shares_or_numbers(text, share, amount):
    limit = Limit.parse(text)
    assert (limit.share, limit.amount) == (share, amount)


@pytest.mark.parametrize(
    "text", ["130%", "0%", "-5%", "0", "", "many", "1.5.2", "5%%", "nan", "inf%", "1e30"]
)
def test_bad_limits_are_refused(text):
    with pytest.raises(BudgetError, match=r"--x must be a share above 0% and up to 100%.*got"):
        Limit.parse(text, "--x")


def test_a_bare_fraction_is_asked_to_become_a_share():
    with pytest.raises(BudgetError, match=r"write 0.75 as 75%"):
        Limit.parse("0.75")


def test_shares_refer_to_the_dense_cost():
    dense = Cost(
        attn_params=100,
        ffn_params=50,
        params=1000,
        kv_bytes=10,
        flops=7,
        step_bytes=50,
        context=3,
        batch=5,
    )
    budget = Budget(attn_params=Limit.parse("29%"), kv_bytes=Limit.parse("4"))
    assert budget.limited == ("attn_params", "kv_bytes")
    assert budget.amount("attn_params", dense) == 29  # 0.29 · 100 is 28.999… in floats
    assert budget.amount("kv_bytes", dense) == 4
    assert str(budget) == "attention parameters ≤ 29%, key-value bytes per token ≤ 4"
    # Traffic is stated per token and counted per step of the whole batch.
    assert dense.traffic == 10
    assert dense.model_dump()["traffic"] == 10
    assert Budget(traffic=Limit.parse("7")).amount("traffic", dense) == 35
    assert Budget(traffic=Limit.parse("50%")).amount("traffic", dense) == 25

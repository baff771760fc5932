"""Ragged plans: heads of different widths, query counts and rotary planes in one layer."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwise.errors import PlanError
from headwise.models import heads_headwise
from headwise.models.backbones_headwise import family_of, stock_attentions
from headwise.models.build import build_model, convert, inner, plan_of, stock_plan
from headwise.models.heads_headwise import eager_attention
from headwise.models.slicing import qk_columns, sliced
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import Kept
from tests import lanes, tiny
from tests.tolerances import REORDERED, SEEN

RAGGED = [
    "llama",
    "llama_biased",
    "qwen2",
    "phi3",
    "gpt_neox",
    "gpt2",
    "opt",
    "mistral",
    "gemma3_text",
    "qwen3",
]
NORMED = {"gemma3_text", "qwen3", "olmo2"}


def ragged_plan(config):
    """Three layers: several widths; one width with several query counts; two classes.

    Where queries and keys are normed, they are of whole rotary planes.
    """
    plan = stock_plan(config)
    shape = plan.shape
    wide = shape.qk_dim

    def head(qk_dim, vo_dim, queries=1):
        even = qk_dim - qk_dim % 2 if shape.family in NORMED else qk_dim
        return HeadSpec(qk_dim=even, vo_dim=vo_dim, queries=queries)

    layers = (
        (head(7, 11, 2), head(3, 2), head(wide, 13, 3), head(5, 5)),
        (head(6, 7, 4), head(6, 7), head(6, 7)),
        (head(4, 4, 2), head(4, 4, 2), head(wide, 3)),
    )
    biases = shape.attention_biases
    return Plan(shape=shape, layers=tuple(LayerPlan(heads=h, biases=biases) for h in layers))


@pytest.fixture(params=lanes.slow_but((*tiny.QUICK, "gemma3_text"), RAGGED))
def name(request):
    return request.param


@pytest.fixture
def model(name):
    config = tiny.config(name)
    return tiny.randomise(build_model(ragged_plan(config), config=config, seed=5))


def _logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def test_parameters_are_the_cost(model):
    counted = sum(p.numel() for p in model.parameters())
    assert counted == cost(plan_of(model)).params


def test_cached_equals_uncached_and_the_cache_has_the_planned_bytes(model):
    ids = tiny.inputs("llama", 13)["input_ids"]
    expected = _logits(model, ids)
    cache = DynamicCache(config=model.config)
    pieces = [ids[:, :6], ids[:, 6:7], ids[:, 7:8], ids[:, 8:11], ids[:, 11:]]
    steps = [_logits(model, p, past_key_values=cache, use_cache=True) for p in pieces]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **REORDERED)
    plan = plan_of(model)
    windows = plan.shape.windows or (None,) * 3
    for layer, window, cached in zip(plan.layers, windows, cache.layers, strict=True):
        kept = min(13, window - 1) if window else 13
        numbers = cached.keys.numel() + cached.values.numel()
        assert numbers == 2 * kept * (layer.key_width + layer.value_width)
    if not plan.shape.windows:
        in_fp32 = plan.model_copy(
            update={"shape": plan.shape.model_copy(update={"kv_dtype_bytes": 4})}
        )
        real = sum(c.keys.nbytes + c.values.nbytes for c in cache.layers)
        assert real == 2 * 13 * cost(in_fp32).kv_bytes


def test_static_cache_equals_uncached(model):
    inputs = tiny.padded(9, 3)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    expected = model.generate(**inputs, **options, use_cache=False)
    for cache in ("static", "dynamic"):
        made = model.generate(**inputs, **options, cache_implementation=cache)
        assert torch.equal(made, expected)


@pytest.mark.slow
def test_beams_and_samples(model):
    inputs = tiny.padded(9, 3)
    options = {"max_new_tokens": 6, "num_beams": 4, "do_sample": False}
    expected = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(model.generate(**inputs, **options), expected)
    several = model.generate(**inputs, max_new_tokens=3, do_sample=True, num_return_sequences=3)
    assert several.shape[0] == 6


def test_later_tokens_change_nothing_before_them(model):
    ids = tiny.inputs("llama", 11)["input_ids"]
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % tiny.VOCAB
    before, after = _logits(model, ids), _logits(model, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_padding_on_the_left_changes_nothing(model):
    ids = tiny.inputs("llama", 8)["input_ids"][:1]
    padded = torch.cat([torch.zeros(1, 3, dtype=ids.dtype), ids], 1)
    mask = (torch.arange(11) >= 3).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    made = _logits(model, padded, attention_mask=mask, position_ids=positions)[:, 3:]
    torch.testing.assert_close(made, _logits(model, ids), **REORDERED)


def test_eager_equals_fused(model):
    ids = tiny.inputs("llama", 11)["input_ids"]
    expected = _logits(model, ids)
    model.set_attn_implementation("eager")
    assert model.config.backbone._attn_implementation == "eager"
    with torch.no_grad():
        made = model(input_ids=ids, output_attentions=True)
    torch.testing.assert_close(made.logits, expected, **REORDERED)
    for layer, weights in zip(plan_of(model).layers, made.attentions, strict=True):
        assert weights.shape == (2, layer.n_queries, 11, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, layer.n_queries, 11))


def test_crop_forgets_exactly_the_last_tokens():
    config = tiny.config("llama")
    model = tiny.randomise(build_model(ragged_plan(config), config=config, seed=5))
    ids = tiny.inputs("llama", 11)["input_ids"]
    cache = DynamicCache(config=model.config)
    _logits(model, ids[:, :9], past_key_values=cache, use_cache=True)
    cache.crop(-4)
    made = _logits(model, ids[:, 5:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(made, _logits(model, ids)[:, 5:], **REORDERED)


def test_static_cache_of_one_own_length():
    config = tiny.config("gpt2")
    model = tiny.randomise(build_model(ragged_plan(config), config=config, seed=5))
    ids = tiny.inputs("gpt2", 11)["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=17)
    steps = [_logits(model, ids[:, :7], past_key_values=cache, use_cache=True)]
    steps += [
        _logits(model, ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        for i in range(7, 11)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), _logits(model, ids), **REORDERED)


def _random_cut(plan, rng):
    """Some planes, position-free columns and value columns of every head."""

    def some(n):
        return sorted(rng.sample(range(n), rng.randint(1, n))) if n else []

    return [
        [
            Kept(
                planes=some(len(h.rotary_planes)),
                free=some(h.qk_dim - 2 * len(h.rotary_planes)),
                vo=some(h.vo_dim),
            )
            for h in layer.heads
        ]
        for layer in plan.layers
    ]


def _zero_the_rest(model, kept):
    plan = plan_of(model)
    for attention, layer, parts in zip(model.attentions(), plan.layers, kept, strict=True):
        starts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), 0)
        for head, part in zip(layer.heads, parts, strict=True):
            columns = {"q_proj": qk_columns(head, part), "v_proj": part.vo}
            columns["k_proj"] = columns["q_proj"]
            for side, start in starts.items():
                width = head.vo_dim if side == "v_proj" else head.qk_dim
                times = head.queries if side == "q_proj" else 1
                gone = sorted(set(range(width)) - set(columns[side]))
                module = getattr(attention, side)
                for i in range(times):
                    rows = [start + i * width + c for c in gone]
                    with torch.no_grad():
                        module.weight[rows] = 0
                        if module.bias is not None:
                            module.bias[rows] = 0
                starts[side] += times * width


ZEROED = ["llama", "llama_biased", "qwen2", "phi3", "gpt_neox", "gpt2", "opt", "bert", "vit"]


ALIKE = ["mistral", "roberta", "distilbert"]  # in their code, but families of their own


@pytest.mark.parametrize("family", [*ZEROED, *ALIKE, "qwen3", "gemma3_text", "olmo2"])
def test_zeroing_equals_slicing(family):
    dense = convert(tiny.stock(family))
    inputs = tiny.inputs(family)
    kept = _random_cut(plan_of(dense), random.Random(11))
    neurons = [sorted(random.Random(i).sample(range(n), 11 + i)) for i, n in _ffn_dims(dense)]
    cut = sliced(dense, kept, neurons)
    assert plan_of(cut).ffn_dims == (11, 12, 13)
    with torch.no_grad():
        untouched = dense(**inputs).logits
        _zero_the_rest(dense, kept)
        _zero_neurons(dense, neurons)
        expected = dense(**inputs).logits
        made = cut(**inputs).logits
    torch.testing.assert_close(made, expected, **REORDERED)
    assert (untouched - expected).abs().max() > 0.1  # the cut is not a no-op
    counted = sum(p.numel() for p in cut.parameters())
    assert counted == cost(plan_of(cut)).params < cost(plan_of(dense)).params


def _ffn_dims(model):
    return enumerate(plan_of(model).ffn_dims)


def _zero_neurons(model, kept):
    """Nothing of the other neurons reaches the state: their columns of the down-projection are 0.

    What enters them is left as it is: the slice must not depend on it.
    """
    stock = inner(model)
    mlp = family_of(stock.config.model_type).mlp
    for (layer, _), own in zip(stock_attentions(stock), kept, strict=True):
        weight = layer.get_submodule(mlp.down).weight
        columns = weight if mlp.transposed else weight.T
        columns[sorted(set(range(len(columns))) - set(own))] = 0


def test_neurons_that_stay_are_those_that_were_asked_for():
    """The control of zeroing: another set of the same size is another function."""
    dense, inputs = convert(tiny.stock("phi3")), tiny.inputs("phi3")
    everything = [
        [Kept(range(len(h.rotary_planes)), range(0), range(h.vo_dim)) for h in layer.heads]
        for layer in plan_of(dense).layers
    ]
    answers = []
    for first in (0, 1):
        neurons = [range(n)[first : n - 1 + first] for _, n in _ffn_dims(dense)]
        with torch.no_grad():
            answers.append(sliced(dense, everything, neurons)(**inputs).logits)
    assert (answers[0] - answers[1]).abs().max() > 0.01


def test_a_scale_derived_from_the_width_would_be_seen():
    dense = convert(tiny.stock("llama"))
    cut = sliced(dense, _random_cut(plan_of(dense), random.Random(11)))
    ids = tiny.inputs("llama")["input_ids"]
    expected = _logits(cut, ids)
    for attention in cut.attentions():
        for head_class in attention.classes:
            head_class.scaling = head_class.qk_dim**-0.5
    assert (_logits(cut, ids) - expected).abs().max() > SEEN


_LOAD_WITHOUT_HEADWISE = """
import sys, torch
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "headwise":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from transformers import AutoModel, AutoModelForCausalLM
folder = sys.argv[1]
ids = torch.load(folder + "/ids.pt")
for kind in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}", trust_remote_code=True)
    with torch.no_grad():
        logits = model(ids).logits
        made = model.generate(ids, max_new_tokens=5, do_sample=False)
    torch.save((logits, made), f"{folder}/{kind}.pt")
    model.save_pretrained(f"{folder}/{kind}-again")
    AutoModel.from_pretrained(f"{folder}/{kind}-again", trust_remote_code=True)
assert not any(n.partition(".")[0] == "headwise" for n in sys.modules)
"""


@pytest.mark.slow
def test_a_process_without_headwise_loads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    ids = tiny.inputs("llama")["input_ids"]
    torch.save(ids, tmp_path / "ids.pt")
    kinds, expected = RAGGED, {}
    for kind in kinds:
        config = tiny.config(kind)
        model = tiny.randomise(build_model(ragged_plan(config), config=config, seed=5))
        model.save_pretrained(tmp_path / kind)
        expected[kind] = (
            _logits(model, ids),
            model.generate(ids, max_new_tokens=5, do_sample=False),
        )
    command = [sys.executable, "-c", _LOAD_WITHOUT_HEADWISE, str(tmp_path), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in kinds:
        logits, made = torch.load(tmp_path / f"{kind}.pt")
        assert torch.equal(logits, expected[kind][0])
        assert torch.equal(made, expected[kind][1])


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_a_norm_that_forgets_what_was_dropped_would_be_seen(family):
    """The mean over the kept columns alone is another than that with zeros for the rest."""
    dense = convert(tiny.stock(family))
    cut = sliced(dense, _random_cut(plan_of(dense), random.Random(11)))
    ids = tiny.inputs(family)["input_ids"]
    expected = _logits(cut, ids)
    for attention in cut.attentions():
        for norm in (attention.q_norm, attention.k_norm):
            norm.share.fill_(1.0)
    assert (_logits(cut, ids) - expected).abs().max() > SEEN


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_a_slice_of_a_slice_is_one_slice(family):
    dense = convert(tiny.stock(family))
    all_vo = tuple(range(10))
    first, second, both = ([Kept(p, (), all_vo)] * 2 for p in ((0, 2, 3), (0, 2), (0, 3)))
    twice = sliced(sliced(dense, [first] * 3), [second] * 3)
    ids = tiny.inputs(family)["input_ids"]
    once = sliced(dense, [both] * 3)
    torch.testing.assert_close(_logits(twice, ids), _logits(once, ids), **REORDERED)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_normed_queries_keep_whole_planes_only(family):
    config = tiny.config(family)
    plan = stock_plan(config)
    narrow = [h.model_copy(update={"qk_dim": 7}) for h in plan.layers[1].heads]
    layers = (plan.layers[0], plan.layers[1].model_copy(update={"heads": tuple(narrow)}))
    with pytest.raises(PlanError, match=r"normalises its queries and keys.* got qk_dim 7 with 3"):
        build_model(Plan(shape=plan.shape, layers=(*layers, plan.layers[2])), config=config)


def test_a_norm_over_all_heads_has_no_other_heads():
    config = tiny.config("olmo2")
    with pytest.raises(PlanError, match="normalises its queries and keys over all"):
        build_model(ragged_plan(config), config=config)


def test_olmo2_may_change_its_values():
    config = tiny.config("olmo2")
    plan = stock_plan(config)
    narrow = [h.model_copy(update={"vo_dim": 3 + i}) for i, h in enumerate(plan.layers[0].heads)]
    layers = (plan.layers[0].model_copy(update={"heads": tuple(narrow)}), *plan.layers[1:])
    model = build_model(Plan(shape=plan.shape, layers=layers), config=config)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == cost(plan_of(model)).params


def test_planes_the_backbone_lacks_are_refused():
    config = tiny.config("llama")
    plan = stock_plan(config)
    head = plan.layers[0].heads[0].model_copy(update={"rotary_planes": (1, 5)})
    layer = plan.layers[0].model_copy(update={"heads": (head, head)})
    with pytest.raises(PlanError, match="rotary plane 5, but this backbone has 5 planes"):
        build_model(Plan(shape=plan.shape, layers=(layer,) * 3), config=config)


def test_heads_of_one_class_turn_in_their_own_planes():
    """Two heads alike but for their planes equal the same heads kept apart by their scales."""
    config = tiny.config("llama")
    plan = stock_plan(config)

    def model(scales):
        heads = tuple(
            HeadSpec(qk_dim=4, vo_dim=3, queries=3, score_scale=s, rotary_planes=p)
            for s, p in zip(scales, ((0, 3), (1, 4)), strict=True)
        )
        layers = (LayerPlan(heads=heads),) * 3
        return build_model(Plan(shape=plan.shape, layers=layers), config=config, seed=5)

    together, apart = model((0.5, 0.5)), model((0.5, 0.5 + 1e-9))
    assert [len(a.classes) for a in together.attentions()] == [1, 1, 1]
    assert [len(a.classes) for a in apart.attentions()] == [2, 2, 2]
    ids = tiny.inputs("llama")["input_ids"]
    weights = tiny.randomise(together).state_dict()
    apart.load_state_dict(weights)
    torch.testing.assert_close(_logits(together, ids), _logits(apart.eval(), ids))


def test_flash_kernels_get_equal_widths_and_grouped_keys(monkeypatch):
    """No such kernel runs on a CPU; a stand-in checks what it would be handed."""
    config = tiny.config("llama")
    model = tiny.randomise(build_model(ragged_plan(config), config=config, seed=5))
    ids = tiny.inputs("llama", 11)["input_ids"]
    expected = _logits(model, ids)
    sdpa, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def stand_in(module, query, key, value, mask, **kwargs):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[1] == key.shape[1] * module.num_key_value_groups
        calls.append(kwargs["sliding_window"])
        return sdpa(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("flash_stand_in", stand_in)
    ALL_MASK_ATTENTION_FUNCTIONS.register("flash_stand_in", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setattr(model.config.backbone, "_attn_implementation_internal", "flash_stand_in")
    torch.testing.assert_close(_logits(model, ids), expected, **REORDERED)
    assert len(calls) == sum(len(a.classes) for a in model.attentions())


@pytest.mark.parametrize("many", [1, 10**9])
def test_decoding_unequal_widths_obeys_both_kinds_of_mask(monkeypatch, many):
    monkeypatch.setattr(heads_headwise, "_MANY_CACHED", many)
    config = tiny.config("llama")
    model = build_model(ragged_plan(config), config=config, seed=5)
    head_class = model.attentions()[0].classes[0]
    torch.manual_seed(2)
    shape = (2, head_class.n_heads)
    query = torch.randn(2, head_class.n_heads * head_class.queries, 1, head_class.qk_dim)
    key, value = (
        torch.randn(*shape, 9, head_class.qk_dim),
        torch.randn(*shape, 9, head_class.vo_dim),
    )
    seen = torch.rand(2, 1, 1, 9) < 0.6
    seen[..., 0] = True
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    grouped = {"dropout": 0.0}
    expected, _ = eager_attention(head_class, query, key, value, added, scaling=head_class.scaling)
    for mask in (seen, added):
        made, _ = head_class(query, key, value, mask, **grouped)
        torch.testing.assert_close(made, expected)
    unmasked, _ = head_class(query, key, value, None, **grouped)
    assert (unmasked - expected).abs().max() > SEEN


def layer_plan(config):
    """One class per layer: unequal widths with planes of each head's own, equal ones, all."""
    shape = stock_plan(config).shape

    def heads(qk, vo, planes):
        return tuple(HeadSpec(qk_dim=qk, vo_dim=vo, queries=3, rotary_planes=p) for p in planes)

    layers = (
        heads(4, 7, ((0, 3), (1, 4))),
        heads(6, 6, ((0, 1, 4), (0, 1, 4))),
        heads(10, 4, (tuple(range(5)),) * 2),
    )
    return Plan(shape=shape, layers=tuple(LayerPlan(heads=h) for h in layers))


@pytest.fixture
def layered():
    config = tiny.config("llama")
    return tiny.randomise(build_model(layer_plan(config), config=config, seed=5))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("many", [1, 10**9])
def test_layer_plans_decode_alike_with_both_kernels(layered, monkeypatch, static, many):
    """`many` = 1 writes every attention out, 10⁹ leaves all of them to the fused kernel."""
    monkeypatch.setattr(heads_headwise, "_MANY_CACHED", many)
    ids = tiny.inputs("llama", 11)["input_ids"]
    cache = (
        StaticCache(config=layered.config, max_cache_len=17)
        if static
        else DynamicCache(config=layered.config)
    )
    steps = [_logits(layered, ids[:, :6], past_key_values=cache, use_cache=True)]
    steps += [
        _logits(layered, ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        for i in range(6, 11)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), _logits(layered, ids), **REORDERED)


def test_decoding_never_copies_the_cache(layered):
    """No operation of a decoded token makes a tensor as large as the keys or the values."""
    context, batch = 211, 5  # enough for the products to be written out
    cache = StaticCache(config=layered.config, max_cache_len=context)
    ids = torch.ones(batch, 1, dtype=torch.long)
    _logits(layered, ids, past_key_values=cache, use_cache=True)  # allocates it
    smallest = min(t.numel() for c in cache.layers for t in (c.keys, c.values))
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
                made.append(out.numel())
            return out

    with Sizes():
        _logits(layered, ids, past_key_values=cache, use_cache=True)
    assert made
    assert max(made) < smallest
    with Sizes():  # the control: stock attention repeats the keys of a group
        stock = tiny.stock("llama")
        cache = StaticCache(config=stock.config, max_cache_len=context)
        _logits(stock, ids, past_key_values=cache, use_cache=True)
    assert max(made) > smallest


@pytest.mark.slow
def test_layer_plans_compile_without_graph_breaks(layered):
    """fullgraph refuses any break; the eager backend runs what was traced, without a compiler."""
    compiled = torch.compile(layered, fullgraph=True, backend="eager")
    ids = tiny.inputs("llama", 9)["input_ids"]
    expected = _logits(layered, ids)
    torch.testing.assert_close(_logits(compiled, ids, use_cache=False), expected, **REORDERED)
    cache = StaticCache(config=layered.config, max_cache_len=13)
    _logits(layered, ids[:, :7], past_key_values=cache, use_cache=True)
    for i in (7, 8):
        made = _logits(compiled, ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(made[:, 0], expected[:, i], **REORDERED)

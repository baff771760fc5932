"""The model card: valid for the Hub, and saying what the files beside it say."""

import json

import pytest
from huggingface_hub import ModelCard

from headwise.models.build import build_model
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.cost import cost
from headwise.planning.design import new_shape
from headwise.reporting.card import write_card
from headwise.reporting.names import hub_name, shown_source

RECORD = {
    "format": "headwise-cut/2",
    "key": "5" * 64,
    "model": "someone/tiny-llama",
    "calibration": {"source": "/home/me/notes.txt", "sha256": "ab" * 32, "tokens": 1234},
    "profile_sha256": "6" * 64,
    "settings": {"refit": True, "ridge": 0.01},
    "versions": {"headwise": "0.1.0"},
}


def verification(made):
    """A verify.json of two texts: one that was held out, one the model was calibrated on."""
    found = made.verification()
    held_out = {
        "source": "/home/me/notes.txt (held out)",
        "perplexity": 25.264,
        "dense_perplexity": 23.105,
        "ratio": 1.0934430,
        "top_agreement": 0.8231,
    }
    broken = {"source": "builtin:python", "is_calibration_text": True}
    broken |= {"perplexity": None, "ratio": None}
    texts = [text | own for text, own in zip(found["texts"], (held_out, broken), strict=True)]
    return found | {"texts": texts}


def folder_of(place, record, causal=True):
    """A cut model as a folder; its widths are written out in the tests."""
    sizes = {"n_layers": 4, "d_model": 24, "n_heads": 3, "context": 31, "vocab_size": 53}
    shape = new_shape(**sizes, family="llama" if causal else "bert")
    planes = (lambda qk: {"rotary_planes": tuple(range(qk // 2))}) if causal else lambda qk: {}
    widths = [[(8, 8)] * 3, [(6, 4), (6, 4), (2, 8)], [(6, 4), (6, 4), (2, 8)], [(4, 2)] * 3]
    layers = [
        LayerPlan(heads=tuple(HeadSpec(qk_dim=qk, vo_dim=vo, **planes(qk)) for qk, vo in layer))
        for layer in widths
    ]
    plan = Plan(shape=shape, layers=tuple(layers))
    model = build_model(plan, task="causal-lm" if causal else "bare", seed=1)
    model.save_pretrained(place)
    (place / "headwise.json").write_text(json.dumps(record))
    return plan


def card_in(folder):
    """As the Hub's own library reads it; broken metadata raises."""
    return ModelCard.load(folder / "README.md")


def test_the_front_matter_and_the_text_agree_with_the_record(tmp_path):
    out = tmp_path / "smaller"
    plan = folder_of(out, RECORD)
    write_card(out)
    card = card_in(out)
    assert card.data.base_model == "someone/tiny-llama"
    assert card.data.base_model_relation == "finetune"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "headwise" in card.data.tags
    assert card.data.license is None
    assert card.data.language is None
    assert card.data.eval_results is None
    assert f"Attention parameters: {cost(plan).attn_params:,} of " in card.text
    assert "1,234 tokens of `notes.txt`" in card.text
    assert "ab" * 32 in card.text
    assert "Nothing was trained" in card.text
    assert "not measured" in card.text
    assert "trust_remote_code=True" in card.text
    assert "/home/me" not in card.content
    table = [line for line in card.text.splitlines() if line.startswith("| ")]
    assert "| 0 | 8 × 3 | 8 × 3 |" in table
    assert "| 1–2 | 6 × 2, 2 | 4 × 2, 8 |" in table
    assert "| 3 | 4 × 3 | 2 × 3 |" in table


def test_measured_figures_become_a_model_index(made, tmp_path):
    folder_of(tmp_path, RECORD)
    (tmp_path / "verify.json").write_text(json.dumps(verification(made)))
    write_card(tmp_path, name="smaller")
    card = card_in(tmp_path)
    assert card.data.model_name == "smaller"
    found = {(r.dataset_name, r.metric_name): r.metric_value for r in card.data.eval_results}
    held_out = "notes.txt (held out)"
    assert found[held_out, "Perplexity"] == 25.264
    assert found[held_out, "Perplexity ÷ that of the source model"] == 1.09344
    assert ("builtin:python", "Perplexity") not in found  # infinite
    assert "| attention parameters | 1,000 | 750 | 75.0% |" in card.text
    for row in (
        "| decode after 51 tokens, tokens per second | 50 | 60 | ×1.20 |",
        "| the same, source with this model's attention code | 560 |  | ×1.25 |",
        "| peak memory there (16 × 13) | 2.00 GiB | 1.00 GiB | 50.0% |",
        "| sequences of 51 tokens that fit 24.00 GiB | 40 | 80 | ×2.00 |",
        "| piqa, acc_norm of 200 questions | 70.0% ± 3.0% | 60.0% ± 4.0% | -10.0% ± 2.0% |",
        "| One two | three | the same |",
        "| Once upon | a time | a mime |",
    ):
        assert row in card.text
    assert "`builtin:python` is the text it was calibrated on" in card.text
    assert f"`{held_out}` is the text it was" not in card.text


def test_the_licence_comes_from_the_source_and_stays(tmp_path):
    source, out, last = tmp_path / "source", tmp_path / "out", tmp_path / "last"
    source.mkdir()
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\ntags: [a]\n"
        "base_model: an/ancestor\n---\n# It\n"
    )
    folder_of(out, RECORD | {"model": str(source)})
    write_card(out, source)
    card = card_in(out).data
    assert (card.license, card.license_name, card.license_link) == ("other", "tiny", "LICENSE")
    assert card.base_model is None  # a folder has no name on the Hub, and its ancestor is not it
    write_card(out)  # written again, as after a verification
    assert card_in(out).data.to_dict() == card.to_dict()
    trained = {"tokens": 77, "text_sha256": "cd" * 32}
    folder_of(last, RECORD | {"model": str(source), "recovery": trained})
    write_card(last, out)  # as a recovery does
    assert card_in(last).data.license_name == "tiny"
    assert "trained on 77 tokens" in card_in(last).text


def test_a_base_model_is_judged_once(tmp_path, monkeypatch):
    """`models/llama` is a folder here and looks like a Hub name from elsewhere."""
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "out", RECORD | {"model": "models/llama"})
    write_card(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "models")
    write_card(tmp_path / "out")
    assert card_in(tmp_path / "out").data.base_model is None


@pytest.mark.parametrize(
    "text", ["", "# no front matter", "---\n- a list\n---\n", "---\na: [\n---\n"]
)
def test_a_source_card_that_says_nothing(tmp_path, text):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "README.md").write_text(text)
    folder_of(tmp_path / "out", RECORD)
    write_card(tmp_path / "out", tmp_path / "source")
    assert card_in(tmp_path / "out").data.license is None


def test_an_encoder_is_loaded_as_one(made, tmp_path):
    found = verification(made)
    text = {k: found["texts"][0][k] for k in ("source", "sha256", "role", "is_calibration_text")}
    text |= {"kind": "encoder", "sentences": 7, "cosine": 0.98, "least_cosine": 0.9}
    found |= {"kind": "encoder", "texts": [text], "speed": None}
    folder_of(tmp_path, RECORD | {"model": "builtin:minilm"}, causal=False)
    (tmp_path / "verify.json").write_text(json.dumps(found))
    write_card(tmp_path)
    card = card_in(tmp_path)
    assert card.data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert card.data.pipeline_tag == "feature-extraction"
    assert card.data.eval_results[0].metric_value == 0.98
    assert "AutoModel.from_pretrained" in card.text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("someone/tiny", "someone/tiny"),
        ("/data/tiny", None),
        ("./tiny", None),
        ("../tiny", None),
        ("~/tiny", None),
        ("tiny", None),
        ("a/b/c", None),
        ("someone/tiny.gguf", None),
        ("builtin:smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ],
)
def test_names_of_the_hub(model, name):
    assert hub_name(model) == name


def test_texts_are_shown_without_their_paths():
    assert shown_source("/home/me/a.txt") == "a.txt"
    assert shown_source("hub:a/b:c:train") == "hub:a/b:c:train"
    assert shown_source("builtin:python (held out)") == "builtin:python (held out)"

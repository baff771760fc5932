import json

import pytest
import typer
from typer.testing import CliRunner

from headwise.cli.verify import verify
from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer
from headwise.errors import HeadwiseError
from headwise.measure import verification
from headwise.models.build import convert, plan_of
from headwise.models.record import CutRecord
from headwise.models.slicing import sliced
from headwise.planning.fit import Kept
from headwise.records import write_record
from tests import tiny

app = typer.Typer()
app.command()(verify)

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 7


def _saved(family, folder):
    """A stock model of two layers and a cut of it (three value columns), each with a tokenizer."""
    stock = tiny.stock(family, vocab_size=269, num_hidden_layers=2, scale=0.1)
    tokenizer = train_tokenizer([TEXT], 263)
    tokenizer.pad_token = tokenizer.eos_token
    whole = convert(stock)
    kept = [
        [
            Kept(range(len(h.rotary_planes)), range(h.qk_dim - 2 * len(h.rotary_planes)), range(3))
            for h in layer.heads
        ]
        for layer in plan_of(whole).layers
    ]
    cut = sliced(whole, kept)
    for model, name in ((stock, "dense"), (cut, "cut"), (whole, "same")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return _saved("llama", tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return _saved("bert_bare", tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "b.txt"
    path.write_text("Another text altogether, of other words.\n" * 5)
    return path


def _run(folder, name, *arguments, code=0):
    words = [folder / name, "--against", folder / "dense", "--device", "cpu", *arguments]
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, (result.exception, result.output)
    return result


def _document(*arguments, **how):
    return json.loads(_run(*arguments, "--json", "--repeats", 1, **how).stdout)


@pytest.mark.slow
def test_one_document_says_it_all(causal, text, other, tmp_path):
    found = _document(causal, "cut", "--text", text, "--held-out", other, "-o", tmp_path / "v.json")
    assert found == json.loads((tmp_path / "v.json").read_text())
    assert [t["role"] for t in found["texts"]] == ["calibration domain", "other text"]
    assert [t["sha256"] for t in found["texts"]] == [
        read_source(str(p)).sha256 for p in (text, other)
    ]
    both = _document(causal, "cut", "--text", text, "--text", other)  # both like the calibration
    assert [t["role"] for t in both["texts"]] == ["calibration domain"] * 2
    assert [t["kl"] for t in both["texts"]] == [t["kl"] for t in found["texts"]]
    for t in found["texts"]:
        assert t["ratio"] == pytest.approx(t["perplexity"] / t["dense_perplexity"])
        assert 0 <= t["top_agreement"] < 1
        assert t["kl"] > 0
        assert sum(b["tokens"] for b in t["by_position"]) == t["tokens"]
        assert t["windows"]["count"] == -(-t["tokens"] // t["window"])
        assert t["windows"]["broken"] == 0
        assert t["windows"]["worst_kl"] >= t["kl"]
    # Two key/value heads with three queries each, 10 wide: values and outputs cut to 3.
    size = found["size"]
    assert size["attn_params"]["dense"] == 2 * 42 * 10 * (6 + 2 + 2 + 6)
    assert size["attn_params"]["cut"] == 2 * 42 * (10 * (6 + 2) + 3 * (2 + 6))
    assert size["kv_bytes"]["dense"] == 2 * 2 * (10 + 10) * 4
    assert size["kv_bytes"]["cut"] == 2 * 2 * (10 + 3) * 4
    for one in size.values():
        assert one["cut"] == one["cut_plan"]
        assert one["dense"] == one["dense_plan"]
    points = {p["point"]: p for p in found["speed"]["points"]}
    assert list(points) == ["prefill", "decode", "serving", "serving, longer"]
    assert [points[n]["context"] for n in ("prefill", "decode")] == [67, 67 - 16]
    assert points["serving"]["cache_to_weights"] == pytest.approx(1, rel=0.1)
    assert points["serving, longer"]["cache_to_weights"] == pytest.approx(4, rel=0.1)
    for point in points.values():
        assert point["ratio"] > 0
        if point["point"].startswith("serving"):
            assert point["same_code"]["median"] > 0
            assert 0 < point["peak"]["cut"] < point["peak"]["dense"]
    assert found["fits"]["cut"] > found["fits"]["dense"] > 0
    assert len(found["samples"]) > 0
    assert found["tasks"] == []
    assert found["met"] is True
    assert ["does not say which text" in w for w in found["warnings"]] == [True]


@pytest.mark.slow
def test_windows_that_break_are_said(causal, text, monkeypatch):
    monkeypatch.setattr(verification, "BROKEN", 0.0)
    settings = verification.VerifySettings(repeats=0)
    found = verification.verify(causal / "cut", causal / "dense", str(text), settings)
    windows = found.texts[0].windows
    assert windows.broken == windows.count
    assert any(
        f"{windows.broken} of {windows.count} windows of {text} break" in warning
        for warning in found.warnings
    )


@pytest.mark.slow
def test_an_uncut_model_has_lost_nothing(causal, text):
    found = _document(causal, "same", "--text", text, "--max-ratio", "1.0001")
    assert found["texts"][0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert found["texts"][0]["top_agreement"] == 1
    assert found["texts"][0]["kl"] < 1e-6
    assert found["size"]["attn_params"]["share"] == 1


@pytest.mark.slow
def test_the_exit_code_says_that_a_target_was_missed(causal, text):
    arguments = ("cut", "--text", text, "--max-ratio", "0.01", "--max-attn-params", "70%")
    result = _run(causal, *arguments, "--repeats", 0, code=1)
    assert "Missed: --max-ratio must be at most 0.01, but is" in result.stderr
    assert "--max-attn-params" not in result.stderr  # 65%
    result = _run(causal, "cut", "--text", text, "--max-params", "1k", "--repeats", 0, code=1)
    assert "--max-params must be at most 1,000, but is" in result.stderr
    found = _document(causal, "cut", "--text", text, "--max-kv-bytes", "64%", code=1)
    assert found["met"] is False
    assert found["targets"] == [
        {"name": "max_kv_bytes", "limit": 204.0, "found": 208.0, "met": False}
    ]
    _run(causal, "cut", "--text", text, "--max-kv-bytes", "65%", "--repeats", 0)
    _run(causal, "cut", "--text", text, "--min-agreement", "1", "--repeats", 0, code=1)


@pytest.mark.slow
def test_people_read_one_table(causal, text, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = _run(causal, "cut", "--text", text, "--repeats", 1).stdout
    for word in ("perplexity, a.txt", "top token agrees", "attention parameters", "decode"):
        assert word in lines


@pytest.mark.slow
def test_calibration_text_is_not_passed_off_as_evaluation(causal, text, other):
    record = causal / "cut" / "headwise.json"
    used = {"source": "a.txt", "sha256": read_source(str(text)).sha256, "tokens": 7}
    write_record(record, CutRecord(key="k", model="m", profile_sha256="p", calibration=used))
    try:
        found = _document(causal, "cut", "--text", text, "--held-out", other)
    finally:
        record.unlink()
    assert [t["is_calibration_text"] for t in found["texts"]] == [True, False]
    assert ["calibrated on, so its figures flatter" in w for w in found["warnings"]] == [True]


def test_encoders_are_compared_by_their_embeddings(encoder, text):
    found = _document(encoder, "same", "--text", text, "--min-cosine", "0.9999")
    assert found["kind"] == "encoder"
    assert found["texts"][0]["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["size"]["kv_bytes"] is None
    assert [p["point"] for p in found["speed"]["points"]] == ["prefill"]
    assert (found["fits"], found["samples"]) == (None, [])
    cut = _document(encoder, "cut", "--text", text, "--min-cosine", "0.9999", code=1)
    assert cut["texts"][0]["least_cosine"] <= cut["texts"][0]["cosine"] < 0.9999
    assert cut["size"]["attn_params"]["cut"] == cut["size"]["attn_params"]["cut_plan"]
    result = _run(encoder, "cut", "--text", text, "--max-ratio", "2", code=1)
    assert "not a target for encoder models" in str(result.exception)


def test_bad_input_is_one_sentence(causal, encoder, text, tmp_path):
    def message(*words):
        result = CliRunner().invoke(app, [*map(str, words)])
        assert isinstance(result.exception, HeadwiseError), result.exception
        return str(result.exception)

    dense = ("--against", causal / "dense", "--text", text)
    assert "does not exist" in message(tmp_path / "none", *dense)
    assert "at most the model's context of 67" in message(causal / "cut", *dense, "--window", 68)
    assert "share above 0%" in message(causal / "cut", *dense, "--max-attn-params", "0.5")
    assert "cannot be compared" in message(encoder / "cut", *dense)
    (tmp_path / "v.json").touch()
    assert "exists already" in message(causal / "cut", *dense, "-o", tmp_path / "v.json")

"""verify.json and headwise.json are typed: damage is told in one sentence, with file and field."""

import json

import pytest

from headwise.errors import HeadwiseError
from headwise.measure.record import (
    EmbeddingQuality,
    LanguageQuality,
    SizeChanges,
    Targets,
    Verification,
    read_verification,
)
from headwise.models.record import read_cut_record
from headwise.plan import Limit
from headwise.records import write_record
from tests import lanes
from tests.damage import changed, paths

FACTS = {"sha256": "2" * 64, "role": "calibration domain", "is_calibration_text": False}
DRIFT = {"first": 1, "last": 1, "tokens": 7, "kl": 0.05}
TEXT = LanguageQuality(
    source="a.txt",
    **FACTS,
    tokens=997,
    window=11,
    stride=11,
    perplexity=21.0,
    dense_perplexity=20.0,
    ratio=1.05,
    nll=3.04,
    dense_nll=2.99,
    top_agreement=0.83,
    kl=0.1,
    by_position=(DRIFT,),
    windows={"count": 91, "broken": 0, "worst_kl": 0.3},
)
SIZE = {"dense": 1000, "cut": 750, "share": 0.75, "dense_plan": 1000, "cut_plan": 750}
SIZES = SizeChanges(attn_params=SIZE, params=SIZE, kv_bytes={**SIZE, "bytes_per_number": 4})
OTHER = {"source": "b.txt", "role": "other text", "ratio": None, "perplexity": None}
FOUND = Verification(
    model="small",
    against="model",
    kind="causal",
    texts=(TEXT, TEXT.model_copy(update=OTHER)),
    size=SIZES,
    device="cpu",
    dtype="float32",
)
CUT = {
    "format": "headwise-cut/2",
    "key": "k",
    "model": "m",
    "calibration": {"source": "a.txt", "sha256": "3" * 64, "tokens": 7},
    "profile_sha256": "p",
    "recovery": {"text_sha256": "4" * 64, "tokens": 5},
}


def problem_of(read, folder):
    """The sentence with which a folder is refused, if it is."""
    try:
        read(folder)
    except HeadwiseError as error:
        return str(error)


def test_a_verification_is_read_as_it_was_written(tmp_path):
    assert read_verification(tmp_path) is None
    write_record(tmp_path / "verify.json", FOUND)
    found = read_verification(tmp_path)
    assert found == FOUND
    assert found.texts[0].ratio == 1.05
    assert found.texts[1].ratio is None
    assert found.size.kv_bytes.share == 0.75
    assert dict(found.size.items()).keys() == {"attn_params", "params", "kv_bytes"}
    assert found.speed is None


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("texts", 1, "ratio"), "x", "texts[1].causal.ratio"),
        (("texts", 0, "kind"), "image", "texts[0].image"),
        (("texts", 0, "kind"), "other", "texts[0]"),
        (("texts",), [], "texts"),
        (("texts", 0, "by_position"), [], "by_position"),
        (("size", "attn_params"), ..., "size.attn_params is missing"),
        (("size", "kv_bytes", "share"), [[[[]]]], "size.kv_bytes.share"),
        (("met",), "perhaps", "met"),
        (("more",), 1, "unknown key 'more'"),
        (("format",), "headwise-verify/2", "must have the format 'headwise-verify/3'"),
        (("format",), [], "must have the format 'headwise-verify/3'"),
    ],
)
def test_a_damaged_verification_is_one_sentence(tmp_path, path, value, field):
    data = changed(FOUND.model_dump(mode="json"), path, value)
    (tmp_path / "verify.json").write_text(json.dumps(data))
    with pytest.raises(HeadwiseError) as error:
        read_verification(tmp_path)
    sentence = str(error.value)
    assert field in sentence
    assert str(tmp_path / "verify.json") in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "value", lanes.slow_but((..., "x", None), (..., "x", -1, None, [], {}, 1e308, True))
)
@pytest.mark.parametrize("name", ["verify.json", "headwise.json"])
def test_no_change_of_a_record_is_a_traceback(tmp_path, name, value):
    read = {"verify.json": read_verification, "headwise.json": read_cut_record}[name]
    data = {"verify.json": FOUND.model_dump(mode="json"), "headwise.json": CUT}[name]
    sentences = []
    for path in list(paths(data)):
        (tmp_path / name).write_text(json.dumps(changed(data, path, value)))
        sentences += [problem] if (problem := problem_of(read, tmp_path)) else []
    assert len(sentences) > 3
    assert all(str(tmp_path / name) in one and "\n" not in one for one in sentences)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "null", "\ud800"])
def test_a_file_that_is_no_record(tmp_path, text):
    (tmp_path / "verify.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(HeadwiseError, match=r"verify\.json"):
        read_verification(tmp_path)


def test_a_deeply_nested_value_is_refused(tmp_path):
    deep = "[" * 900 + "]" * 900
    text = json.dumps(CUT | {"settings": {"a": 0}}).replace('"a": 0', f'"a": {deep}')
    (tmp_path / "headwise.json").write_text(text)
    with pytest.raises(HeadwiseError, match=r"headwise\.json"):
        read_cut_record(tmp_path)


def test_a_cut_record_names_all_texts_the_model_has_seen(tmp_path):
    (tmp_path / "headwise.json").write_text(json.dumps(CUT))
    assert read_cut_record(tmp_path).seen == {"3" * 64, "4" * 64}
    (tmp_path / "headwise.json").write_text(json.dumps(CUT | {"recovery": None}))
    assert read_cut_record(tmp_path).seen == {"3" * 64}
    (tmp_path / "headwise.json").write_text(json.dumps(CUT | {"format": "headwise-cut/1"}))
    with pytest.raises(HeadwiseError, match="must have the format 'headwise-cut/2'"):
        read_cut_record(tmp_path)


def test_targets_are_judged_on_their_own_texts():
    targets = Targets(max_ratio=1.05, max_other_ratio=9.0, max_params=Limit(share=0.75))
    targets.check("causal")
    first, other, params = targets.judge(FOUND.texts, SIZES)
    assert (first.name, first.met, first.found) == ("max_ratio", True, 1.05)
    assert (other.met, other.found) == (False, None)
    assert "--max-other-ratio must be at most 9, but is infinite." in other.sentence
    assert (params.limit, params.met) == (750, True)
    (least,) = Targets(min_agreement=0.9).judge(FOUND.texts, SIZES)
    assert least.sentence == "--min-agreement must be at least 0.9, but is 0.83."
    assert Targets().judge(FOUND.texts, SIZES) == ()
    worse = TEXT.model_copy(update={"source": "c.txt", "ratio": 1.3})
    met = [one.met for one in Targets(max_ratio=1.2).judge([TEXT, worse], SIZES)]
    assert met == [True, False]  # every text of the calibration domain has to keep it
    text = EmbeddingQuality(source="a.txt", **FACTS, sentences=3, cosine=0.9, least_cosine=0.5)
    (cosine,) = Targets(min_cosine=0.9).judge([text], SIZES)
    assert cosine.met


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("encoder", {"max_ratio": 1}),
        ("image", {"max_other_ratio": 1}),
        ("encoder", {"min_agreement": 1}),
        ("causal", {"min_cosine": 1}),
        ("image", {"max_kv_bytes": Limit(share=1)}),
    ],
)
def test_a_target_without_a_figure_is_refused(kind, target):
    with pytest.raises(HeadwiseError, match=f"is not a target for {kind} models"):
        Targets(**target).check(kind)

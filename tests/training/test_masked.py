"""Encoders learn masked tokens, and no model that is bidirectional is scored on the next one."""

import json
import math
import random

import numpy as np
import pytest
import torch
import typer
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from headwise.cli.evaluate import evaluate
from headwise.cli.generate import generate
from headwise.data.masking import IGNORED, Masking, masking_of
from headwise.data.text import Text
from headwise.data.tokens import token_stream, train_tokenizer
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import likelihood
from headwise.models.build import build_model
from headwise.plan import Plan
from headwise.planning.design import new_shape
from headwise.profiling.source import objective_of
from headwise.reporting.pages import report
from headwise.source import open_source
from headwise.training.batches import MaskedBatches, WindowBatches, masked_held_out
from headwise.training.settings import TrainSettings
from headwise.training.train import read_training, resume_training, train
from tests import tiny

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZES = {"n_layers": 2, "d_model": 44, "n_heads": 4, "context": 23, "ffn_dim": 59}
BERT = Plan.uniform(new_shape(family="bert", vocab_size=263, **SIZES))
SETTINGS = TrainSettings(steps=40, batch_size=8, lr=0.01, eval_every=20, save_every=9, device="cpu")
MASKING = Masking(mask=3, first=1, last=2, special=(0, 1, 2, 3), vocab_size=31)

app = typer.Typer()
app.command()(evaluate)
app.command()(generate)


def _letters(n=9000):
    """Letters that nothing predicts: ln 26 = 3.258 nats each for any honest score."""
    drawn = random.Random(7)
    return Text("letters", ("".join(drawn.choice(LETTERS) for _ in range(n)),))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An encoder trained on random letters, one token each."""
    folder = tmp_path_factory.mktemp("masked")
    tokenizer = train_tokenizer([], 260, encoder=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    result = train(
        BERT, _letters(), folder / "run", settings=SETTINGS, tokenizer=str(folder / "tokenizer")
    )
    (folder / "letters.txt").write_text(_letters(2000).documents[0])
    return folder, result


@pytest.mark.slow
def test_an_encoder_cannot_read_the_answer(run):
    """Next-token loss with bidirectional attention fell far below the entropy of the text."""
    _, result = run
    assert result.last.held_out_loss > math.log(26) - 0.15
    assert result.last.loss < math.log(260)  # and it learned which tokens there are
    record = read_training(result.folder)
    assert record.details.masking is not None
    assert record.details.objective == "masked tokens"


def test_the_finished_encoder_is_one_for_masked_tokens(run):
    _, result = run
    model = AutoModelForMaskedLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["[CLS]", "a", "b", "c", "[SEP]"]
    assert model(input_ids=ids).logits.shape == (1, 5, 263)
    source = open_source(result.model)
    assert (source.kind, source.saved_task) == ("encoder", "masked-lm")
    assert objective_of(source.load("masked-lm", headwise=True)) == "masked-token"


def test_eval_scores_masked_tokens_and_prints_no_perplexity(run):
    folder, result = run
    words = [
        "evaluate",
        str(result.model),
        "--text",
        str(folder / "letters.txt"),
        "--device",
        "cpu",
    ]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.exception
    assert "nats per masked token" in found.stdout
    assert "perplexity" not in found.stdout
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    score = document["texts"][0]["score"]
    assert score["objective"] == "masked-token"
    assert score["nll"] > math.log(26) - 0.15
    assert score["tokens"] / score["tokens_read"] == pytest.approx(0.15, abs=0.02)


def test_next_token_work_is_refused_for_an_encoder(run):
    folder, result = run
    model = open_source(result.model).load("masked-lm")
    with pytest.raises(HeadwiseError, match=r"is bidirectional.*next-token score is meaningless"):
        likelihood(model, np.arange(50) % 7, window=9)
    written = CliRunner().invoke(app, ["generate", str(result.model), "--prompt", "a"])
    assert isinstance(written.exception, HeadwiseError)
    assert "is bidirectional" in str(written.exception)
    # A folder of the kind that next-token training of an encoder used to leave.
    old = build_model(BERT, task="causal-lm", seed=1)
    old.save_pretrained(folder / "old")
    AutoTokenizer.from_pretrained(result.model).save_pretrained(folder / "old")
    with pytest.raises(HeadwiseError, match=r"is bidirectional.*next-token score is meaningless"):
        likelihood(old.eval(), np.arange(50) % 7, window=9)
    text = str(folder / "letters.txt")
    refused = CliRunner().invoke(app, ["evaluate", str(folder / "old"), "--text", text])
    assert isinstance(refused.exception, HeadwiseError)
    assert "saved with a head for causal-lm" in str(refused.exception)


def test_causal_models_are_still_scored(run):
    """The control of the refusal: the check finds nothing in models that do not see ahead."""
    for name in ("llama", "gpt2", "gpt_neox", "mistral"):
        model = tiny.stock(name, seed=3).eval()
        assert likelihood(model, np.arange(40) % 11, window=9).tokens == 39
        half = model.to(torch.bfloat16)
        assert likelihood(half, np.arange(40) % 11, window=9).tokens == 39


def test_the_report_says_what_was_predicted_and_draws_no_text(run):
    folder, result = run
    page = report(result.folder, folder / "report.html", force=True).read_text()
    assert "to predict masked tokens" in page
    assert "nats per masked token" in page
    assert "Samples" not in page


@pytest.mark.slow
def test_a_stopped_encoder_ends_in_the_same_weights(run, tmp_path):
    folder, whole = run
    from tests.training.test_train import Stop

    options = {"settings": SETTINGS, "tokenizer": str(folder / "tokenizer")}
    half = train(BERT, _letters(), tmp_path / "run", observer=Stop(11), **options)
    assert half.status == "interrupted"
    done = resume_training(tmp_path / "run")
    names = [r.model / "model.safetensors" for r in (whole, done)]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_masks_are_fifteen_percent_and_80_10_10():
    text = np.random.default_rng(5).integers(4, 31, (400, 53))
    text[:, 7] = 2  # the end of a document
    shown, labels = MASKING.windows(text, [(i,) for i in range(400)])
    chosen = labels != IGNORED
    assert set(chosen.sum(1)) == {8}  # 15% of 53, in every window
    assert not chosen[:, [0, -1, 8]].any()  # neither end, nor a special token
    assert (shown[:, 0] == 1).all()
    assert (shown[:, -1] == 2).all()
    inside = shown[:, 1:-1]
    assert (inside[~chosen[:, 1:-1]] == text[~chosen[:, 1:-1]]).all()
    was, became = labels[chosen], shown[chosen]
    assert np.mean(became == 3) == pytest.approx(0.8, abs=0.03)
    assert np.mean(became == was) == pytest.approx(0.1 + 0.1 / 27, abs=0.02)
    assert not np.isin(became[became != 3], MASKING.special).any()
    again, _ = MASKING.windows(text[:3], [(i,) for i in range(3)])
    assert (again == shown[:3]).all()


def test_batches_depend_on_seed_and_step_only():
    tokens = np.arange(997) % 27 + 4
    sizes = {"context": 13, "batch_size": 6}

    def batches(seed):
        windows = WindowBatches(tokens, context=MASKING.inside(13), batch_size=6, seed=seed)
        return MaskedBatches(windows, MASKING, seed=seed)

    one, same = batches(3), batches(3)
    assert torch.equal(one(5)["input_ids"], same(5)["input_ids"])
    other = batches(4)
    assert not torch.equal(one(5)["labels"], other(5)["labels"])
    assert one(5)["input_ids"].shape == (6, 13)
    held = masked_held_out(tokens, MASKING, most=4, **sizes)
    assert torch.equal(
        held[0]["labels"], masked_held_out(tokens, MASKING, most=4, **sizes)[0]["labels"]
    )


def test_a_tokenizer_without_a_mask_is_refused(tmp_path):
    tokenizer = train_tokenizer(["some text"], 260)
    with pytest.raises(HeadwiseError, match=r"is bidirectional.*no mask token"):
        masking_of(tokenizer, 263)
    with pytest.raises(HeadwiseError, match="at least 260"):
        train_tokenizer(["some text"], 259, encoder=True)
    encoder = train_tokenizer(["some text"], 260, encoder=True)
    stream = token_stream(encoder, ["ab", "c"])
    assert encoder.convert_ids_to_tokens(stream) == ["a", "b", "[SEP]", "c", "[SEP]"]

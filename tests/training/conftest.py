"""A tiny model with dropout, its text, and a job to train it."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from headwise.devices import accelerator
from headwise.training.batches import WindowBatches, held_out_batches, next_token_loss
from headwise.training.loop import TrainingJob
from headwise.training.settings import TrainSettings
from tests import tiny

VOCAB = 29


@pytest.fixture(scope="session")
def processes():
    return accelerator("cpu")


@pytest.fixture
def settings():
    return TrainSettings(
        steps=12, batch_size=6, lr=0.01, warmup=3, eval_every=5, save_every=5, seed=3
    ).resolved(context=7, device="cpu", dtype="fp32")


@pytest.fixture
def make_job(settings):
    """A fresh job with the same start each time; keywords change settings or parts of the job."""

    def make(**changes):
        parts = {k: changes.pop(k) for k in ("loss", "batches", "model") if k in changes}
        chosen = dataclasses.replace(settings, **changes)
        torch.manual_seed(11)
        config = tiny.config("gpt2", vocab_size=VOCAB, n_embd=10, n_layer=2, n_head=2)
        tokens = np.arange(997) * np.arange(997) % VOCAB
        return TrainingJob(
            **{
                "model": GPT2LMHeadModel(config),
                "loss": next_token_loss,
                "batches": WindowBatches(tokens, context=7, batch_size=6, seed=3),
                "settings": chosen,
                "held_out": held_out_batches(tokens[:50], context=7, batch_size=4, most=5),
                **parts,
            }
        )

    return make

"""A tiny model with dropout, its text, and a job to train it."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from headwise.training.batches import WindowBatches, held_out_batches
from headwise.training.engine import Job
from headwise.training.losses import next_token_loss
from headwise.training.processes import accelerator
from headwise.training.settings import TrainSettings

VOCAB = 29


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sums are reproducible bit for bit only with the same split over threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=13,
            n_embd=10,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        tokens = np.arange(997) * np.arange(997) % VOCAB
        return Job(
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

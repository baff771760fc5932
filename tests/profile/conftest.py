"""Tiny models in double precision, their profiles, and explicit gates to check them with."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
import transformers

from headwise.nn.build import convert
from headwise.profile.chunks import Job
from headwise.profile.objectives import probe
from headwise.profile.settings import ProfileSettings
from headwise.profile.source import Sequences, objective_of

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, LENGTH, MASK = 53, 13, 3
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_PLAIN = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 31,
    "hidden_size": 33,
    "intermediate_size": 37,
    "num_attention_heads": 3,
    **_TOKENS,
}
_GROUPED = {
    **_PLAIN,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
_VIT = {  # 12 patches and a class token: LENGTH tokens
    **{k: _PLAIN[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")},
    "num_hidden_layers": 2,
    "image_size": (6, 8),
    "patch_size": 2,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def _stock(name: str):
    t = transformers
    models = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_GROUPED)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**_GROUPED, sliding_window=5)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_GROUPED)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=VOCAB,
                n_positions=31,
                n_embd=33,
                n_layer=2,
                n_head=3,
                n_inner=37,
                **_TOKENS,
            )
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(**_PLAIN | {"hidden_size": 48}, rope_parameters=_PARTIAL)
        ),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**_PLAIN)),
        "bert_bare": lambda: t.BertModel(t.BertConfig(**_PLAIN)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**_VIT, num_labels=7)),
        "vit_bare": lambda: t.ViTModel(t.ViTConfig(**_VIT)),
    }
    model = models[name]().double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator).double()
            p.copy_(noise * 0.25 if p.ndim > 1 else p + noise * 0.2)
    return model.eval()


def make_job(name: str, n: int = 7, chunk: int = 3, length: int = LENGTH) -> Job:
    model = convert(_stock(name))
    ids = np.random.default_rng(5).integers(4, VOCAB, (n, length))
    if model.main_input_name == "pixel_values":
        ids = np.random.default_rng(5).normal(size=(n, 3, 6, 8)).astype(np.float16)
    rows = Sequences(ids, objective_of(model), "made up", "0" * 64, MASK)
    settings = ProfileSettings(length=length, tokens=n * length, chunk=chunk, seed=11)
    return Job(model, name, rows, settings)


def sequence_losses(job: Job):
    """L_s and n_s of all sequences together, with whatever hooks are on the model."""
    numbers = tuple(range(len(job.sequences)))
    inputs = torch.from_numpy(job.sequences.inputs)
    batch = probe(
        job.sequences.objective,
        inputs.double() if inputs.is_floating_point() else inputs,
        numbers,
        job.settings.seed,
        job.sequences.mask_token,
    )
    return batch.losses(job.model(**{job.sequences.name: batch.inputs}))


@contextmanager
def gated(model, profile, gates):
    """Multiply every direction of a profile by a gate, by the plain definition.

    `gates[layer]` has "vo", "plane" and "free": (groups × directions) tensors.
    """
    with ExitStack() as undo:
        for i, attention in enumerate(model.attentions()):
            heads = attention.classes[0]

            def cut_z(module, args, i=i, heads=heads):
                z = args[0].unflatten(-1, (heads.n_heads, heads.queries, heads.vo_dim))
                mean = torch.zeros(heads.n_heads, heads.queries, heads.vo_dim).to(z)
                if profile.record.centred:
                    mean = torch.from_numpy(profile.get(i, "z_mean")).reshape(mean.shape).to(z)
                encode, decode = _directions(profile.value_directions, i, heads.n_heads, z)
                kept = torch.einsum("btghi,gic->btghc", z - mean, encode) * _own(gates[i]["vo"])
                return ((torch.einsum("btghc,gcj->btghj", kept, decode) + mean).flatten(2),)

            def cut_q(module, args, out, i=i, heads=heads):
                q = out.unflatten(-1, (heads.n_heads, heads.queries, heads.qk_dim))
                rotary = heads.rotary_dim
                parts = []
                if rotary:
                    twice = torch.cat([gates[i]["plane"]] * 2, -1)
                    parts.append(q[..., :rotary] * _own(twice))
                if rotary < heads.qk_dim:
                    encode, other = _directions(profile.score_directions, i, heads.n_heads, q)
                    free = torch.einsum("btghi,gic->btghc", q[..., rotary:], encode)
                    free = free * _own(gates[i]["free"])
                    parts.append(torch.einsum("btghc,gjc->btghj", free, other))
                return torch.cat(parts, -1).flatten(2)

            undo.callback(attention.o_proj.register_forward_pre_hook(cut_z).remove)
            if not profile.record.qk_whole:
                undo.callback(attention.q_proj.register_forward_hook(cut_q).remove)
        yield


def _own(gates):
    return gates[None, None, :, None, :]


def _directions(read, layer, n_heads, like):
    pairs = [read(layer, j) for j in range(n_heads)]
    return [torch.from_numpy(np.stack(x)).to(like) for x in zip(*pairs, strict=True)]


def open_gates(profile, dtype=torch.float64):
    """All gates at 1, asking for their gradient."""
    return [
        {
            part: torch.ones(
                profile.get(i, f"{part}_energy").shape, dtype=dtype, requires_grad=True
            )
            for part in ("vo", "plane", "free")
            if profile.has(i, f"{part}_energy")
        }
        for i in range(len(profile.plan.layers))
    ]


class Tools:
    make_job = staticmethod(make_job)
    sequence_losses = staticmethod(sequence_losses)
    gated = staticmethod(gated)
    open_gates = staticmethod(open_gates)
    vocab = VOCAB
    length = LENGTH


@pytest.fixture(scope="session")
def tools():
    return Tools


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

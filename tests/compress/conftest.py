"""Tiny models saved as folders, their profiles, and plans for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headwise.nn.build import convert
from headwise.plan import Budget, Limit
from headwise.planning.fit import fit
from headwise.planning.worth_curves import FitRules
from headwise.profile.chunks import Job
from headwise.profile.run import profile_model
from headwise.profile.settings import ProfileSettings
from headwise.profile.source import Sequences, objective_of
from headwise.profile.worth import fit_task

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, LENGTH = 53, 13
_SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "max_position_embeddings": 31,
    "hidden_size": 33,
    "intermediate_size": 37,
    "num_attention_heads": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {
    **_SIZES,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_EVEN = {k: v for k, v in _GROUPED.items() if k != "head_dim"} | {"hidden_size": 60}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 31,
    "n_embd": 33,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": 37,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 33,
    "n_layers": 3,
    "n_heads": 3,
    "hidden_dim": 37,
    "max_position_embeddings": 31,
}
_VIT = {  # 12 patches and a class token: LENGTH tokens
    **{k: _SIZES[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")},
    "num_hidden_layers": 3,
    "image_size": (6, 8),
    "patch_size": 2,
}
t = transformers
FAMILIES = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_GROUPED)),
    "llama_tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_GROUPED, tie_word_embeddings=True)),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**_GROUPED, sliding_window=5)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**_EVEN)),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_GROUPED)),
    "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**_GROUPED, sliding_window=5)),
    "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**_EVEN)),
    "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**_GROUPED)),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**_GPT2)),
    "opt": lambda: t.OPTForCausalLM(
        t.OPTConfig(
            **{k: v for k, v in _SIZES.items() if k != "intermediate_size"},
            ffn_dim=37,
            word_embed_proj_dim=33,
        )
    ),
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**_SIZES | {"hidden_size": 48}, rope_parameters=_PARTIAL)
    ),
    "bert": lambda: t.BertModel(t.BertConfig(**_SIZES)),
    "roberta": lambda: t.RobertaModel(t.RobertaConfig(**_SIZES)),
    "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(**_DISTILBERT)),
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**_VIT, num_labels=7)),
    "vit_bare": lambda: t.ViTModel(t.ViTConfig(**_VIT)),
}


class Subject:
    """A tiny random model: the folder it is saved in, its profile, and plans fitted to that."""

    def __init__(
        self,
        name: str,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        *,
        change: Callable[[Any], None] | None = None,
        rows: int = 6,
        length: int = LENGTH,
    ) -> None:
        torch.manual_seed(7)
        model = FAMILIES[name]()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) * 0.25 if p.ndim > 1 else p + torch.randn(p.shape) / 5)
        if change is not None:
            change(model)
        self.name, self.model = name, model.to(dtype).eval()
        self.path = folder / "dense"
        self.model.save_pretrained(self.path)
        wrapped = convert(self.model.float())
        inputs = self.inputs(5, rows, length)
        read = Sequences(inputs, objective_of(wrapped), "made up", "0" * 64, 3)
        settings = ProfileSettings(length=length, tokens=rows * length, chunk=3, seed=1)
        self.profile = profile_model(Job(wrapped, str(self.path), read, settings), folder / "prof")
        self.ids = torch.from_numpy(self.inputs(9, 2, 11))

    def inputs(self, seed: int, rows: int, length: int) -> np.ndarray:
        """Random tokens, or random images where the model reads those."""
        rng = np.random.default_rng(seed)
        if self.model.main_input_name == "pixel_values":
            return rng.normal(size=(rows, 3, 6, 8)).astype(np.float16)
        return rng.integers(4, VOCAB, (rows, length))

    def plan(self, share: float, multiple_of: int = 2):
        task = fit_task(self.profile, "sensitivity", FitRules(multiple_of=multiple_of))
        return fit(task, Budget(attn_params=Limit(share=share))).plan

    def outputs(self, model):
        with torch.no_grad():
            return model(**{self.model.main_input_name: self.ids})[0]


@pytest.fixture
def subject(tmp_path):
    return lambda name, **options: Subject(name, tmp_path, **options)


@pytest.fixture(params=list(FAMILIES))
def any_family(request) -> str:
    return request.param

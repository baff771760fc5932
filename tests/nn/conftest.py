"""Tiny stock models of every family, random enough that a wrong weight shows in the logits.

Sizes are distinct primes, or small multiples of primes where a family insists on divisibility.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from headwise.nn import registration
from headwise.nn.shapes import stock_class

registration.install()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, POSITIONS, LAYERS, FFN = 101, 67, 3, 37
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": POSITIONS,
    **_TOKENS,
}
_PLAIN = {**_COMMON, "hidden_size": 33, "intermediate_size": FFN, "num_attention_heads": 3}
# 6 query heads on 2 key/value heads, 10 wide: not d_model / heads = 7.
_GROUPED = {**_PLAIN, "hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 10}


def _configs():
    t = transformers
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"sliding_window": 5}
    even = {**_GROUPED, "hidden_size": 60}  # head width 10 from d_model / heads
    return {
        "llama": t.LlamaConfig(**_WIDE),
        "llama_biased": t.LlamaConfig(**_WIDE, attention_bias=True, mlp_bias=True),
        "mistral": t.MistralConfig(**_WIDE, **window),
        "qwen2": t.Qwen2Config(**even, **window, use_sliding_window=True, layer_types=kinds),
        "qwen3": t.Qwen3Config(**_WIDE),
        "gemma3_text": t.Gemma3TextConfig(
            **_WIDE, **window, layer_types=kinds, query_pre_attn_scalar=13
        ),
        "phi3": t.Phi3Config(**even),
        "olmo2": t.Olmo2Config(**_WIDE),
        "gpt2": t.GPT2Config(
            vocab_size=VOCAB,
            n_embd=33,
            n_layer=LAYERS,
            n_head=3,
            n_positions=POSITIONS,
            n_inner=FFN,
            scale_attn_by_inverse_layer_idx=True,
            **_TOKENS,
        ),
        "opt": t.OPTConfig(
            **_COMMON, hidden_size=33, ffn_dim=FFN, num_attention_heads=3, word_embed_proj_dim=33
        ),
        "gpt_neox": t.GPTNeoXConfig(**_PLAIN | {"hidden_size": 48}, rope_parameters=partial),
        "bert": t.BertConfig(**_PLAIN),
        "roberta": t.RobertaConfig(**_PLAIN),
        "distilbert": t.DistilBertConfig(
            vocab_size=VOCAB,
            dim=33,
            n_layers=LAYERS,
            n_heads=3,
            hidden_dim=FFN,
            max_position_embeddings=POSITIONS,
            pad_token_id=0,
        ),
        "vit": t.ViTConfig(
            hidden_size=33,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=3,
            image_size=12,
            patch_size=4,
        ),
    }


CONFIGS = _configs()
ENCODERS = {"bert", "roberta", "distilbert", "vit"}


def task_of(name: str) -> str:
    if name == "vit":
        return "image-classification"
    return "masked-lm" if name in ENCODERS else "causal-lm"


def randomised(model):
    """Weights far from their initial values, so that no bias, norm or position is a no-op."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.25 if p.ndim > 1 else p + noise * 0.2)
    return model.eval()


class Tiny:
    """What the tests of this folder share."""

    configs = CONFIGS
    vocab = VOCAB
    randomised = staticmethod(randomised)

    @staticmethod
    def config(name: str):
        return CONFIGS[name].__class__.from_dict(CONFIGS[name].to_dict())

    @classmethod
    def stock(cls, name: str, task: str | None = None):
        config = cls.config(name)
        return randomised(stock_class(config, task or task_of(name))(config))

    @staticmethod
    def inputs(name: str, length: int = 11):
        generator = torch.Generator().manual_seed(3)
        if name == "vit":
            return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
        ids = torch.randint(3, VOCAB, (2, length), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    @classmethod
    def padded(cls, length: int = 11, pads: int = 4):
        """A batch of two whose second row is padded on the left."""
        inputs = cls.inputs("llama", length)
        inputs["input_ids"][1, :pads] = 0
        inputs["attention_mask"][1, :pads] = 0
        return inputs


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small gain nothing from threads, and lose much when the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(params=list(CONFIGS))
def any_family(request) -> str:
    return request.param


@pytest.fixture(params=[n for n in CONFIGS if n not in ENCODERS])
def causal_family(request) -> str:
    return request.param

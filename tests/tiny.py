"""The tiny models that tests share: one place says how they are built.

    config(name) ─► stock(name) ─► profile_job(model) ─► ProfiledModel: folder, profile, plans
    write_llama(folder): text.txt, and model/ with weights and a tokenizer of that text

Weights are random, and far enough from their initial values that a wrong one shows in the
logits. Sizes are distinct primes, or small multiples of primes where a family insists on
divisibility.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.cutting.run import CutRequest
from headwise.cutting.settings import CutSettings
from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer
from headwise.models.build import convert, plan_of
from headwise.models.shapes import stock_class
from headwise.models.slicing import sliced
from headwise.plan import Budget, Limit, ModelShape
from headwise.planning.fit import Kept, fit
from headwise.planning.rules import WidthRules
from headwise.profiling.run import ProfileJob, profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences, objective_of
from headwise.profiling.worth import fit_problem
from headwise.source import open_source

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB, POSITIONS, LAYERS, FFN, LABELS = 101, 67, 3, 37, 7
IMAGE = (3, 6, 8)  # in patches of 2 by 2: 12 of them and a class token
LENGTH = 13  # as many tokens as an image has
MASK = 3

# The smallest model to train: distinct sizes, three heads.
SHAPE = ModelShape(
    n_layers=1,
    d_model=12,
    context=16,
    n_heads=3,
    n_kv_heads=3,
    qk_dim=4,
    vo_dim=4,
    ffn_dim=13,
    vocab_size=263,
)

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TEXT = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": POSITIONS,
    **_TOKENS,
}
_BLOCK = {"hidden_size": 33, "intermediate_size": FFN, "num_attention_heads": 3}
_PLAIN = {**_TEXT, **_BLOCK}
# 6 query heads on 2 key/value heads, 10 wide: not d_model / heads = 7.
_EVEN = {**_PLAIN, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2}
_WIDE = {**_EVEN, "hidden_size": 42, "head_dim": 10}


def _configs() -> dict[str, Any]:
    t = transformers
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    window = {"sliding_window": 5}
    mixed = {**window, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    gpt2 = {"n_embd": 33, "n_layer": LAYERS, "n_head": 3, "n_positions": POSITIONS, "n_inner": FFN}
    distilbert = {"dim": 33, "n_layers": LAYERS, "n_heads": 3, "hidden_dim": FFN}
    opt = {"hidden_size": 33, "num_attention_heads": 3, "ffn_dim": FFN, "word_embed_proj_dim": 33}
    image = {"image_size": IMAGE[1:], "patch_size": 2, "num_labels": LABELS}
    return {
        "llama": t.LlamaConfig(**_WIDE),
        "llama_biased": t.LlamaConfig(**_WIDE, attention_bias=True, mlp_bias=True),
        "llama_tied": t.LlamaConfig(**_WIDE, tie_word_embeddings=True),
        "mistral": t.MistralConfig(**_WIDE, **window),
        "qwen2": t.Qwen2Config(**_EVEN, **mixed, use_sliding_window=True),
        "qwen3": t.Qwen3Config(**_WIDE),
        "gemma3_text": t.Gemma3TextConfig(**_WIDE, **mixed, query_pre_attn_scalar=13),
        "phi3": t.Phi3Config(**_EVEN),
        "olmo2": t.Olmo2Config(**_WIDE),
        "gpt2": t.GPT2Config(
            vocab_size=VOCAB, **gpt2, **_TOKENS, scale_attn_by_inverse_layer_idx=True
        ),
        "opt": t.OPTConfig(**_TEXT, **opt),
        "gpt_neox": t.GPTNeoXConfig(**_PLAIN | {"hidden_size": 48}, rope_parameters=partial),
        "bert": t.BertConfig(**_PLAIN),
        "roberta": t.RobertaConfig(**_PLAIN),
        "distilbert": t.DistilBertConfig(
            vocab_size=VOCAB, **distilbert, max_position_embeddings=POSITIONS, pad_token_id=0
        ),
        "vit": t.ViTConfig(**_BLOCK, num_hidden_layers=LAYERS, **image),
    }


CONFIGS = _configs()
ENCODERS = ("bert", "roberta", "distilbert", "vit")
DECODERS = tuple(name for name in CONFIGS if name not in ENCODERS)
# Every way in which projections are stored, normed and masked, once: the families of the fast lane.
QUICK = ("llama", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox", "bert", "vit")


def config(name: str, **changes: Any) -> Any:
    """A config of one's own; `name` may end in _bare, for a model without a head."""
    made = CONFIGS[name.removesuffix("_bare")]
    return type(made).from_dict(made.to_dict() | changes)


def task_of(name: str) -> str:
    """What a model of this name is for."""
    if name.endswith("_bare"):
        return "bare"
    if name == "vit":
        return "image-classification"
    return "masked-lm" if name in ENCODERS else "causal-lm"


def randomise(model: Any, seed: int = 7, scale: float = 0.25) -> Any:
    """Put in weights far from their initial values: no bias, norm or position is a no-op."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * scale if p.ndim > 1 else p + noise * 0.2)
    return model.eval()


def stock(
    name: str, task: str | None = None, *, seed: int = 7, scale: float = 0.25, **changes: Any
) -> Any:
    """A model of transformers with random weights; `scale` is the size of its matrices' entries."""
    made = config(name, **changes)
    return randomise(stock_class(made, task or task_of(name))(made), seed, scale)


def inputs(name: str, length: int = 11) -> dict[str, torch.Tensor]:
    """Two rows for a model of this name."""
    generator = torch.Generator().manual_seed(3)
    if name.startswith("vit"):
        return {"pixel_values": torch.randn(2, *IMAGE, generator=generator)}
    ids = torch.randint(4, VOCAB, (2, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(length: int = 11, pads: int = 4) -> dict[str, torch.Tensor]:
    """Two rows of tokens, the second padded on the left."""
    made = inputs("llama", length)
    made["input_ids"][1, :pads] = 0
    made["attention_mask"][1, :pads] = 0
    return made


def narrowed(model: Any, *, scores: bool = True) -> Any:
    """A cut of a converted model: some columns and neurons are kept, others in every layer.

    Without `scores`, of values and neurons only.
    """
    kept, neurons = [], [range(width)[i::2] for i, width in enumerate(plan_of(model).ffn_dims)]
    for i, layer in enumerate(plan_of(model).layers):
        row = []
        for head in layer.heads:
            planes = range(len(head.rotary_planes or ()))
            free = range(head.qk_dim - 2 * len(planes))
            kept_scores = (planes[i % 2 :: 2], free[i % 2 :: 2]) if scores else (planes, free)
            row.append(Kept(*kept_scores, range(head.vo_dim)[1 + i :]))
        kept.append(row)
    return sliced(model, kept, neurons)


def profile_job(
    stock: Any, name: str, *, rows: int = 7, length: int = LENGTH, chunk: int = 3, **more: Any
) -> ProfileJob:
    """The job of profiling a model on random tokens, or on random images where it reads those."""
    model = convert(stock)
    rng = np.random.default_rng(5)
    if model.main_input_name == "pixel_values":
        seen = rng.normal(size=(rows, *IMAGE)).astype(np.float16)
    else:
        seen = rng.integers(4, model.config.get_text_config().vocab_size, (rows, length))
    sequences = Sequences(seen, objective_of(model), "made up", "0" * 64, MASK)
    settings = ProfileSettings(length=length, tokens=rows * length, chunk=chunk, seed=11)
    return ProfileJob(model, name, sequences, settings, **more)


class ProfiledModel:
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
        self.name, self.path = name, folder / "dense"
        self.model = stock(name).to(dtype)
        if change is not None:
            change(self.model)
        self.model.save_pretrained(self.path)
        weights = open_source(self.path).weights_sha256
        job = profile_job(
            self.model.float(), str(self.path), rows=rows, length=length, weights_sha256=weights
        )
        self.profile = profile_model(job, folder / "prof")
        self.inputs = inputs(name)

    def plan(self, share: float, multiple_of: int = 2, **rules: Any) -> Any:
        """The plan that keeps this share of the attention parameters."""
        chosen = WidthRules(multiple_of=multiple_of, **rules)
        problem = fit_problem(self.profile, "sensitivity", chosen)
        return fit(problem, Budget(attn_params=Limit(share=share))).plan

    def request(self, plan: Any, **settings: Any) -> CutRequest:
        """What `cut_model` is asked for, with batches of three sequences."""
        length = self.profile.record.settings["length"]
        chosen = CutSettings(batch_tokens=3 * length, **settings)
        return CutRequest(open_source(self.path), self.profile, plan, chosen)

    def outputs(self, model: Any) -> torch.Tensor:
        """What a model answers to the inputs that no profile saw."""
        with torch.no_grad():
            return model(**self.inputs)[0]


def write_llama(
    folder: Path,
    *,
    text: str = "",
    characters: int = 20_000,
    vocab_size: int = 293,
    shard: str = "1GB",
    change: Callable[[Any], None] | None = None,
    **sizes: Any,
) -> Path:
    """Write text.txt and model/: a random Llama with a tokenizer of that text.

    The text is `text`, or the first `characters` of Python's documentation and library.
    """
    text = text or "\n\n".join(read_source("builtin:python", max_chars=characters).documents)
    (folder / "text.txt").write_text(text)
    usual = {
        "hidden_size": 24,
        "intermediate_size": 31,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **usual | sizes))
    if change is not None:
        change(model)
    model.save_pretrained(folder / "model", max_shard_size=shard)
    train_tokenizer([text], vocab_size).save_pretrained(folder / "model")
    return folder


def add_gguf_tokenizer(writer: Any, tokenizer: Any) -> None:
    """Write a byte-pair tokenizer into a GGUF file, as llama.cpp's converter does."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t == tokenizer.eos_token else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in data["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)

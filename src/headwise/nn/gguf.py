"""GGUF files as sources: dequantised once into a plain Hugging Face folder in a cache.

    model.Q4_1.gguf ──► CACHE/gguf/model.Q4_1-<sha256>-float32/ ─┬─ config.json
                                                                 ├─ model.safetensors
                                                                 └─ tokenizer, generation config

Tensors are unpacked one after another by NumPy (the `gguf` package), so it takes seconds and the
memory of one tensor. A Llama's query and key rows are stored for another rotary layout:

    GGUF     plane 0, plane 0, plane 1, plane 1, …      (neighbours turn together)
    here     plane 0, plane 1, …, plane 0, plane 1, …   (halves turn together)
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from headwise import artifacts
from headwise.errors import HeadwiseError, reason_of
from headwise.nn.checkpoint_writer import CheckpointWriter

_AROUND = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ROTATED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
_FORMAT = 1  # of the cache: another number makes every file anew


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    neighbours_turn: bool  # rotary rows are stored in the neighbouring layout


_ARCHITECTURES = {
    "llama": _Architecture("llama", neighbours_turn=True),  # Mistral and SmolLM are written so too
    "qwen2": _Architecture("qwen2", neighbours_turn=False),
    "qwen3": _Architecture("qwen3", neighbours_turn=False),
}


def dequantised(
    path: Path | str, cache_dir: Path | None = None, *, dtype: torch.dtype = torch.float32
) -> Path:
    """The folder of a GGUF file's model, made on the first call."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise HeadwiseError(f"{path} does not exist; give the path of a GGUF file.")
    number = str(dtype).removeprefix("torch.")
    name = f"{path.stem}-{artifacts.sha256(path)[:16]}-{number}-{_FORMAT}"
    folder = (cache_dir or default_cache()) / "gguf" / name
    if folder.exists():
        return folder
    source = _Source.open(path)
    config = source.config(dtype)
    source.refuse_incomplete(config)
    with artifacts.atomic_folder(folder, force=True) as temporary:
        config.save_pretrained(temporary)
        with CheckpointWriter(temporary) as writer:
            for tensor in source.reader.tensors:
                writer.put(source.name(tensor.name), source.tensor(tensor).to(dtype))
        _save_words(path, source, config, temporary)
    return folder


def default_cache() -> Path:
    """HEADWISE_CACHE, else `headwise` in the user's cache folder."""
    given = os.environ.get("HEADWISE_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


@dataclass(frozen=True)
class _Source:
    """An open GGUF file."""

    path: Path
    reader: Any
    architecture: _Architecture

    @classmethod
    def open(cls, path: Path) -> _Source:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise HeadwiseError(
                f"{path} is a GGUF file, but the `gguf` package is missing; install headwise[gguf]."
            ) from error
        try:
            reader = GGUFReader(path)
            name = reader.fields["general.architecture"].contents()
        # A file of another kind or cut short shows as any of NumPy's and the reader's errors.
        except Exception as error:
            raise HeadwiseError(
                f"{path} is not a whole GGUF file ({type(error).__name__}: {error}); "
                "download it again."
            ) from error
        if name not in _ARCHITECTURES:
            raise HeadwiseError(
                f"{path} holds a {name!r} model; of GGUF files only {', '.join(_ARCHITECTURES)} "
                "are read: give the model's Hugging Face folder."
            )
        source = cls(path, reader, _ARCHITECTURES[name])
        source._refuse_unknown()
        return source

    def field(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; a model's own key may leave out the architecture."""
        arch = self.reader.fields["general.architecture"].contents()
        for name in (f"{arch}.{key}", key):
            if name in self.reader.fields:
                return self.reader.fields[name].contents()
        if default is None:
            raise HeadwiseError(f"{self.path} does not say its {key}; download it again.")
        return default

    def name(self, name: str) -> str:
        """The Hugging Face name of a tensor."""
        if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
            layer, part, kind = found.groups()
            if part in _IN_LAYER:
                return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
        part, _, kind = name.rpartition(".")
        if part in _AROUND and kind in {"weight", "bias"}:
            return f"{_AROUND[part]}.{kind}"
        raise HeadwiseError(
            f"{self.path} holds a tensor {name!r} that a {self.architecture.model_type} model does "
            "not have; give the model's Hugging Face folder."
        )

    def tensor(self, tensor: Any) -> torch.Tensor:
        """One tensor, unpacked, its rows in our rotary layout."""
        from gguf import dequantize

        try:
            numbers = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise HeadwiseError(
                f"{self.path} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be "
                "unpacked; take a file of another quantisation."
            ) from error
        if not np.isfinite(numbers).all():
            raise HeadwiseError(f"{tensor.name} in {self.path} holds NaN or infinity.")
        part = tensor.name.split(".")[-2]
        if part in _ROTATED and self.architecture.neighbours_turn:
            numbers = halves_turning(numbers, self._heads(_ROTATED[part]))
        return torch.from_numpy(np.ascontiguousarray(numbers))

    def config(self, dtype: torch.dtype) -> Any:
        """The Hugging Face config."""
        from transformers import CONFIG_MAPPING

        heads, names = self._heads("head_count"), {t.name: t for t in self.reader.tensors}
        if "token_embd.weight" not in names:
            raise HeadwiseError(f"{self.path} lacks token_embd.weight; download it again.")
        width = int(self.field("embedding_length"))
        biased = "blk.0.attn_q.bias" in names
        tokens = {
            f"{side}_token_id": self.field(f"tokenizer.ggml.{word}_token_id", -1)
            for side, word in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        family: Any = CONFIG_MAPPING[self.architecture.model_type]
        made = family(
            vocab_size=int(names["token_embd.weight"].shape[1]),
            hidden_size=width,
            intermediate_size=int(self.field("feed_forward_length")),
            num_hidden_layers=int(self.field("block_count")),
            num_attention_heads=heads,
            num_key_value_heads=self._heads("head_count_kv"),
            head_dim=self._head_dim(),
            max_position_embeddings=int(self.field("context_length")),
            # Stored in float32: 1e-05 would come back as 9.999999747e-06.
            rms_norm_eps=float(f"{self.field('attention.layer_norm_rms_epsilon'):.7g}"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": float(self.field("rope.freq_base", 10000.0)),
            },
            tie_word_embeddings="output.weight" not in names,
            **({"attention_bias": biased} if self.architecture.model_type != "qwen2" else {}),
            **{side: None if token == -1 else int(token) for side, token in tokens.items()},
        )
        made.architectures = [f"{type(made).__name__.removesuffix('Config')}ForCausalLM"]
        made.dtype = dtype
        return made

    def refuse_incomplete(self, config: Any) -> None:
        """Raise unless the file has exactly the weights of the model it describes."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        wanted = {n: tuple(t.shape) for n, t in model.state_dict().items()}
        if config.tie_word_embeddings:
            del wanted["lm_head.weight"]
        found = {
            self.name(t.name): tuple(int(n) for n in t.shape[::-1]) for t in self.reader.tensors
        }
        wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        if wrong:
            raise HeadwiseError(
                f"{self.path} should have {wrong[0]} of shape {wanted.get(wrong[0])} by its own "
                f"sizes, and has {found.get(wrong[0])}; download it again."
            )

    def _heads(self, key: str) -> int:
        heads = self.field(f"attention.{key}", self.field("attention.head_count"))
        if not isinstance(heads, int):
            raise HeadwiseError(
                f"{self.path} has layers with different numbers of heads, which its family in "
                "transformers has not; give the model's Hugging Face folder."
            )
        return heads

    def _head_dim(self) -> int:
        usual = self.field("embedding_length") // self._heads("head_count")
        return int(self.field("attention.key_length", self.field("rope.dimension_count", usual)))

    def _refuse_unknown(self) -> None:
        """What would silently be another model."""
        whole = self._head_dim()
        odd = {
            "experts": self.field("expert_count", 0) > 0,
            "scaled rotary positions": self.field("rope.scaling.type", "none") != "none"
            or any(t.name == "rope_freqs.weight" for t in self.reader.tensors),
            "partly rotated heads": self.field("rope.dimension_count", whole) != whole,
            "a sliding window": self.field("attention.sliding_window", 0) > 0,
        }
        found = [name for name, there in odd.items() if there]
        if found:
            raise HeadwiseError(
                f"{self.path} has {' and '.join(found)}, which is not read from GGUF files; "
                "give the model's Hugging Face folder."
            )


def halves_turning(
    rows: Float32[np.ndarray, rows * columns], n_heads: int
) -> Float32[np.ndarray, rows * columns]:
    """Rows of a rotary projection from the neighbouring layout to that of two halves."""
    planes = rows.shape[0] // n_heads // 2
    paired = rows.reshape(n_heads, planes, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _save_words(path: Path, source: _Source, config: Any, folder: Path) -> None:
    """The tokenizer with its chat template, and the generation config."""
    from transformers import AutoTokenizer, GenerationConfig

    ids = {s: getattr(config, s) for s in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**{s: token for s, token in ids.items() if token is not None}).save_pretrained(
        folder
    )
    if "tokenizer.ggml.model" not in source.reader.fields:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers and tokenizers raise many kinds here, plain Exception among them.
    except Exception as error:
        raise HeadwiseError(
            f"{path} holds a tokenizer that cannot be read ({reason_of(error)}); "
            "give the model's Hugging Face folder."
        ) from error
    tokenizer.save_pretrained(folder)

"""GGUF files as sources: dequantised once into a plain Hugging Face folder in a cache.

    model.Q4_1.gguf ──► CACHE/gguf/model.Q4_1-<sha256>-float32-2/ ─┬─ config.json
                                                                   ├─ model.safetensors
                                                                   └─ tokenizer, generation config

transformers knows the architectures: its GGUF loader says what the config is, which tensor is which
weight, and how a tensor's layout differs from its own (a Llama's query and key rows, GPT-2's
transposed matrices, Gemma's norms). It is asked one tensor after another, so that memory for one
tensor is enough. What its config leaves out is read here; what neither can express (scaled rotary
positions, experts) is refused, since the result would silently be another model.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise import artifacts
from headwise.errors import HeadwiseError, OutputError, quoted, reason_of
from headwise.inputs import MOST_WEIGHTS, check_file, user_path
from headwise.models.backbones_headwise import FAMILIES
from headwise.models.checkpoint import CheckpointWriter
from headwise.models.shapes import empty_model

_FORMAT = 2  # of the cache: another number makes every file anew
_MOST = 2**31  # of any size in the metadata
_MODEL_TYPES = {"gemma3": "gemma3_text"}  # where transformers' name of an architecture is another
_COUNTS = (  # of the metadata, after the architecture's name
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
)
_NUMBERS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base")
_SCALED_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNKNOWN_SCALES = (
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)


def dequantise(
    path: Path | str, cache_dir: Path | None = None, *, dtype: torch.dtype = torch.float32
) -> Path:
    """Dequantise a GGUF file into a model folder in the cache, on the first call; its path."""
    path = user_path(path)
    check_file(path, most=MOST_WEIGHTS, advice="give the path of a GGUF file")
    number = str(dtype).removeprefix("torch.")
    name = f"{path.stem}-{artifacts.sha256(path)[:16]}-{number}-{_FORMAT}"
    folder = (cache_dir or default_cache()) / "gguf" / name
    if folder.exists():
        return folder
    file = _File.open(path)
    config = _config(file, dtype)
    weights = _Weights.of(file, config)
    try:
        with artifacts.atomic_folder(folder) as temporary:
            config.save_pretrained(temporary)
            with CheckpointWriter(temporary) as writer:
                for own, tensor in weights:
                    writer.put(own, tensor.to(dtype))
            _save_companions(file, config, temporary)
    except OutputError:
        if not folder.exists():  # another process made it meanwhile
            raise
    return folder


def default_cache() -> Path:
    """HEADWISE_CACHE, else `headwise` in the user's cache folder."""
    given = os.environ.get("HEADWISE_CACHE")
    if given:
        return user_path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


@dataclass(frozen=True)
class _File:
    """An open GGUF file with validated metadata."""

    path: Path
    reader: Any
    architecture: str

    @classmethod
    def open(cls, path: Path) -> _File:
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
                f"{path} is not a complete GGUF file ({reason_of(error)}); download it again."
            ) from error
        if name not in architectures():
            raise HeadwiseError(
                f"{path} holds a {quoted(name)} model; of GGUF files only "
                f"{', '.join(architectures())} are read: give the model's Hugging Face folder."
            )
        file = cls(path, reader, name)
        file._check_sizes()
        file._refuse_unknown()
        return file

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The tensors by their GGUF names."""
        return {t.name: t for t in self.reader.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape as transformers counts it."""
        if name not in self.tensors:
            raise HeadwiseError(f"{self.path} lacks {name}; download it again.")
        return tuple(int(n) for n in self.tensors[name].shape[::-1])

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; a model's own keys go without the architecture's name."""
        for name in (f"{self.architecture}.{key}", key):
            if name in self.reader.fields:
                return self.reader.fields[name].contents()
        return default

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        usual = self.get("embedding_length") // self.get("attention.head_count")
        rotary = self.get("rope.dimension_count", usual)
        return int(self.get("attention.key_length", rotary))

    def _check_sizes(self) -> None:
        """Refuse sizes of a wrong kind, or that the tensors do not have."""
        needed = ("block_count", "context_length", "embedding_length", "attention.head_count")
        for key in _COUNTS:
            value = self.get(key)
            if value is None and key not in needed:
                continue
            if isinstance(value, list):
                raise HeadwiseError(
                    f"{self.path} has layers with different values of {key}, which its family in "
                    "transformers does not support; give the model's Hugging Face folder."
                )
            if type(value) is not int or not 1 <= value < _MOST:
                raise self._wrong(key, "a whole number of at least 1", value)
        for key in _NUMBERS:
            value = self.get(key, 1.0)
            if type(value) not in (int, float) or not 0 < value < np.inf:
                raise self._wrong(key, "a number above 0", value)
        blocks = {m[1] for name in self.tensors if (m := re.match(r"blk\.(\d+)\.", name))}
        if len(blocks) != self.get("block_count"):
            raise self._wrong(
                "block_count", f"{len(blocks)}, as its tensors", self.get("block_count")
            )
        if self.shape("token_embd.weight")[1:] != (self.get("embedding_length"),):
            width = self.shape("token_embd.weight")[1:]
            raise self._wrong(
                "embedding_length", f"{width}, as its tensors", self.get("embedding_length")
            )

    def _refuse_unknown(self) -> None:
        """Refuse features that would silently give another model."""
        whole, family = (
            self.head_dim,
            FAMILIES[_MODEL_TYPES.get(self.architecture, self.architecture)],
        )
        odd = {
            "experts": self.get("expert_count", 0) != 0,
            "scaled rotary positions": self.get("rope.scaling.type", "none") != "none"
            or any(name in self.tensors for name in _SCALED_ROTARY),
            "partly rotated heads": family.rotary
            and self.get("rope.dimension_count", whole) != whole,
            "values of another width than keys": self.get("attention.value_length", whole) != whole,
            "a sliding window": bool(self.get("attention.sliding_window", 0))
            and not _windows(self),
            "non-standard scales": any(self.get(key) for key in _UNKNOWN_SCALES),
        }
        found = [name for name, there in odd.items() if there]
        if found:
            raise HeadwiseError(
                f"{self.path} has {' and '.join(found)}, which is not read from GGUF files; "
                "give the model's Hugging Face folder."
            )

    def _wrong(self, key: str, wanted: str, came: object) -> HeadwiseError:
        return HeadwiseError(
            f"{key} in the metadata of {self.path} must be {wanted}, got {quoted(came)}; download "
            "it again."
        )


def architectures() -> tuple[str, ...]:
    """The architectures of GGUF files that transformers reads and headwise knows."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return tuple(n for n in GGUF_SUPPORTED_ARCHITECTURES if _MODEL_TYPES.get(n, n) in FAMILIES)


def _windows(file: _File) -> bool:
    """Whether sliding windows are read: one for all layers of a Phi-3, Gemma 3's pattern."""
    return file.architecture in {"phi3", "gemma3"}


def _config(file: _File, dtype: torch.dtype) -> Any:
    """transformers' config of the file, with what it leaves out or rounds."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    # Metadata of a wrong kind shows as any kind of error.
    except Exception as error:
        raise HeadwiseError(
            f"{file.path} has metadata that transformers cannot read ({reason_of(error)}); give "
            "the model's Hugging Face folder."
        ) from error
    config.vocab_size = file.shape("token_embd.weight")[0]
    for name in ("rms_norm_eps", "layer_norm_epsilon"):
        if hasattr(config, name):  # stored in float32: 1e-05 comes as 9.999999747e-06
            setattr(config, name, float(f"{getattr(config, name):.7g}"))
    if FAMILIES[config.model_type].grouped:
        config.head_dim = file.head_dim
    for name, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
        if hasattr(config, name):
            setattr(config, name, f"blk.0.{tensor}.bias" in file.tensors)
    for side, word in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{word}_token_id")
        setattr(config, f"{side}_token_id", token if type(token) is int and token >= 0 else None)
    if config.model_type == "gpt2":
        config.n_positions = file.shape("position_embd.weight")[0]
        config.n_inner = file.get("feed_forward_length")
    if config.model_type == "phi3":
        config.sliding_window = file.get("attention.sliding_window") or None
    if config.model_type == "gemma3_text":
        # llama.cpp knows the 27B model, which alone scales by another width, by its depth.
        other = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = other if config.num_hidden_layers == 62 else file.head_dim
    for name in ("unk_token_id", "_model_name_or_path"):
        if name in config.__dict__ and not hasattr(type(config), name):
            delattr(config, name)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.dtype = dtype
    return config


@dataclass(frozen=True)
class _Weights:
    """The weights of the model by their names in transformers; iterating unpacks one at a time."""

    file: _File
    wanted: dict[str, tuple[int, ...]]
    names: dict[str, str]  # by the GGUF name
    processor: Any

    @classmethod
    def of(cls, file: _File, config: Any) -> _Weights:
        """The weights, after a check that they are just those of the model the file describes."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        try:
            model = empty_model(config, "causal-lm")
            config.architectures = [type(model).__name__]
            processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config.to_dict())
            names = get_gguf_hf_weights_map(model, processor)
        # Sizes that no model can have show as any kind of error.
        except Exception as error:
            raise HeadwiseError(
                f"{file.path} describes a model that cannot be built ({reason_of(error)}); "
                "download it again."
            ) from error
        wanted = {n: tuple(t.shape) for n, t in model.state_dict().items()}
        if config.tie_word_embeddings:
            for tied in model.all_tied_weights_keys:
                del wanted[tied]
        if "output.weight" in file.tensors:
            names["output.weight"] = "lm_head.weight"
        made = cls(file, wanted, names, processor)
        made._check()
        return made

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf import dequantize

        for name, tensor in self.file.tensors.items():
            try:
                numbers = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            except NotImplementedError as error:
                raise HeadwiseError(
                    f"{self.file.path} stores {name} as {tensor.tensor_type.name}, which cannot be "
                    "unpacked; use a file with another quantisation."
                ) from error
            if not np.isfinite(numbers).all():
                raise HeadwiseError(f"{name} in {self.file.path} holds NaN or infinity.")
            apart: dict[str, Any] = {"tensors": {}}  # where GPT-2's output embeddings are put
            done = self.processor.process(weights=numbers, name=name, parsed_parameters=apart)
            own = self.names[name]
            weights = np.ascontiguousarray(done.weights, dtype=np.float32)
            if weights.shape != self.wanted[own]:
                raise self._wrong(own, weights.shape)
            yield own, torch.from_numpy(weights)

    def _check(self) -> None:
        for name in self.file.tensors:
            if name not in self.names:
                raise HeadwiseError(
                    f"{self.file.path} holds a tensor {quoted(name)} that a "
                    f"{self.file.architecture} model does not have; give the model's Hugging Face "
                    "folder."
                )
        found = {self.names[name]: self.file.shape(name) for name in self.file.tensors}
        for own in sorted(self.wanted.keys() | found.keys()):
            # A matrix may be stored transposed.
            if sorted(self.wanted.get(own, ())) != sorted(found.get(own, ())):
                raise self._wrong(own, found.get(own))
            if own not in self.wanted or own not in found:
                raise self._wrong(own, found.get(own))

    def _wrong(self, own: str, came: tuple[int, ...] | None) -> HeadwiseError:
        return HeadwiseError(
            f"{self.file.path} should have {own} of shape {self.wanted.get(own)} by its metadata, "
            f"but has {came}; download it again."
        )


def _save_companions(file: _File, config: Any, folder: Path) -> None:
    """The tokenizer with its chat template, and the generation config."""
    from transformers import AutoTokenizer, GenerationConfig

    ids = {s: getattr(config, s) for s in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**{s: token for s, token in ids.items() if token is not None}).save_pretrained(
        folder
    )
    if "tokenizer.ggml.model" not in file.reader.fields:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    # transformers and tokenizers raise many kinds here, plain Exception among them.
    except Exception as error:
        raise HeadwiseError(
            f"{file.path} holds a tokenizer that cannot be read ({reason_of(error)}); "
            "give the model's Hugging Face folder."
        ) from error
    # It notes whether the hub could be reached; the folder must not depend on that.
    tokenizer.init_kwargs["local_files_only"] = False
    tokenizer.save_pretrained(folder)

"""GGUF files, which llama.cpp runs: weights in its layout, tokenizer and chat template included.

    heads of one width, qk = vo    llama, or granite where folding the score scale would round;
                                   deci where layers differ in their number of head groups or in
                                   the width of their MLP
    qk ≠ vo, all rotary planes     mimo2
    qk ≠ vo, otherwise             step35
    GPT-2, nothing cut             gpt2

llama, granite and deci rotate neighbouring columns (rows of W_Q and W_K are reordered for it),
mimo2 and step35 rotate halves. `rope_freqs` holds the factors of kept rotary planes. mimo2 and
step35 need a layer with a sliding window: mimo2 gets a window longer than any text, step35 a layer
that adds nothing, since its windowed layers support only plain positions.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwise.artifacts import GGUF_MARK, Kind, atomic_file
from headwise.errors import HeadwiseError, quoted
from headwise.exporting.gguf_tokenizer import Vocabulary, vocabulary
from headwise.exporting.layout import HeadShape, laid_out
from headwise.exporting.llama_cpp import llama_cpp_parity, refuse_without_llama_cpp
from headwise.exporting.parts import (
    ExportRequest,
    chosen_dtype,
    record_of,
    too_large,
    write_parts,
)
from headwise.exporting.reading import LayerTensors, Reader
from headwise.exporting.record import ExportRecord
from headwise.exporting.rotary import RotaryForm, rotary_form
from headwise.exporting.stock import portable_shape, split_mlp, unfolded_scale
from headwise.planning.targets import target_of
from headwise.progress import Progress
from headwise.runs import Run

QUANTIZED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
ENDLESS = 2**24  # tokens of a sliding window that never slides
_MOST_F16 = float(np.finfo(np.float16).max)
_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_AROUND = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}
_REST = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_SIDES = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
_PAIRED = ("llama", "deci", "granite")  # neighbouring columns are a rotary plane
Arrays = dict[str, np.ndarray]


class GGUFForm:
    """A portable plan in an architecture of llama.cpp: metadata, and tensors layer by layer.

    A tensor's key is its name, a bar, and its number format.
    """

    def __init__(self, reader: Reader, stored: str) -> None:
        self.reader, self.stored = reader, stored
        self.counts = [len(layer.heads) for layer in reader.layers]
        self.ffn_dims = list(reader.source.plan.ffn_dims)
        self.rotary: RotaryForm | None = None
        if reader.config.model_type == "gpt2":
            answer = target_of("gguf").runs(reader.source.plan)
            if not answer.yes:
                raise HeadwiseError(
                    f"{reader.source.name} cannot be exported to gguf: {answer.why_not}; export "
                    "it to padded first, and that folder to gguf."
                )
            shape = reader.source.plan.shape
            self.shape = HeadShape((), shape.qk_dim, shape.vo_dim, 1)
        else:
            self.shape = portable_shape(reader, "gguf")
            assert reader.rotary is not None
            self.rotary = rotary_form(reader.rotary, self.shape)
            if self.architecture == "llama" and stored in ("F16", "BF16"):
                self.shape = replace(self.shape, scale=unfolded_scale(reader, self.shape))

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the class of model."""
        if self.rotary is None:
            return "gpt2"
        alike = len(set(self.counts)) == 1
        if self.shape.qk_dim != self.shape.vo_dim:
            return "mimo2" if self.plain and alike else "step35"
        whole = "llama" if self.shape.scale is None else "granite"
        return whole if alike and len(set(self.ffn_dims)) == 1 else "deci"

    @property
    def plain(self) -> bool:
        """Whether all rotary planes stay, in order."""
        assert self.reader.rotary is not None
        return self.shape.slots == tuple(range(len(self.reader.rotary.frequencies)))

    @property
    def stored_twice(self) -> bool:
        """Whether tied embeddings must be written as two tensors: mimo2 cannot tie them."""
        return self.architecture in ("mimo2", "step35") and bool(
            self.reader.config.tie_word_embeddings
        )

    def around(self) -> Arrays:
        """Embeddings, last norm, output head, and the factors of the rotary planes."""
        made: Arrays = {}
        for name, tensor in self.reader.around():
            made |= self._packed(_AROUND[name], tensor)
            if _AROUND[name] == "token_embd.weight" and self.stored_twice:
                made |= self._packed("output.weight", tensor)
        if self.rotary is not None and self.rotary.factors is not None:
            factors = torch.tensor(self.rotary.factors)
            made |= self._packed("rope_freqs.weight", factors)
        if self.architecture == "step35":
            made |= self._null_layer()
        return made

    def _null_layer(self) -> Arrays:
        """A last layer that adds nothing: step35 needs one with a sliding window.

        Such a layer rotates by plain positions, so none of the model's own layers can be used. Its
        norms are zero, so its output is zero; it has no MLP, and caches one head for one token.
        """
        n, d_model = len(self.reader), self.reader.config.hidden_size
        key, value = self.shape.qk_dim, self.shape.vo_dim
        shapes = {
            "attn_norm": (d_model,),
            "attn_q": (key, d_model),
            "attn_k": (key, d_model),
            "attn_v": (value, d_model),
            "attn_output": (d_model, value),
            "ffn_norm": (d_model,),
        }
        made: Arrays = {}
        for name, size in shapes.items():
            made |= self._packed(f"blk.{n}.{name}.weight", torch.zeros(size))
        return made

    def layer(self, i: int) -> Arrays:
        """One layer."""
        read, n_groups = self.reader.layer(i), self.counts[i]
        own = laid_out(read.layer, read.weights, self.shape, range(n_groups), n_groups)
        made: Arrays = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in own.tensors().items() if n_groups else ():
            side, _, kind = name.partition(".")
            tensors[f"{_SIDES[side]}.{kind}"] = self._turned(side, tensor)
        if self.architecture == "gpt2":
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"attn_{x}.{kind}") for x in "qkv"]
                tensors[f"attn_qkv.{kind}"] = torch.cat(parts)
        for name, tensor in tensors.items():
            made |= self._packed(f"blk.{i}.{name}", tensor)
        for name, tensor in self._rest(read, bool(n_groups)).items():
            made |= self._packed(f"blk.{i}.{name}", tensor)
        return made

    def metadata(self) -> dict[str, Any]:
        """The keys of the architecture, without its name before them."""
        config, shape = self.reader.config, self.shape
        n = len(self.reader)
        heads: Any = [c * shape.queries for c in self.counts]
        groups: Any = list(self.counts)
        if self.architecture == "step35":
            n, heads, groups = n + 1, [*heads, 1], [*groups, 1]
        elif self.architecture != "deci":
            heads, groups = heads[0], groups[0]
        found: dict[str, Any] = {
            "block_count": n,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "attention.head_count": heads,
            "attention.head_count_kv": groups,
            "vocab_size": config.vocab_size,
        }
        if self.rotary is None:
            eps = config.layer_norm_epsilon
            length = {"feed_forward_length": self.ffn_dims[0]}
            return found | length | {"attention.layer_norm_epsilon": eps}
        ffn: Any = self.ffn_dims if self.architecture == "deci" else self.ffn_dims[0]
        found |= {
            "feed_forward_length": ffn,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": shape.qk_dim,
            "attention.value_length": shape.vo_dim,
            "rope.dimension_count": 2 * len(shape.slots),
            "rope.freq_base": self.rotary.base,
        }
        if self.rotary.factor != 1.0:
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": self.rotary.factor}
        if self.architecture == "step35":
            found |= {
                "expert_feed_forward_length": ffn,
                "attention.sliding_window": 1,
                "attention.sliding_window_pattern": [i == n - 1 for i in range(n)],
                "rope.dimension_count": 4 * len(shape.slots),
                "rope.dimension_count_swa": 2 * len(shape.slots),
                "rope.freq_base_swa": self.rotary.base,
            }
        if self.architecture == "granite":
            found |= {"attention.scale": shape.score_scale, "logit_scale": 1.0}
        if self.architecture == "mimo2":
            found |= {
                "expert_feed_forward_length": ffn,
                "attention.sliding_window": ENDLESS,
                "attention.sliding_window_pattern": [i == 0 for i in range(n)],
                "rope.freq_base_swa": self.rotary.base,
            }
        return found

    def _turned(self, side: str, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of queries and keys in the order in which the architecture turns them."""
        if side not in ("query", "key") or self.architecture not in _PAIRED:
            return tensor
        by_head = tensor.unflatten(0, (-1, 2, self.shape.qk_dim // 2))
        return by_head.transpose(1, 2).flatten(0, 2)

    def _rest(self, read: LayerTensors, attends: bool) -> dict[str, torch.Tensor]:
        made = {}
        for name, tensor in split_mlp(read.rest).items():
            module, _, kind = name.rpartition(".")
            own = _REST[module]
            if attends or own != "attn_norm":
                flipped = self.architecture == "gpt2" and tensor.ndim == 2
                made[f"{own}.{kind}"] = tensor.T if flipped else tensor
        return made

    def _packed(self, name: str, tensor: torch.Tensor) -> Arrays:
        """A tensor's numbers as they are stored; vectors stay in float32."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        numbers: Any = tensor.float().contiguous().numpy()
        kind = self.stored if tensor.ndim == 2 else "F32"
        if name == "position_embd.weight":
            kind = "F32"
        block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        if tensor.shape[-1] % block:
            kind = "F16"
        # Quantised blocks have their scales in 16 bits.
        if kind not in ("F32", "BF16") and np.abs(numbers).max(initial=0) > _MOST_F16:
            raise too_large(name, kind)
        packed = quants.quantize(numbers, GGMLQuantizationType[kind])
        return {f"{name}|{kind}": np.ascontiguousarray(packed)}


class GGUFExport:
    """An export to one GGUF file, whose metadata records the inputs it was made from."""

    writes: Kind = "file"

    def __init__(self, request: ExportRequest) -> None:
        if request.check:
            refuse_without_llama_cpp()
        self.request, reader = request, Reader(request.source)
        self.dtype, self.layers = chosen_dtype(request, reader), len(reader)
        stored = request.quantize or _STORED[self.dtype]
        if request.quantize is not None and request.quantize not in QUANTIZED:
            raise HeadwiseError(
                f"--quantize must be one of {', '.join(QUANTIZED)}, got {quoted(request.quantize)}."
            )
        self.form, self.stored = GGUFForm(reader, stored), stored
        self.vocabulary = vocabulary(request.source.tokenizer, reader.config.vocab_size)

    def write(
        self, run: Run, progress: Progress, finishing: Callable[[Path], None] | None
    ) -> ExportRecord:
        """Lay out, quantise, write, measure."""
        request = self.request
        parts = list(write_parts(run, self.form, self.layers, progress))
        with atomic_file(run.output, force=run.force, inputs=run.inputs_read) as file:
            self._write(file, run, parts)
            if request.check:
                progress("checking", 0, 1)
            record = self.finished(file)
        run.finished = True
        return record

    def finished(self, file: Path) -> ExportRecord:
        """The record of a complete file; its parity is measured in llama.cpp."""
        request, form, notes = self.request, self.form, []
        parity = llama_cpp_parity(request.source, file, self.stored) if request.check else None
        if form.stored_twice:
            notes.append(f"{form.architecture} cannot tie embeddings, so they are stored twice.")
        wide = self._kept_wide(file)
        if wide:
            listed = ", ".join(sorted(wide))
            notes.append(
                f"{listed} stay in 16 bits: no {self.stored} blocks divide their row length."
            )
        return record_of(request, form.architecture, self.dtype, parity, tuple(notes))

    def _kept_wide(self, file: Path) -> set[str]:
        """Tensors that no block of the quantised format divides."""
        from gguf import GGMLQuantizationType, GGUFReader

        if self.stored not in QUANTIZED:
            return set()
        tensors = GGUFReader(file).tensors
        names = [t.name for t in tensors if t.tensor_type == GGMLQuantizationType.F16]
        return {name.split(".", 2)[-1] if name.startswith("blk.") else name for name in names}

    def _write(self, file: Path, run: Run, parts: list[str]) -> None:
        from gguf import GGMLQuantizationType, GGUFWriter

        form = self.form
        writer = GGUFWriter(file, form.architecture)
        _add(writer, GGUF_MARK.decode(), run.key)
        _add(writer, "general.type", "model")
        _add(writer, "general.name", Path(run.output).stem)
        writer.add_quantization_version(2)
        for key, value in form.metadata().items():
            _add(writer, f"{form.architecture}.{key}", value)
        _add_vocabulary(writer, self.vocabulary)
        for part in parts:
            for key, array in run.get(part, "np").items():
                name, kind = key.split("|")
                writer.add_tensor_info(
                    name,
                    array.shape,
                    array.dtype,
                    array.nbytes,
                    GGMLQuantizationType[kind],
                )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for part in parts:
            for array in run.get(part, "np").values():
                writer.write_tensor_data(array)
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: Any, words: Vocabulary) -> None:
    start = "tokenizer.ggml."
    fields: Mapping[str, Any] = {
        "model": words.model,
        "pre": words.pre,
        "tokens": list(words.tokens),
        "token_type": list(words.types),
        "merges": list(words.merges),
        "scores": list(words.scores),
        "add_bos_token": words.add_bos,
        "add_space_prefix": words.add_space_prefix,
    }
    for name, value in fields.items():
        if value != []:
            _add(writer, start + name, value)
    for name, number in (words.special or {}).items():
        _add(writer, f"{start}{name}_token_id", number)
    if words.chat_template:
        _add(writer, "tokenizer.chat_template", words.chat_template)

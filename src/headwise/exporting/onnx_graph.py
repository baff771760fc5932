"""ONNX graphs, which ONNX Runtime runs: any causal plan, each layer's cache with its own widths.

    inputs    input_ids (batch, new), attention_mask (batch, past + new),
              past_key_values.N.key and .value (batch, heads, past, width of layer N)
    outputs   logits (batch, new, vocabulary), present.N.key and .value

The graph is our own model traced by torch.export, so nothing is padded and no widths need to be
equal. A layer with heads of several widths caches them concatenated, as one head.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import DynamicCache

from headwise.artifacts import Kind
from headwise.errors import HeadwiseError
from headwise.exporting.card import write_export_card
from headwise.exporting.parity import sample_tokens
from headwise.exporting.parts import DTYPES, ExportRequest, chosen_dtype, record_of
from headwise.exporting.reading import Reader
from headwise.exporting.record import EXPORT_RECORD, ExportRecord, Parity, read_export
from headwise.planning.targets import target_of
from headwise.progress import Progress
from headwise.records import Record, read_record, write_record
from headwise.runs import Run
from headwise.source import Source

GRAPH = "model.onnx"
GRAPH_RECORD = "onnx.json"
GENAI = "genai_config.json"
LIMIT = 1e-4  # of the largest logit
_FIRST = 7  # tokens read at once before the rest is decoded one by one
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class Decoder(torch.nn.Module):
    """A causal model with its cache as plain tensors in and out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits, and keys and values of every layer in turn."""
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        found = [x for layer in out.past_key_values.layers for x in (layer.keys, layer.values)]
        return out.logits, found


class GraphRecord(Record):
    """The content of onnx.json: the cache's shape, which the caller of the graph needs.

    `cache` has the heads and the width of every layer's keys and values.
    """

    format: Literal["headwise-onnx/1"] = "headwise-onnx/1"
    cache: dict[str, tuple[int, int]]
    outputs: tuple[str, ...]


class ONNXExport:
    """An export to a folder with one graph."""

    writes: Kind = "folder"
    finished = staticmethod(read_export)

    def __init__(self, request: ExportRequest) -> None:
        for package in _PACKAGES:
            try:
                __import__(package)
            except ImportError as error:
                raise HeadwiseError(
                    f"an ONNX export needs the package {package}, which is missing; install "
                    "headwise[onnx]."
                ) from error
        answer = target_of("onnx").runs(request.source.plan)
        if not answer.yes:
            raise HeadwiseError(
                f"{request.source.name} cannot be exported to onnx: {answer.why_not}."
            )
        self.request, self.dtype = request, chosen_dtype(request, Reader(request.source))
        if self.dtype != torch.float32 and request.dtype in DTYPES:
            raise HeadwiseError("an ONNX graph is written in fp32; leave --dtype out.")
        self.dtype = torch.float32

    def write(
        self, run: Run, progress: Progress, finishing: Callable[[Path], None] | None
    ) -> ExportRecord:
        """Trace, write, measure."""
        request = self.request
        progress("exporting", 0, 1)
        model = request.source.load(device="cpu", dtype="fp32", headwise=True)
        model.set_attn_implementation("eager")  # one path for reading and for decoding
        ids = torch.tensor([sample_tokens(request.source, 32)])
        with run.finish() as folder:
            names = write_graph(model, ids, folder / GRAPH)
            request.source.copy_companions(folder)
            shapes = cache_shapes(model, ids)
            write_record(folder / GRAPH_RECORD, GraphRecord(cache=shapes, outputs=tuple(names)))
            settings = genai_settings(request.source, shapes)
            if settings is not None:
                (folder / GENAI).write_text(json.dumps(settings, indent=2) + "\n")
            parity = None
            if request.check:
                progress("checking", 0, 1)
                parity = onnx_parity(request.source, folder)
            record = record_of(request, "headwise", self.dtype, parity)
            write_record(folder / EXPORT_RECORD, record)
            write_export_card(folder, record, request.source, name=run.output.name)
            if finishing is not None:
                finishing(folder)
        return record


def write_graph(model: Any, ids: torch.Tensor, file: Path) -> list[str]:
    """Trace the model and write its graph; returns the names of its outputs."""
    past = _past(model, ids[:, :5])
    new = ids[:, 5:9]
    mask = torch.ones(1, 9, dtype=torch.long)
    # Two rows: a size of one would be taken for a constant.
    inputs = (new.repeat(2, 1), mask.repeat(2, 1), [x.repeat(2, 1, 1, 1) for x in past])
    # The least of `total` is what tracing finds it to be (the graph itself takes any): without it
    # tracing fails and is tried again by slower means.
    batch, length, seen, whole = (
        torch.export.Dim(n, min=least, max=most)
        for n, least, most in (
            ("batch", 1, 2**16),
            ("new", 1, 2**20),
            ("past", 1, 2**20),
            ("total", 4, 2**21),
        )
    )
    shapes = (
        {0: batch, 1: length},
        {0: batch, 1: whole},
        [{0: batch, 2: seen}] * len(past),
    )
    kinds = [f"{i}.{kind}" for i in range(len(past) // 2) for kind in ("key", "value")]
    outputs = ["logits", *(f"present.{kind}" for kind in kinds)]
    with torch.no_grad(), _quiet_exporter():
        torch.onnx.export(
            Decoder(model).eval(),
            inputs,
            file,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=[
                "input_ids",
                "attention_mask",
                *(f"past_key_values.{kind}" for kind in kinds),
            ],
            output_names=outputs,
            external_data=True,
            verbose=False,
        )
    return outputs


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress the exporter's warnings about deprecations and optional packages."""
    said = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.setLevel(level)


@torch.no_grad()
def _past(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    cache = model(input_ids=ids, use_cache=True).past_key_values
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def cache_shapes(model: Any, ids: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Heads and width of every layer's cached keys and values."""
    names = (f"{i}.{kind}" for i in range(10**6) for kind in ("key", "value"))
    past = _past(model, ids[:, :2])
    return {n: (x.shape[1], x.shape[3]) for n, x in zip(names, past, strict=False)}


def genai_settings(source: Source, cache: dict[str, tuple[int, int]]) -> dict[str, Any] | None:
    """The settings onnxruntime-genai reads; None if it does not support the cache's shape.

    It takes each layer's heads and width from the graph, one shape for both keys and values.
    """
    layers = len(cache) // 2
    if any(cache[f"{i}.key"] != cache[f"{i}.value"] for i in range(layers)):
        return None
    config = source.stock_config
    decoder = {
        "session_options": {"provider_options": []},
        "filename": GRAPH,
        "head_size": max(width for _, width in cache.values()),
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": max(heads for heads, _ in cache.values()),
        "num_hidden_layers": layers,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    special = {
        name: value
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if (value := getattr(config, name, None)) is not None
    }
    special.setdefault("pad_token_id", special.get("eos_token_id", 0))
    model = {
        "type": "llama",  # the plain decoder: ids, mask and cache in, logits and cache out
        "vocab_size": config.vocab_size,
        "context_length": source.plan.shape.context,
        **special,
        "decoder": decoder,
    }
    search = {"max_length": source.plan.shape.context, "past_present_share_buffer": False}
    return {"model": model, "search": search}


class Session:
    """A graph in ONNX Runtime, with its cache."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(folder / GRAPH), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [x.name for x in self._session.get_inputs()]
        cached = read_record(folder / GRAPH_RECORD, GraphRecord).cache
        self._empty = [np.zeros((1, h, 0, w), np.float32) for h, w in cached.values()]
        self.past: list[np.ndarray] = list(self._empty)

    def reset(self) -> None:
        """Clear the cache."""
        self.past = list(self._empty)

    def read(self, ids: list[int]) -> np.ndarray:
        """The logits after each of the next tokens."""
        seen = self.past[0].shape[2]
        given = [
            np.array([ids], np.int64),
            np.ones((1, seen + len(ids)), np.int64),
            *self.past,
        ]
        found = self._session.run(None, dict(zip(self._inputs, given, strict=True)))
        self.past = found[1:]
        return found[0][0]


def onnx_parity(source: Source, folder: Path) -> Parity:
    """The graph in ONNX Runtime against our model, in one pass and token by token."""
    ids = sample_tokens(source)
    model = source.load(device="cpu", dtype="fp32")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    del model
    session = Session(folder)
    whole = session.read(ids)
    cached = sum(x.size for x in session.past) // len(ids)
    session.reset()
    steps = [session.read(ids[:_FIRST]), *(session.read([token]) for token in ids[_FIRST:])]
    decoded = np.concatenate(steps)
    error = max(float(np.abs(found - expected).max()) for found in (whole, decoded))
    same = (whole.argmax(-1) == expected.argmax(-1)) & (decoded.argmax(-1) == expected.argmax(-1))
    return Parity(
        engine="ONNX Runtime",
        measure="logits",
        positions=len(ids),
        error=error / float(np.abs(expected).max()),
        limit=LIMIT,
        top_agreement=float(same.mean()),
        cached_numbers=cached,
    )

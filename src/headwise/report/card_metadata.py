"""The YAML front matter of a model card, as the Hugging Face Hub reads it.

Fields: https://huggingface.co/docs/hub/model-cards. What is not known is left out: a language, a
licence that the source's card does not state, a base model that has no name on the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# The Hub knows adapter, merge, quantized and finetune; a model of its own with changed weights is
# the last of them.
RELATION = "finetune"
_HUB_NAMES = {
    "builtin:smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "builtin:minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
_LICENCE = ("license", "license_name", "license_link")
_OURS = "headwise"  # the tag by which a card of ours is known again


def front_matter(
    record: Mapping[str, Any],
    proof: Mapping[str, Any] | None,
    *,
    base: str | None,
    licence: Mapping[str, Any],
    name: str,
    task: str,
) -> str:
    """The block between the two `---`, these included."""
    from huggingface_hub import ModelCardData

    results = list(_results(proof, task)) if proof else []
    fields: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": RELATION if base else None,
        "datasets": _datasets(record) or None,
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": [_OURS, "compressed", "low-rank", "attention"],
        **licence,
    }
    if results:
        fields |= {"model_name": name, "eval_results": results}
    written = ModelCardData(**{k: v for k, v in fields.items() if v is not None}).to_yaml()
    return f"---\n{written}\n---\n"


def hub_name(model: str) -> str | None:
    """The Hub's name of a source; None for folders and files, whose paths are nobody's business."""
    if model in _HUB_NAMES:
        return _HUB_NAMES[model]
    owner, _, rest = model.partition("/")
    local = Path(model).expanduser().exists() or model.endswith(".gguf")
    named = owner.strip(".~") and rest and "/" not in rest and ":" not in model
    return model if named and not local else None


def licence_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says about its model's licence."""
    return {key: metadata[key] for key in _LICENCE if metadata.get(key)}


def base_of(metadata: Mapping[str, Any], model: str) -> str | None:
    """The base model: the one that a card of ours already names, else `model` if it is the Hub's.

    A path may look like a Hub name from another folder, so it is judged once, at the cut.
    """
    if _OURS in (metadata.get("tags") or ()):
        return metadata.get("base_model")
    return hub_name(model)


def metadata_in(card: Path) -> dict[str, Any]:
    """The front matter of a README.md; empty if there is none, or none that can be read."""
    import yaml  # type: ignore[import-untyped]
    from huggingface_hub import metadata_load

    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def shown_source(source: str) -> str:
    """A source or model by its name: Hub and built-in names whole, paths by their last part."""
    if source.startswith(("builtin:", "hub:")):
        return source
    return source if hub_name(source) else Path(source).name


def _datasets(record: Mapping[str, Any]) -> list[str]:
    """Hub data sets among the texts that the model was made with."""
    source = str((record.get("calibration") or {}).get("source", ""))
    return [source.split(":")[1]] if source.startswith("hub:") else []


def _results(proof: Mapping[str, Any], task: str) -> Iterator[Any]:
    """Every measured figure of quality as the Hub's evaluation result."""
    from huggingface_hub import EvalResult

    metrics = {
        "perplexity": ("perplexity", "Perplexity"),
        "ratio": ("perplexity", "Perplexity ÷ that of the source model"),
        "top_agreement": ("accuracy", "Top token agrees with the source model"),
        "cosine": ("cosine_similarity", "Mean cosine with the source model's embeddings"),
    }
    for text in proof["texts"]:
        images = "images" in text
        if images:
            metrics["top_agreement"] = ("accuracy", "Top class agrees with the source model")
        for key, (kind, called) in metrics.items():
            if text.get(key) is not None:
                yield EvalResult(
                    task_type=task,
                    dataset_type="image" if images else "text",
                    dataset_name=shown_source(text["source"]),
                    metric_type=kind,
                    metric_name=called,
                    metric_value=float(f"{text[key]:.6g}"),
                )

"""Loading a model from files: safetensors only, all weights present and finite.

A weight that a checkpoint lacks would silently be initialised at random. So every missing,
unexpected or misshapen weight is an error that names it, except for

    missing   a weight tied to another; the pooler of an encoder (it may never have been trained)
    extra     buffers of older files (masks, rotary frequencies, position numbers); a pooler;
              the heads of other tasks (the classes of an encoder that is loaded bare)

Older files use older names: without the base model's prefix (GPT-2 on the hub), with older names of
norms (BERT) or of whole modules (ViT). transformers translates them when it loads a model;
`stored_names` uses the same rules for tensors that are read one at a time.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headwise.errors import HeadwiseError, reason_of
from headwise.models.backbones_headwise import FAMILIES
from headwise.models.checkpoint import Checkpoint
from headwise.models.shapes import backbone_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BUFFERS = ("inv_freq", "masked_bias", "position_ids")
_HEADS = frozenset(  # the top-level modules in which the families keep their heads
    {
        "classifier",
        "cls",
        "lm_head",
        "multiple_choice_head",
        "pre_classifier",
        "qa_outputs",
        "score",
        "vocab_layer_norm",
        "vocab_projector",
        "vocab_transform",
    }
)
_MOST_NAMED = 3
_WHAT = {
    "AutoModel": "an encoder",
    "AutoModelForCausalLM": "a causal language model",
    "AutoModelForImageClassification": "an image classifier",
    "AutoModelForMaskedLM": "a masked language model",
}

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, shape in the file, in the model


def load_weights(
    auto: Any,
    folder: Path,
    config: Any,
    *,
    name: str,
    dtype: torch.dtype | str,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a folder's model by an Auto class, complete and finite; `name` is for errors.

    The folder's `Checkpoint` must have been opened: that refuses pickles, broken files and an index
    that leads elsewhere.
    """
    try:
        # A pooler that the checkpoint lacks is drawn: alike in every run.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    # transformers raises many kinds here: OSError, ValueError, its own and safetensors'.
    except Exception as error:
        raise HeadwiseError(
            f"{name} could not be loaded as {_WHAT.get(auto.__name__, 'a model')} "
            f"({reason_of(error)}); give a Hugging Face folder with config.json and safetensors "
            "weights."
        ) from error
    refuse_incomplete(
        name,
        model,
        missing=report["missing_keys"],
        extra=report["unexpected_keys"],
        mismatched=report["mismatched_keys"],
    )
    refuse_not_finite(name, model)
    return model  # type: ignore[no-any-return]


def stored_names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """The checkpoint's name of each model weight that it contains, by the model's name."""
    if checkpoint.config.get("quantization_config"):
        raise HeadwiseError(
            f"{checkpoint.name} holds quantised weights; dequantise it and save it again first."
        )
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    wanted = model.state_dict()
    found: dict[str, str] = {}
    for name in checkpoint.names:
        own, converter = rename_source_key(
            name, renamings, converters, model.base_model_prefix, wanted
        )
        if converter is not None:
            raise HeadwiseError(
                f"{checkpoint.name} stores {name} in a layout that is not read; load the model "
                "with transformers and save_pretrained() it first."
            )
        # GPT-NeoX is saved with its older name of the output embeddings.
        own = own if own in wanted else own.replace("embed_out.", "lm_head.")
        if own in wanted:
            found[own] = name
    return found


def complete_names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """As `stored_names`, for a checkpoint that has exactly the weights the model needs."""
    found, wanted = stored_names(checkpoint, model), model.state_dict()
    tied: set[str] = set()  # that need not be stored, because their partner is
    for pair in model.all_tied_weights_keys.items():
        tied |= set(pair) if any(name in found for name in pair) else set()
    for name in found.values():
        if not checkpoint.stored[name].dtype.is_floating_point:
            kind = str(checkpoint.stored[name].dtype).removeprefix("torch.")
            raise HeadwiseError(
                f"{checkpoint.name} has {name} in {kind}, but weights must be floating-point "
                "numbers; dequantise it and save it again first."
            )
    used = set(found.values())
    shapes = {n: (checkpoint.stored[found[n]].shape, tuple(wanted[n].shape)) for n in found}
    refuse_incomplete(
        checkpoint.name,
        model,
        missing=[n for n in wanted if n not in found and n not in tied],
        extra=[name for name in checkpoint.names if name not in used],
        mismatched=[(n, stored, own) for n, (stored, own) in shapes.items() if stored != own],
    )
    return found


def refuse_incomplete(
    name: str,
    model: Any,
    *,
    missing: Iterable[str],
    extra: Iterable[str],
    mismatched: Iterable[Mismatch] = (),
) -> None:
    """Raise if the checkpoint `name` does not have just the weights that `model` needs."""
    wrong_shapes = sorted(mismatched)
    if wrong_shapes:
        tensor, stored, wanted = wrong_shapes[0]
        raise HeadwiseError(
            f"{name} has {_plain(tensor)} of shape {tuple(stored)}, but its config asks for "
            f"{tuple(wanted)}; download it again, or fix its config.json."
        )
    lacking = sorted(n for n in missing if not _may_be_missing(n, model))
    if lacking:
        raise HeadwiseError(
            f"{name} lacks {_listed(lacking)}, which the model needs; download it again."
        )
    unknown = sorted(n for n in extra if not _may_be_extra(n, model))
    if unknown:
        raise HeadwiseError(
            f"{name} holds {_listed(unknown)}, which a model of its config does not have; download "
            "it again, or fix its config.json."
        )


def refuse_not_finite(name: str, model: Any) -> None:
    """Raise if a weight holds NaN or infinity; one sum per tensor finds both."""
    for tensor, p in parameters(model):
        exact = torch.float32 if p.device.type == "mps" else torch.float64
        if not math.isfinite(float(p.detach().sum(dtype=exact))):
            raise HeadwiseError(
                f"the weights of {_plain(tensor)} in {name} must be finite, got NaN or infinite "
                "numbers; the checkpoint is broken: download it again."
            )


def parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter with its numbers, those that accelerate keeps elsewhere too."""
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    for owner, module in model.named_modules():
        with align_module_device(module):
            for name, p in module.named_parameters(recurse=False):
                yield f"{owner}.{name}".lstrip("."), p


def _may_be_missing(name: str, model: Any) -> bool:
    family = FAMILIES.get(backbone_of(model.config).model_type)
    return family is not None and not family.causal and "pooler" in name.split(".")


def _may_be_extra(name: str, model: Any) -> bool:
    parts = _plain(name).split(".")
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return (
        parts[0] in _HEADS
        or parts[-1] in _BUFFERS
        or "pooler" in parts
        or any(re.search(pattern, name) for pattern in ignored)
    )


def _plain(name: str) -> str:
    return name.removeprefix("backbone.")


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(_plain, names[:_MOST_NAMED]))
    left = len(names) - _MOST_NAMED
    return f"{shown} and {left} more tensors" if left > 0 else shown

"""Which tensor of a checkpoint is which weight of the stock model.

Files keep the names of the day they were written: without the base model's prefix (GPT-2 on the
hub), with older names of norms (BERT) or of whole modules (ViT). transformers translates them when
it loads a model; this asks its own rules, so a tensor read alone lands where it would in the whole.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headwise.errors import HeadwiseError, reason_of
from headwise.nn.checkpoint import Checkpoint


def config_of(checkpoint: Checkpoint) -> Any:
    """The config object of a checkpoint; code that lies in the folder is never run."""
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    # transformers raises many kinds here: unknown model types, bad values, its own checks.
    except Exception as error:
        raise HeadwiseError(
            f"{checkpoint.folder} has a config.json that transformers cannot read without running "
            f"code of that folder ({reason_of(error)}); give a model it knows."
        ) from error


def stock_names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """The checkpoint's name of each of the model's weights that it holds, by the model's name."""
    if checkpoint.config.get("quantization_config"):
        raise HeadwiseError(
            f"{checkpoint.folder} holds quantised weights; dequantise it and save it again first."
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
                f"{checkpoint.folder} stores {name} in a layout of its own; load the model with "
                "transformers and save_pretrained() it first."
            )
        # GPT-NeoX is saved with its older name of the output embeddings.
        own = own if own in wanted else own.replace("embed_out.", "lm_head.")
        if own in wanted:
            found[own] = name
    return found

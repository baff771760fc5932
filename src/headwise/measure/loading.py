"""Any model by folder, hub name, GGUF file or builtin name, dense or headwise, ready to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from headwise.data.tokens import load_tokenizer, refuse_absent_path
from headwise.devices import Dtype, chosen_device
from headwise.errors import HeadwiseError
from headwise.nn.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str,
    *,
    kind: Literal["causal", "encoder"] = "causal",
    device: str = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, and its tokenizer; an encoder comes without its head.

    `auto` takes the best device; numbers in fp32 on a CPU, elsewhere as the checkpoint has them.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    auto, what = {
        "causal": (AutoModelForCausalLM, "a causal language model"),
        "encoder": (AutoModel, "an encoder"),
    }[kind]
    refuse_absent_path(name, "a Hugging Face folder with config.json and weights")
    place = chosen_device(device)
    number = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(
        dtype, torch.float32 if place == "cpu" else "auto"
    )
    folder = model_folder(name)
    words = load_tokenizer(tokenizer or folder, trust_remote_code=trust_remote_code)
    try:
        model: Any = auto.from_pretrained(
            folder, dtype=number, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    # transformers raises many kinds here: OSError, ValueError, its own and safetensors'.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise HeadwiseError(
            f"{name} could not be loaded as {what} ({type(error).__name__}: {reason}); give a "
            "Hugging Face folder with config.json and safetensors weights."
        ) from error
    return model.to(place).eval(), words


def model_context(model: PreTrainedModel) -> int | None:
    """The longest input the model's configuration speaks of, if it does."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None

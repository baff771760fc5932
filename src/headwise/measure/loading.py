"""Any model by folder, hub name, GGUF file or builtin name, dense or headwise, ready to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.data.tokens import load_tokenizer, refuse_absent_path
from headwise.devices import Dtype, chosen_device
from headwise.errors import HeadwiseError, reason_of
from headwise.nn.sources import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WHAT = {
    "causal-lm": "a causal language model",
    "bare": "an encoder",
    "image-classification": "an image classifier",
}


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The causal language model in evaluation mode, and its tokenizer."""
    refuse_absent_path(name, "a Hugging Face folder with config.json and weights")
    words = load_tokenizer(tokenizer or model_folder(name), trust_remote_code=trust_remote_code)
    model = model_for(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    return model, words


def model_for(
    name: str,
    task: str = "causal-lm",
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of a task (`headwise.nn.shapes.TASKS`) in evaluation mode.

    `auto` takes the best device; numbers in fp32 on a CPU, elsewhere as the checkpoint has them.
    """
    import torch

    from headwise.nn.shapes import TASKS

    auto, what = TASKS[task]._task, _WHAT[task]
    place = chosen_device(device)
    number = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(
        dtype, torch.float32 if place == "cpu" else "auto"
    )
    folder = model_folder(name)
    try:
        model: Any = auto.from_pretrained(
            folder, dtype=number, trust_remote_code=trust_remote_code, use_safetensors=True
        )
    # transformers raises many kinds here: OSError, ValueError, its own and safetensors'.
    except Exception as error:
        raise HeadwiseError(
            f"{name} could not be loaded as {what} ({reason_of(error)}); give a "
            "Hugging Face folder with config.json and safetensors weights."
        ) from error
    return model.to(place).eval()  # type: ignore[no-any-return]


def model_context(model: PreTrainedModel) -> int | None:
    """The longest input the model's configuration speaks of, if it does."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None

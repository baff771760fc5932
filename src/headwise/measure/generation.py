"""What a model writes after a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.data.tokens import refuse_unknown_tokens
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import model_context, start_token

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Continuation:
    """The new text and how many tokens it took."""

    text: str
    tokens: int


def continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Continuation:
    """Draw a continuation; temperature 0 takes the likeliest token. Stops at the end of text."""
    import torch
    from transformers import GenerationConfig

    ids = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
    start = start_token(tokenizer)
    ids = ids if start is None else [start, *ids]
    if not ids:
        raise HeadwiseError("the prompt is empty and the tokenizer has no start token; write one.")
    embeddings: Any = model.get_input_embeddings()
    refuse_unknown_tokens(np.asarray(ids), embeddings.weight.size(0))
    context = model_context(model)
    if context is not None and len(ids) + max_new_tokens > context:
        raise HeadwiseError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones must fit the model's "
            f"context of {context}; shorten the prompt or lower --max-new-tokens."
        )
    drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    inputs = torch.tensor([ids], device=model.device)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        if not torch.isfinite(model(input_ids=inputs, use_cache=False).logits).all():
            raise HeadwiseError(
                "the model's predictions are not numbers (NaN or infinite) for this prompt; its "
                "weights are broken or overflow in this number format."
            )
        # A config of our own: what the options say, whatever generation_config.json adds.
        how = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            **(drawing if temperature > 0 else {"do_sample": False}),
        )
        output: Tensor = model.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), generation_config=how
        )
    new = output[0, len(ids) :]
    return Continuation(str(tokenizer.decode(new, skip_special_tokens=True)), len(new))

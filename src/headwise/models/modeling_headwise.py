"""A stock Transformer whose layers follow a plan.

    HeadwiseForCausalLM ── backbone: LlamaForCausalLM (or GPT-2, OPT, …)
                             ├─ every attention module: HeadwiseAttention
                             └─ every MLP: the stock one, as wide as planned

The wrapper builds the stock model of `config.backbone`, puts the planned layers in before any
weight is loaded, and passes calls on. Weight names are the stock ones after `backbone.`, so a
checkpoint saved for one task loads for another, as with stock models.
This file travels with checkpoints: it needs torch and transformers only.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from .attention_headwise import HeadwiseAttention
from .backbones_headwise import apply_layers, family_of
from .configuration_headwise import HeadwiseConfig


class HeadwisePreTrainedModel(PreTrainedModel):
    """What all tasks share; a task is the Auto class that knows its stock model."""

    config_class = HeadwiseConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = False
    _supports_attention_backend = True
    _task: Any = AutoModel
    backbone: Any

    def __init__(self, config: HeadwiseConfig) -> None:
        super().__init__(config)
        family_of(config.backbone.model_type)
        layers = config.layers()
        stock_class = self._task._model_mapping[type(config.backbone)]
        # What is stock is made only to be replaced: nothing is initialised yet.
        with no_init_weights():
            backbone = stock_class(config.backbone)
            apply_layers(backbone, layers)
        self.backbone = backbone if self._task is not AutoModel else Body(backbone)
        self.main_input_name = backbone.main_input_name
        if self.can_generate():  # special tokens are the backbone's
            self.generation_config = backbone.generation_config
        self.post_init()

    def init_weights(self) -> None:
        """Fill new weights as the stock model would, its depth scaling included."""
        super().init_weights()
        if family_of(self.config.backbone.model_type).depth_scaled_output:
            factor = (2 * self.config.num_hidden_layers) ** -0.5
            with torch.no_grad():
                for attention in self.attentions():
                    if attention.classes:
                        attention.o_proj.weight.mul_(factor)

    def attentions(self) -> list[HeadwiseAttention]:
        """The planned attention modules, first layer first."""
        return [m for m in self.backbone.modules() if isinstance(m, HeadwiseAttention)]

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the loss can be normalised over accumulated batches, as in the stock model."""
        parameters = inspect.signature(self.backbone.forward).parameters.values()
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def get_input_embeddings(self) -> nn.Module:
        """The stock model's input embeddings."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the stock model's input embeddings."""
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The stock model's output embeddings, if the task has them."""
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the stock model's output embeddings."""
        self.backbone.set_output_embeddings(value)

    def _passed_on(self, **arguments: Any) -> Any:
        """The stock model's answer to the arguments that were given."""
        given = {name: value for name, value in arguments.items() if value is not None}
        wanted = given.get("output_attentions", self.config.output_attentions)
        return_dict = given.pop("return_dict", self.config.return_dict)
        if not wanted:
            outputs = self.backbone(**given, return_dict=True)
        else:
            with self._recorded_attentions() as weights:
                outputs = self.backbone(**given, return_dict=True)
            outputs["attentions"] = tuple(weights)
        return outputs if return_dict else outputs.to_tuple()

    @contextmanager
    def _recorded_attentions(self) -> Iterator[list[torch.Tensor]]:
        # The stock recorder looks for the stock attention class, which is gone.
        weights: list[torch.Tensor] = []

        def record(module: nn.Module, args: Any, output: tuple[Any, Any]) -> None:
            if output[1] is not None:
                weights.append(output[1])

        hooks = [attention.register_forward_hook(record) for attention in self.attentions()]
        try:
            yield weights
        finally:
            for hook in hooks:
                hook.remove()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save weights, config and the code that loads them, for every task at once."""
        self.config.auto_map = auto_map()
        super().save_pretrained(save_directory, *args, **kwargs)


class Body(nn.Module):
    """A bare stock model under the name it has inside its task models, so that weights match."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.name = model.base_model_prefix
        setattr(self, self.name, model)

    @property
    def base_model(self) -> PreTrainedModel:
        """The stock model."""
        return getattr(self, self.name)

    @property
    def config(self) -> Any:
        """The stock model's config."""
        return self.base_model.config

    def get_input_embeddings(self) -> nn.Module:
        """The stock model's input embeddings."""
        return self.base_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the stock model's input embeddings."""
        self.base_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> None:
        """A bare model has none."""
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stock model's answer."""
        return self.base_model(*args, **kwargs)


class HeadwiseModel(HeadwisePreTrainedModel):
    """The bare model: hidden states."""

    _auto_class = "AutoModel"
    # Weights are called the same in all tasks, so none is to be added or taken away (vLLM would).
    base_model_prefix = "model"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock model's."""
        return self._passed_on(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            pixel_values=pixel_values,
            use_cache=use_cache,
            **kwargs,
        )


class HeadwiseForCausalLM(HeadwisePreTrainedModel, GenerationMixin):
    """Next-token prediction and generation."""

    _task: Any = AutoModelForCausalLM
    _auto_class = "AutoModelForCausalLM"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As the stock model's."""
        return self._passed_on(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """As the stock model's; generation looks for `inputs_embeds` among the names."""
        return self.backbone.prepare_inputs_for_generation(
            *args, inputs_embeds=inputs_embeds, **kwargs
        )


class HeadwiseForMaskedLM(HeadwisePreTrainedModel):
    """Prediction of masked tokens."""

    _task: Any = AutoModelForMaskedLM
    _auto_class = "AutoModelForMaskedLM"

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock model's."""
        return self._passed_on(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            **kwargs,
        )


class HeadwiseForSequenceClassification(HeadwiseForMaskedLM):
    """One label per sequence."""

    _task: Any = AutoModelForSequenceClassification
    _auto_class = "AutoModelForSequenceClassification"


class HeadwiseForImageClassification(HeadwisePreTrainedModel):
    """One label per image."""

    _task: Any = AutoModelForImageClassification
    _auto_class = "AutoModelForImageClassification"
    main_input_name = "pixel_values"

    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock model's."""
        return self._passed_on(pixel_values=pixel_values, labels=labels, **kwargs)


TASK_CLASSES: tuple[type[HeadwisePreTrainedModel], ...] = (
    HeadwiseModel,
    HeadwiseForCausalLM,
    HeadwiseForMaskedLM,
    HeadwiseForSequenceClassification,
    HeadwiseForImageClassification,
)


def auto_map() -> dict[str, str]:
    """Which class of the files beside a checkpoint each Auto class finds."""
    return {
        "AutoConfig": "configuration_headwise.HeadwiseConfig",
        **{str(c._auto_class): f"modeling_headwise.{c.__name__}" for c in TASK_CLASSES},
    }

"""A cut model and the one it was cut from, loaded alike, and what both of them read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headwise.data.images import Images
from headwise.data.pixels import ImageReader
from headwise.data.text import Text
from headwise.devices import Dtype
from headwise.errors import HeadwiseError
from headwise.measure.loading import model_for
from headwise.measure.size import plan_in
from headwise.nn.checkpoint import Checkpoint
from headwise.nn.reading import load_reader, refuse_other_kind
from headwise.nn.shapes import checkpoint_task
from headwise.nn.stock_names import config_of

if TYPE_CHECKING:
    from headwise.nn.reading import Reader

_KINDS = {"causal": "a causal model", "encoder": "an encoder", "image": "an image model"}


class Loading(Protocol):
    """Where the models run, and with what numbers."""

    @property
    def tokenizer(self) -> str | None:
        """A tokenizer other than the models' own."""

    @property
    def device(self) -> str:
        """auto, cpu, cuda or mps."""

    @property
    def dtype(self) -> Dtype:
        """auto, fp32 or bf16."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether code found in the folders may run."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The model and its source, loaded alike."""

    model: Any
    reference: Any
    reader: Any  # the tokenizer, or the image reader
    kind: str  # causal, encoder or image
    context: int  # of an image: its tokens

    @property
    def causal(self) -> bool:
        """Whether the models write text."""
        return self.kind == "causal"


def loaded_pair(
    folders: tuple[Path, Path],
    files: tuple[Checkpoint, Checkpoint],
    sources: Sequence[Text | Images],
    loading: Loading,
) -> Pair:
    """Both models with what they have in common; `sources` must be what they read."""
    trust = loading.trust_remote_code
    plans = [plan_in(one) for one in files]
    readers = [
        load_reader(str(folder), loading.tokenizer, trust_remote_code=trust) for folder in folders
    ]
    kind, other = (
        _kind(reader, causal=plan.shape.causal) for reader, plan in zip(readers, plans, strict=True)
    )
    if kind != other:
        raise HeadwiseError(
            f"{_KINDS[kind]} and {_KINDS[other]} cannot be compared; give the model this one was "
            "made from."
        )
    for source in sources:
        refuse_other_kind(readers[0], source)
    _refuse_other_reader(*readers)
    # A head that only one of the two has cannot be compared.
    tasks = {checkpoint_task(config_of(one)) for one in files}
    task = tasks.pop() if len(tasks) == 1 else "bare"
    model, reference = (
        model_for(
            str(folder),
            task,
            device=loading.device,
            dtype=loading.dtype,
            trust_remote_code=trust,
        )
        for folder in folders
    )
    return Pair(model, reference, readers[1], kind, plans[1].shape.context)


def _kind(reader: Reader, *, causal: bool) -> str:
    if isinstance(reader, ImageReader):
        return "image"
    return "causal" if causal else "encoder"


def _refuse_other_reader(own: Reader, reference: Reader) -> None:
    """Raise unless both models can be given the same inputs."""
    if isinstance(own, ImageReader) or isinstance(reference, ImageReader):
        assert isinstance(own, ImageReader)
        assert isinstance(reference, ImageReader)
        if own.shape != reference.shape:
            raise HeadwiseError(
                f"both models must read images of one size, got {own.shape} and "
                f"{reference.shape}; give the model this one was made from."
            )
    elif own.get_vocab() != reference.get_vocab():
        raise HeadwiseError(
            "both models must have one tokenizer, but theirs differ; give the model this one was "
            "made from."
        )

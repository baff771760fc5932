"""A profile on disk, and its reader, which needs no torch.

    PROFILE/
      profile.json           what was measured, on what, the dense plan, the list of tensors
      profile.safetensors    float32, per layer (G head groups, H query heads, S sequences):
        layers.3.vo_encode            G × vo × vo     z·encode[:, i] is coordinate i, white
        layers.3.vo_energy            G × vo          mean squared output of a coordinate
        layers.3.vo_sensitivity       G × vo          half of it: predicted rise of the loss
        layers.3.vo_gradients         S × G × vo      ∂L_s/∂gate / √n_s of each sequence
        layers.3.plane_…              planes instead of vo: energy, sensitivity, gradients
        layers.3.free_encode_q, …     position-free query-key directions, in the same way
        layers.3.ffn_sensitivity      I               of the neurons of the MLP; ffn_energy too, and
        layers.3.ffn_mean             I               their means per token
        layers.3.z_moment, q_, k_     second moments per token, the group's query heads added
        layers.3.z_mean, q_, k_       means per token of every query head (k: of every group)
        layers.3.entropy, jacobian_norm, score_spread     lengths × H
        ids                           S × length      int32: the sequences themselves; of images
        pixel_values                  S × channels × height × width      instead, float16

`decode` is the inverse of `encode`, computed in double precision on request, so all directions
together are the identity to the last digits, whatever was rounded before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import SerializerFunctionWrapHandler, model_serializer
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headwise.artifacts import sha256
from headwise.data.images import PIXELS
from headwise.errors import HeadwiseError
from headwise.inputs import check_file
from headwise.models.record import CalibrationRecord
from headwise.plan import Count, HeadSpec, LossUnit, Plan
from headwise.records import Frozen, Record, read_record
from headwise.runs import partial_of

PROFILE_FORMAT: Literal["headwise-profile/1"] = "headwise-profile/1"
RECORD, TENSORS = "profile.json", "profile.safetensors"


class TextRecord(Frozen):
    """The text, or the images, that a profile was measured on."""

    source: str
    sha256: str
    parts_sha256: tuple[str, ...] | None = None  # of each text of a mixture

    @model_serializer(mode="wrap")
    def _without_parts_of_one(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A profile of one text is written as it always was."""
        written: dict[str, Any] = write(self)
        return {name: value for name, value in written.items() if value is not None}


class ProfileRecord(Record):
    """The content of profile.json."""

    format: Literal["headwise-profile/1"] = PROFILE_FORMAT
    key: str = ""  # of the run that made it
    model: str
    weights_sha256: str
    dtype: str
    device: str
    objective: Literal["next-token", "masked-token", "label", "embedding"]
    text: TextRecord
    settings: dict[str, int]
    sequences: Count
    tokens: Count  # that the moments are means over
    loss: float | None  # the dense model's mean loss per token; an embedding has none
    lengths: tuple[Count, ...]
    qk_whole: bool  # queries and keys are left alone
    fixed_groups: bool | None = None  # no head group may go; None: not known
    centred: bool  # z is cut around its mean, which the output bias takes up
    notes: tuple[str, ...] = ()
    versions: dict[str, str]
    plan: dict[str, Any]  # dense, every scale and plane explicit
    tensors: dict[str, tuple[int, ...]]
    tensors_sha256: str

    @property
    def of_images(self) -> bool:
        """Whether it was measured on images, each of which is a sequence."""
        return PIXELS in self.tensors

    @property
    def calibration(self) -> CalibrationRecord:
        """The calibration entry in the record of a model made with this profile."""
        return CalibrationRecord(
            source=self.text.source,
            sha256=self.text.sha256,
            parts_sha256=self.text.parts_sha256,
            tokens=self.tokens,
            images=self.sequences if self.of_images else None,
        )

    @property
    def recoverable(self) -> bool:
        """Whether a cut of the model can be trained: it predicts the next token."""
        return self.objective == "next-token"

    @property
    def unit(self) -> LossUnit:
        """The unit of the loss and of its predicted rise."""
        units: dict[str, LossUnit] = {
            "label": "nats per image",
            "embedding": "1 − cosine of embeddings",
        }
        return units.get(self.objective, "nats per token")


@dataclass(frozen=True)
class Profile:
    """A profile that was read and checked."""

    record: ProfileRecord
    tensors: dict[str, np.ndarray]
    sha256: str  # of profile.json, which holds that of the tensors
    source: Any = field(default=None, compare=False, repr=False)  # a live model, if it was one

    @classmethod
    def read(cls, folder: Path) -> Profile:
        """The profile in a folder."""
        record = _record(folder)
        path = folder / TENSORS
        numbers = sum(math.prod(shape) for shape in record.tensors.values())
        check_file(path, most=8 * numbers + 2**27, advice="make the profile again")
        try:
            if sha256(path) != record.tensors_sha256:
                raise HeadwiseError(
                    f"{path} does not match {RECORD} (it is truncated, changed or from another "
                    "profile); make the profile again."
                )
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise HeadwiseError(
                f"{path} cannot be read ({reason}); make the profile again."
            ) from error
        found = cls(record, tensors, sha256(folder / RECORD))
        _check_sizes(found, folder / RECORD)
        return found

    @cached_property
    def plan(self) -> Plan:
        """The dense plan that was profiled."""
        return Plan.from_dict(self.record.plan, "the profile's plan")

    @property
    def ids(self) -> Int[np.ndarray, "sequences length"]:
        """The token sequences that were read, for later fitting to the same text."""
        return self.tensors["ids"].astype(np.int64)

    @property
    def inputs(self) -> tuple[str, np.ndarray]:
        """The model's inputs: input_ids or pixel_values."""
        if self.record.of_images:
            return PIXELS, self.tensors[PIXELS].astype(np.float32)
        return "input_ids", self.ids

    def get(self, layer: int, name: str) -> np.ndarray:
        """One tensor of one layer, in double precision."""
        return self.tensors[f"layers.{layer}.{name}"].astype(np.float64)

    def has(self, layer: int, name: str) -> bool:
        """Whether a layer has this tensor."""
        return f"layers.{layer}.{name}" in self.tensors

    def value_directions(
        self, layer: int, head: int
    ) -> tuple[Float[np.ndarray, "vo vo"], Float[np.ndarray, "vo vo"]]:
        """encode and decode of one head group's values: z·encode·decode = z."""
        encode = self.get(layer, "vo_encode")[head]
        return encode, np.linalg.inv(encode)

    def score_directions(
        self, layer: int, head: int
    ) -> tuple[Float[np.ndarray, "free free"], Float[np.ndarray, "free free"]]:
        """encode_q and encode_k of the position-free columns: encode_q·encode_kᵀ = I."""
        encode = self.get(layer, "free_encode_q")[head]
        return encode, np.linalg.inv(encode).T


def _check_sizes(profile: Profile, path: Path) -> None:
    """Refuse a plan that has other heads than were measured."""
    Plan.from_dict(profile.record.plan, f"the plan in {path}")
    for i, layer in enumerate(profile.plan.layers):
        norms = profile.tensors.get(f"layers.{i}.jacobian_norm")
        if norms is not None and len(norms) != len(profile.record.lengths):
            raise HeadwiseError(
                f"{path} is not valid: lengths must be the {len(norms)} that were measured, got "
                f"{len(profile.record.lengths)}; make the profile again."
            )
        neurons = profile.tensors.get(f"layers.{i}.ffn_sensitivity")
        if neurons is not None and neurons.shape != (profile.plan.ffn_dims[i],):
            raise HeadwiseError(
                f"{path} is not valid: the plan's layer {i} has {profile.plan.ffn_dims[i]} "
                f"neurons, but {neurons.shape} were measured; make the profile again."
            )
        for part in ("vo", "plane", "free"):
            wanted = {(len(layer.heads), _directions(head, part)) for head in layer.heads}
            for measure in ("sensitivity", "energy"):
                name = f"layers.{i}.{part}_{measure}"
                found = profile.tensors.get(name)
                if found is not None and wanted != {found.shape}:
                    raise HeadwiseError(
                        f"{path} is not valid: the plan's layer {i} has {sorted(wanted)} {part} "
                        f"directions, but {found.shape} were measured; make the profile again."
                    )


def _directions(head: HeadSpec, part: str) -> int:
    n_planes = len(head.rotary_planes or ())
    return {"vo": head.vo_dim, "plane": n_planes, "free": head.qk_dim - 2 * n_planes}[part]


def _record(folder: Path) -> ProfileRecord:
    path = folder / RECORD
    if not path.exists():
        unfinished = partial_of(folder).exists()
        advice = (
            "run the same command again to finish it" if unfinished else "give a profile folder"
        )
        raise HeadwiseError(f"{folder} is not a profile (it has no {RECORD}); {advice}.")
    return read_record(path, ProfileRecord, advice="make the profile again")

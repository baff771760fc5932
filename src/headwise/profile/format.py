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
        layers.3.z_moment, q_, k_     second moments per token, the group's query heads added
        layers.3.z_mean, q_, k_       means per token of every query head (k: of every group)
        layers.3.entropy, jacobian_norm, score_spread     lengths × H
        ids                           S × length      int32: the sequences themselves; of images
        pixel_values                  S × channels × height × width      instead, float16

`decode` is the inverse of `encode` and is made in double precision when it is asked for, so all
directions together are the identity to the last digits, whatever was rounded on the way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from headwise.artifacts import sha256
from headwise.data.images import PIXELS
from headwise.errors import HeadwiseError
from headwise.plan import Count, Plan
from headwise.plan_format import Frozen

PROFILE_FORMAT: Literal["headwise-profile/1"] = "headwise-profile/1"
RECORD, TENSORS = "profile.json", "profile.safetensors"


class TextRecord(Frozen):
    """The text, or the images, that a profile was measured on."""

    source: str
    sha256: str


class ProfileRecord(Frozen):
    """The content of profile.json."""

    format: Literal["headwise-profile/1"] = PROFILE_FORMAT
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
    qk_whole: bool  # query or key norms: their side is left alone
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
    def calibration(self) -> dict[str, Any]:
        """What the record of a model that is made with this profile says of its text or images."""
        kind = "images" if self.of_images else "text"
        found = {"source": self.text.source, f"{kind}_sha256": self.text.sha256}
        return (
            found | ({"images": self.sequences} if self.of_images else {}) | {"tokens": self.tokens}
        )

    @property
    def unit(self) -> str:
        """What the loss and its predicted rise are in; an embedding has neither."""
        return "nats per image" if self.objective == "label" else "nats per token"


@dataclass(frozen=True)
class Profile:
    """A profile that was read and checked."""

    record: ProfileRecord
    tensors: dict[str, np.ndarray]
    sha256: str  # of profile.json, which holds that of the tensors

    @classmethod
    def read(cls, folder: Path) -> Profile:
        """The profile in a folder."""
        record = _record(folder)
        path = folder / TENSORS
        try:
            if sha256(path) != record.tensors_sha256:
                raise HeadwiseError(
                    f"{path} is not the file that {RECORD} beside it speaks of (truncated, changed "
                    "or from another profile); make the profile again."
                )
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise HeadwiseError(
                f"{path} cannot be read ({reason}); make the profile again."
            ) from error
        return cls(record, tensors, sha256(folder / RECORD))

    @cached_property
    def plan(self) -> Plan:
        """The dense plan that was profiled."""
        return Plan.from_dict(self.record.plan, "the profile's plan")

    @property
    def ids(self) -> Int[np.ndarray, "sequences length"]:
        """The token sequences that were read, for whatever is fitted to the same text."""
        return self.tensors["ids"].astype(np.int64)

    @property
    def inputs(self) -> tuple[str, np.ndarray]:
        """What the model was called with: input_ids or pixel_values."""
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


def _record(folder: Path) -> ProfileRecord:
    path = folder / RECORD
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        unfinished = folder.with_name(f"{folder.name}.partial").exists()
        advice = (
            "run the same command again to finish it" if unfinished else "give a profile folder"
        )
        raise HeadwiseError(f"{folder} is no profile (it has no {RECORD}); {advice}.") from error
    except (OSError, ValueError) as error:
        raise HeadwiseError(
            f"{path} must hold a JSON record, but it cannot be read ({error}); make the profile "
            "again."
        ) from error
    came = data.get("format", "no format") if isinstance(data, dict) else type(data).__name__
    if came != PROFILE_FORMAT:
        raise HeadwiseError(
            f"{path} must have format {PROFILE_FORMAT!r}, got {came!r}; use the version of "
            "headwise that wrote it, or make the profile again."
        )
    try:
        return ProfileRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HeadwiseError(
            f"{path} is not a valid profile: {where}: {first['msg']}; make the profile again."
        ) from error

"""What a cut is calibrated on, the part kept for its proof, and the profile of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.console import say
from headwise.errors import HeadwiseError
from headwise.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from headwise.data.images import Images
    from headwise.data.text import Text
    from headwise.profile.format import Profile

_D = ProfileSettings()
HELD_OUT = 0.1  # of the text or the images, kept for the proof

ImagesOption = Annotated[
    str | None,
    typer.Option(
        "--images",
        help="For image models, instead of --text: a folder of images, or a .safetensors file with "
        "pixel_values.",
    ),
]


def read_given(text: str | None, images: str | None) -> Text | Images:
    """The one of --text and --images that was given."""
    from headwise.data.images import read_images
    from headwise.data.text import read_source

    if text is not None and images is None:
        return read_source(text)
    if images is not None and text is None:
        return read_images(images)
    came = "neither" if text is None else "both"
    raise HeadwiseError(
        f"a model is measured on --text or, if it reads images, on --images, got {came}; give one "
        "of them."
    )


def split_text(text: Text) -> tuple[Text, Text]:
    """The text to calibrate on, and the part that is kept for the proof."""
    from headwise.data.split import held_out_split
    from headwise.data.text import Text

    parts = held_out_split(text.documents, HELD_OUT)
    return Text(text.source, parts.train), Text(f"{text.source} (held out)", parts.held_out)


def parts_for(source: Text | Images, profile: Path) -> tuple[Text | Images, Text | Images | None]:
    """What to calibrate on, and what is kept of it.

    Nothing is, if there is a profile already that read all of it (`headwise profile` does).
    """
    from headwise.data.images import Images, held_out_images
    from headwise.profile.format import Profile

    if profile.exists() and Profile.read(profile).record.text.sha256 == source.sha256:
        return source, None
    if isinstance(source, Images):
        return held_out_images(source, HELD_OUT)
    return split_text(source)


def profiled(
    model: str, text: Text | Images, folder: Path, tokens: int, length: int | None
) -> Profile:
    """The profile in `folder` if it is of this model and text, else one made there."""
    from headwise.cli.progress import shown
    from headwise.profile.chunks import Job
    from headwise.profile.format import Profile
    from headwise.profile.run import profile_model
    from headwise.profile.source import load_profiled, sequences, usual_length

    if folder.exists():
        found = Profile.read(folder)
        if (found.record.model, found.record.text.sha256) != (model, text.sha256):
            raise HeadwiseError(
                f"{folder} is a profile of {found.record.model} on {found.record.text.source}, not "
                f"of {model} on {text.source}; name another with --profile, or remove it."
            )
        return found
    loaded, reader = load_profiled(model)
    settings = replace(_D, tokens=tokens, length=length or usual_length(loaded, _D.length))
    job = Job(loaded, model, sequences(loaded, reader, text, settings), settings)
    with shown("profiling") as progress:
        made = profile_model(job, folder, tick=progress.update)
    say(f"Wrote {folder}.")
    return made

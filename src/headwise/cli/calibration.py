"""The text a cut is calibrated on, the part kept for its proof, and the profile of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.cli.console import say
from headwise.errors import HeadwiseError
from headwise.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from headwise.data.text import Text
    from headwise.profile.format import Profile

_D = ProfileSettings()
HELD_OUT = 0.1  # of the text, kept for the proof


def split_text(source: str) -> tuple[Text, Text]:
    """The text to calibrate on, and the part that is kept for the proof."""
    from headwise.data.split import held_out_split
    from headwise.data.text import Text, read_source

    parts = held_out_split(read_source(source).documents, HELD_OUT)
    return Text(source, parts.train), Text(f"{source} (held out)", parts.held_out)


def texts_for(source: str, profile: Path) -> tuple[Text, Text | None]:
    """The text to calibrate on, and what is kept of it.

    Nothing is, if there is a profile already that read all of it (`headwise profile` does).
    """
    from headwise.data.text import read_source
    from headwise.profile.format import Profile

    if profile.exists():
        whole = read_source(source)
        if Profile.read(profile).record.text.sha256 == whole.sha256:
            return whole, None
    return split_text(source)


def profiled(model: str, text: Text, folder: Path, tokens: int, length: int | None) -> Profile:
    """The profile in `folder` if it is of this model and text, else one made there."""
    from headwise.cli.progress import shown
    from headwise.nn.build import plan_of
    from headwise.profile.chunks import Job
    from headwise.profile.format import Profile
    from headwise.profile.run import profile_model
    from headwise.profile.source import load_profiled, sequences

    if folder.exists():
        found = Profile.read(folder)
        if (found.record.model, found.record.text.sha256) != (model, text.sha256):
            raise HeadwiseError(
                f"{folder} is a profile of {found.record.model} on {found.record.text.source}, not "
                f"of {model} on {text.source}; name another with --profile, or remove it."
            )
        return found
    loaded, words = load_profiled(model)
    context = plan_of(loaded).shape.context
    settings = replace(_D, tokens=tokens, length=length or min(_D.length, context))
    job = Job(loaded, model, sequences(loaded, words, text, settings), settings)
    with shown("profiling") as progress:
        made = profile_model(job, folder, tick=progress.update)
    say(f"Wrote {folder}.")
    return made

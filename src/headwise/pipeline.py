"""The whole compression in one call: from a model and a text to a smaller, measured model.

    text ─┬─► calibrate on ─► profile ─► fit ─► cut ─► recover ────────────┐
          └─► held out ────────────────────────────────────────────────────┴─► verify ─► report

Every step is also a separate call; `compress` runs all of them. The same call
resumes a killed run: the profile is in OUT.profile, finished layers are in OUT.partial, and
missing last files are added to an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from headwise.artifacts import beside, check_output, is_headwise_output
from headwise.cutting.run import CutRequest, cut_model, is_cut
from headwise.cutting.settings import CutSettings
from headwise.data.images import Images, held_out_images, read_images
from headwise.data.mixture import Mixture, Share, read_mixture
from headwise.data.text import Text, read_source
from headwise.devices import chosen_device
from headwise.errors import HeadwiseError, StoppedError
from headwise.measure.generation import self_text
from headwise.measure.record import VERIFY_RECORD, Verification, VerifySettings, read_verification
from headwise.measure.verification import verify as verify_model
from headwise.memory import NUMBER, profile_need
from headwise.models.record import CUT_RECORD, CutRecord, read_cut_record
from headwise.plan import Cost, Plan
from headwise.planning.cost import cost, dense_cost
from headwise.plans import fit_plan, read_plan, read_profile
from headwise.profiling.format import RECORD, Profile
from headwise.profiling.run import ProfileJob, profile_model, profile_shared
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import load_for_profiling, sequences, usual_length
from headwise.progress import Progress, silent
from headwise.recipe import (
    CompareRecipe,
    CompressRecipe,
    OnDevice,
    ProfileRecipe,
    write_recipe,
)
from headwise.records import write_record
from headwise.reporting.card import CARD, REPORT, note_report, write_card
from headwise.runs import drop_partial, partial_of
from headwise.source import AnyModel, Source, open_source, recipe_names
from headwise.training.loop import ProgressObserver
from headwise.training.recover import recover as recover_model
from headwise.training.settings import RecoverSettings

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerBase

# What a compression and the profile it makes have in common.
SHARED = tuple(n for n in ProfileRecipe.options() if n in CompressRecipe.options())


@dataclass(frozen=True, slots=True)
class CompressResult:
    """A smaller model, how it was made, and what it lost and saved."""

    out: Path
    plan: Plan
    profile: Profile
    record: CutRecord
    verification: Verification | None
    notes: tuple[str, ...] = ()  # what a person should know, such as why there is no report

    @property
    def cost(self) -> Cost:
        """What the plan costs."""
        return cost(self.plan)

    @property
    def dense_cost(self) -> Cost:
        """What the dense model costs."""
        return dense_cost(self.plan.shape)


@dataclass(frozen=True, slots=True)
class CutResult:
    """A cut model's folder, its plan and the record of how it was made."""

    out: Path
    plan: Plan
    record: CutRecord


def profile(
    model: AnyModel,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    force: bool = False,
    progress: Progress = silent,
    processes: Accelerator | None = None,
    **options: Any,
) -> Profile:
    """Measure what a model's heads do on a text: moments, sensitivities, saturation.

    `options` are those below. Without `out` nothing is kept on disk. Under torchrun every process
    calls this with its accelerator as `processes`.

    >>> import headwise as hw
    >>> profile = hw.profile("./model", text="notes.txt")
    """
    recipe = ProfileRecipe.of(**recipe_names(model, tokenizer), **options)
    if out is not None:
        check_output(
            Path(out),
            force=force or is_unfinished(Path(out), RECORD, (REPORT,)),
            inputs=recipe.reads,
            kind="folder",
        )
    calibration, _ = split_data(read_data(recipe.text, recipe.images), recipe.split)
    source = opened_for(model, tokenizer, recipe)
    if out is None:
        with TemporaryDirectory() as folder:
            made = _profile(source, calibration, recipe, Path(folder) / "p", progress=progress)
    else:
        how: dict[str, Any] = {"force": force, "progress": progress, "last": (REPORT,)}
        made = _profile(source, calibration, recipe, Path(out), processes, **how)
        if processes is None or processes.is_main_process:
            note_report(Path(out))
    return replace(made, source=source if source.folder is None else None)


def cut(
    profile: Profile | str | Path,
    plan: Plan | str | Path,
    *,
    out: str | Path,
    model: AnyModel | None = None,
    settings: CutSettings | None = None,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
) -> CutResult:
    """Cut the profiled model down to a plan; `model` defaults to the one the profile names.

    >>> import headwise as hw
    >>> profile = hw.profile("./model", text="notes.txt")
    >>> small = hw.cut(profile, hw.fit(profile, attn_params="75%"), out="small")
    """
    read = read_profile(profile)
    source = open_source(read.source or read.record.model if model is None else model)
    chosen = read_plan(plan)
    request = CutRequest(source, read, chosen, settings or CutSettings(), command)
    record = cut_model(request, Path(out), force=force, progress=progress)
    return CutResult(Path(out), chosen, record)


def compress(
    model: AnyModel,
    *,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
    **options: Any,
) -> CompressResult:
    """Cut a trained model down to a budget and measure what it lost.

    `model` is a folder, a hub name, a .gguf file, a builtin name, or a live `PreTrainedModel` with
    its `tokenizer`. `options` are those below. Call it again with the same arguments to resume
    after a kill.

    >>> import headwise as hw
    >>> result = hw.compress("./model", attn_params="75%", text="notes.txt", out="smaller")
    >>> ratio, speed = result.verification.texts[0].ratio, result.verification.speed
    """
    recipe = CompressRecipe.of(**recipe_names(model, tokenizer), **options)
    recipe.check()
    return _Compression(recipe, Path(out), force, progress, command).run(model, tokenizer)


def read_data(text: Sequence[str], images: str | None) -> Mixture | Images:
    """The texts or the set of images, whichever was given."""
    _refuse_neither_or_both(text, images)
    return read_mixture(text) if images is None else read_images(images)


def measured_data(text: Sequence[str], images: str | None) -> list[Text | Images]:
    """The texts or the images to measure on."""
    _refuse_neither_or_both(text, images)
    return [read_source(name) for name in text] if images is None else [read_images(images)]


def _refuse_neither_or_both(text: Sequence[str | Path], images: str | Path | None) -> None:
    if bool(text) == (images is not None):
        came = "both" if text else "neither"
        raise HeadwiseError(
            f"a model is measured on --text or, if it reads images, on --images, got {came}; give "
            "one of them."
        )


def split_data(
    data: Mixture | Images, share: float
) -> tuple[Mixture | Images, tuple[Text | Images, ...]]:
    """The calibration part, and the part held out of every text, or of the images."""
    if not share:
        return data, ()
    if isinstance(data, Mixture):
        return data.split(share)
    calibration, held_out = held_out_images(data, share)
    return calibration, (held_out,)


class _Compression:
    """One `compress`, stage by stage; each stage is skipped if it is finished already."""

    def __init__(
        self, recipe: CompressRecipe, out: Path, force: bool, progress: Progress, command: str
    ) -> None:
        self.recipe, self.out, self.force = recipe, out, force
        self.progress, self.command = progress, command
        self.profile_folder = Path(recipe.profile or beside(out, "{}.profile"))
        self.notes: list[str] = []
        self.last = (CARD, VERIFY_RECORD, REPORT) if recipe.verify else (CARD, REPORT)

    def run(self, model: AnyModel, tokenizer: Any) -> CompressResult:
        """Run all stages. Errors in the input are found before the long work."""
        recipe = self.recipe
        check_output(
            self.out,
            force=self.force or is_unfinished(self.out, CUT_RECORD, self.last),
            inputs=recipe.reads,
            kind="folder",
        )
        self._refuse_profile_in_output()
        given = None if recipe.plan is None else read_plan(recipe.plan)
        data = self._data()
        others = [read_source(text) for text in recipe.held_out]
        source = opened_for(model, tokenizer, recipe)
        source.refuse_cut()
        if recipe.self_text:
            folder = beside(self.out, "{}.self-text")
            text = self_text(source, recipe.self_text, folder, progress=self.progress)
            data = Mixture((*data.shares, Share(text))) if isinstance(data, Mixture) else data
        calibration, held_out = self._split(data)
        # Where nothing is held out, the first of the others stands for the calibration text.
        measured = [*held_out, *others]
        own = max(1, len(held_out))
        if recipe.verify and not measured:
            raise self._nothing_held_out(data)
        profile = profile_at(self.profile_folder, source, calibration, recipe, self.progress)
        recovery = self._recovery_tokens(profile)
        plan = given or fit_plan(
            profile,
            recipe.budget,
            recipe.rules(recovered=bool(recovery)),
            policy=recipe.policy,
            command=self.command,
            targets=recipe.for_,
        )

        def verified(folder: Path) -> Verification | None:
            if not recipe.verify:
                return None
            return self._verify(folder, source, measured[:own], measured[own:])

        request = self._request(source, profile, plan, recovers=bool(recovery))
        self._cut(request, data, recovery, verified)
        verification = verified(self.out)
        self.notes += note_report(self.out, self.profile_folder)
        record = read_cut_record(self.out)
        return CompressResult(self.out, plan, profile, record, verification, tuple(self.notes))

    def _refuse_profile_in_output(self) -> None:
        """Before the profile is made there and is in the way of the output."""
        folder, out = self.profile_folder.resolve(), self.out.resolve()
        if folder == out or out in folder.parents:
            raise HeadwiseError(
                f"--profile {self.profile_folder} is the output {self.out} or lies in it; give "
                "the profile a place of its own."
            )

    def _data(self) -> Mixture | Images:
        """The calibration data; text generated by the model may be all of it."""
        recipe = self.recipe
        if recipe.self_text and not recipe.text and recipe.images is None:
            return Mixture(())
        return read_data(recipe.text, recipe.images)

    def _split(self, data: Mixture | Images) -> tuple[Mixture | Images, tuple[Text | Images, ...]]:
        """Split the data; nothing is held out if an existing profile has read all of it."""
        folder = self.profile_folder
        if folder.exists() and Profile.read(folder).record.text.sha256 == data.sha256:
            return data, ()
        return split_data(data, self.recipe.split)

    def _nothing_held_out(self, data: Mixture | Images) -> HeadwiseError:
        advice = "--no-verify" if isinstance(data, Images) else "--held-out, or --no-verify"
        if self.recipe.split == 0:
            return HeadwiseError(f"nothing is held out for verification; give {advice}.")
        return HeadwiseError(
            f"{self.profile_folder} was made on all of {data.source}, so nothing of it is left for "
            f"verification; give {advice}."
        )

    def _recovery_tokens(self, profile: Profile) -> int:
        """Tokens to train the cut on; 0: none."""
        record, recipe = profile.record, self.recipe
        return recipe.amounts.recovery_tokens(
            recipe.recover, record.tokens, recoverable=record.recoverable
        )

    def _request(
        self, source: Source, profile: Profile, plan: Plan, *, recovers: bool
    ) -> CutRequest:
        recipe = self.recipe
        fit = recipe.amounts.fit_steps(recipe.fit, recovers=recovers)
        refit = recipe.amounts.refits(recipe.refit, recovers=recovers)
        return CutRequest(source, profile, plan, CutSettings(refit=refit, fit=fit), self.command)

    def _cut(
        self,
        request: CutRequest,
        data: Mixture | Images,
        recovery: int,
        verified: Callable[[Path], object],
    ) -> None:
        """The new folder, trained on so many tokens, and verified before it takes its place."""
        recipe, source = self.recipe, request.source

        def finish(folder: Path, made_from: Path | None) -> None:
            write_recipe(folder, recipe)
            write_card(folder, made_from, name=self.out.name)
            verified(folder)

        if not recovery:
            cut_model(
                request,
                self.out,
                force=self.force,
                progress=self.progress,
                last=self.last,
                finishing=lambda made: finish(made, source.folder),
            )
            return
        folder = beside(self.out, "{}.cut")
        if not is_cut(request, folder):  # a killed recovery finds its cut model finished
            cut_model(request, folder, force=self.force, progress=self.progress)
        else:
            drop_partial(folder)
        assert isinstance(data, Mixture)
        how = RecoverSettings(tokens=recovery, split=recipe.split, train=recipe.train)
        how = how.within(request.profile.record.settings["length"])
        recovered = recover_model(
            folder,
            source,
            data,
            self.out,
            settings=how,
            force=self.force,
            observer=ProgressObserver(self.progress, "recovering"),
            finishing=lambda made: finish(made, folder),
            last=self.last,
            command=self.command,
        )
        if recovered.signal:
            raise StoppedError(recovered.signal)

    def _verify(
        self, folder: Path, source: Source, measured: list[Text | Images], others: list[Any]
    ) -> Verification:
        """The verification in a folder, measured if it is missing; the card then includes it.

        The folder is the temporary one before it is renamed, and the output itself after that.
        """
        found = read_verification(folder)
        if found is None:
            found = verify_model(
                folder,
                source,
                measured,
                VerifySettings(max_tokens=self.recipe.verify_tokens),
                others=others,
                targets=self.recipe.targets,
                progress=self.progress,
            ).model_copy(update={"model": str(self.out)})
            write_record(folder / VERIFY_RECORD, found)
        write_card(folder, name=self.out.name)
        return found


def profile_at(
    folder: Path,
    source: Source,
    calibration: Mixture | Images,
    recipe: CompressRecipe | CompareRecipe,
    progress: Progress,
) -> Profile:
    """The profile in a folder if it is of this model and text, otherwise a new one made there."""
    if not folder.exists():
        shared = {name: getattr(recipe, name) for name in SHARED}
        if isinstance(recipe, CompressRecipe):
            shared["tokens"] = recipe.tokens or recipe.amounts.tokens
        own = ProfileRecipe.of(**shared)
        return _profile(source, calibration, own, folder, progress=progress)
    found = Profile.read(folder)
    if (found.record.model, found.record.text.sha256) != (source.name, calibration.sha256):
        raise HeadwiseError(
            f"{folder} is a profile of {found.record.model} on {found.record.text.source}, not of "
            f"{source.name} on {calibration.source}; name another with --profile, or remove it."
        )
    drop_partial(folder)
    return found


def _profile(
    source: Source,
    data: Mixture | Images,
    recipe: ProfileRecipe,
    folder: Path,
    processes: Accelerator | None = None,
    **how: Any,
) -> Profile:
    if source.folder is not None and recipe.device_map is None:
        how["progress"] = _check_profile_memory(source, recipe, how.get("progress", silent))
    model = load_for_profiling(
        source, device=recipe.device, dtype=recipe.dtype, device_map=recipe.device_map
    )
    settings = ProfileSettings(
        length=recipe.length or usual_length(model, ProfileSettings().length),
        tokens=recipe.tokens,
        chunk=recipe.chunk,
        seed=recipe.seed,
    )
    rows = sequences(model, source.reader, data, settings)
    job = ProfileJob(model, source.name, rows, settings, source.weights_sha256)

    def finishing(made: Path) -> None:
        write_recipe(made, recipe)

    if processes is None:
        return profile_model(job, folder, finishing=finishing, **how)
    return profile_shared(job, folder, processes, finishing=finishing, **how)


def _check_profile_memory(source: Source, recipe: ProfileRecipe, progress: Progress) -> Progress:
    """Raise if memory is short; the returned progress reports the expected peak."""
    if chosen_device(recipe.device) != "cpu":
        return progress
    context = source.plan.shape.context
    length = recipe.length or (context if recipe.images else min(ProfileSettings().length, context))
    need = profile_need(
        source.plan,
        tokens=min(recipe.chunk * length, recipe.tokens),
        number=2 if recipe.dtype == "bf16" else NUMBER,
    )
    return need.check(progress, advice="use a smaller --chunk or --length, or --dtype bf16")


def opened_for(model: AnyModel, tokenizer: Any, recipe: OnDevice) -> Source:
    """The model of a recipe, opened."""
    return open_source(model, tokenizer=tokenizer, trust_remote_code=recipe.trust_remote_code)


def is_unfinished(out: Path, record: str, last: Sequence[str]) -> bool:
    """Whether an output may come from a run that was killed before it wrote its last files."""
    there = (out / record).exists() and is_headwise_output(out)
    lacks = not all((out / name).exists() for name in last)
    return there and (lacks or partial_of(out).exists())

"""The other verbs: train, recover, verify, evaluate, export, generate; `run` for any recipe.

Each takes the options of its recipe as keywords and returns a typed result. The steps of `compress`
are in `headwise.pipeline`, plans in `headwise.plans`. Each verb imports its packages when it is
called, so that none loads what only another needs.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.artifacts import check_output
from headwise.errors import HeadwiseError
from headwise.plan import Plan
from headwise.progress import Progress, note, silent
from headwise.recipe import (
    EvaluateRecipe,
    ExportRecipe,
    GenerateRecipe,
    Recipe,
    RecoverRecipe,
    TrainRecipe,
    VerifyRecipe,
    check_folder,
    read_recipe,
    write_recipe,
)
from headwise.records import write_record
from headwise.reporting.card import REPORT, note_report, write_card
from headwise.runs import RUN

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headwise.exporting.push import PushResult
    from headwise.exporting.record import ExportResult
    from headwise.measure.evaluation import Evaluation
    from headwise.measure.generation import Continuation
    from headwise.measure.record import Verification
    from headwise.pipeline import CompressResult, CutResult
    from headwise.source import AnyModel
    from headwise.training.recover import RecoverResult
    from headwise.training.train import TrainResult


def train(
    plan: Plan | str | Path | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
    **options: Any,
) -> TrainResult:
    """Train a plan's model from scratch on text; the finished model is in OUT/model.

    `options` are those below. Call it again with the same arguments to resume after a kill; with
    `resume`, `out` alone is enough, and any other arguments must agree with the run. Under torchrun
    every process calls this, and every process gets the result.

    >>> import headwise as hw
    >>> sizes = {"layers": 2, "d_model": 64, "heads": 4, "context": 32, "vocab_size": 300}
    >>> plan = hw.new_plan(**sizes, attn_params="75%")
    >>> result = hw.train(plan, text="notes.txt", steps=3, batch_size=2, out="run")
    >>> model = hw.load(result.model)
    """
    from headwise.training.loop import ProgressObserver
    from headwise.training.train import resume_training
    from headwise.training.train import train as train_plan

    folder = Path(out)
    named = str(folder / "plan.json") if isinstance(plan, Plan) else plan
    recipe = TrainRecipe.of(plan=named, **options)
    recipe.check()
    settings = recipe.settings
    rest = {name: getattr(recipe, name) for name in ("tokenizer", "vocab_size", "max_chars")}
    how: dict[str, Any] = {
        "observer": ProgressObserver(progress, "training"),
        "progress": progress,
        "shard": recipe.shard,
    }
    if force:
        made_up = {named} if isinstance(plan, Plan) else set()  # it is not read from there
        check_output(folder, force=True, inputs=[n for n in recipe.reads if n not in made_up])
    if resume and force:
        raise HeadwiseError("--resume continues a run and --force replaces it; give only one.")
    startable = plan is not None and recipe.text and not (folder / RUN).exists()
    if resume and not startable:
        stated = {n for n in recipe.model_fields_set if hasattr(settings, n)}
        changes = {name: getattr(settings, name) for name in stated}
        result = resume_training(folder, changes, plan=plan, text=recipe.text, **rest, **how)
    else:
        if plan is None:
            raise HeadwiseError("training needs a plan file; see `headwise train --help`.")
        if not recipe.text:
            raise HeadwiseError("training needs --text; see `headwise train --help`.")
        result = train_plan(
            plan,
            recipe.text,
            folder,
            settings=settings,
            force=force,
            beginning=lambda made: write_recipe(made, recipe),
            command=command,
            **rest,
            **how,
        )
    if result.status == "finished" and not (folder / REPORT).exists():
        for message in note_report(folder):
            note(progress, message)
    return result


def recover(
    model: str | Path | CutResult | CompressResult,
    *,
    against: AnyModel,
    out: str | Path,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
    **options: Any,
) -> RecoverResult:
    """Train the attention of a cut model on the predictions of the model it was cut from.

    `options` are those below. Call it again with the same arguments to resume after a kill. Under
    torchrun every process calls this, and every process gets the result.

    >>> import headwise as hw
    >>> options = {"text": "notes.txt", "tokens": 64, "length": 16}
    >>> found = hw.recover("smaller", against="./model", out="recovered", **options)
    """
    from headwise.source import model_name
    from headwise.training.loop import ProgressObserver
    from headwise.training.recover import recover as recover_model

    folder = _folder(model)
    recipe = RecoverRecipe.of(model=str(folder), against=model_name(against), **options)
    if force:
        check_output(Path(out), force=True, inputs=recipe.reads, kind="folder")

    def finishing(made: Path) -> None:
        write_recipe(made, recipe)
        write_card(made, Path(folder), name=Path(out).name)

    return recover_model(
        folder,
        against,
        recipe.text,
        out,
        settings=recipe.settings,
        force=force,
        shard=recipe.shard,
        observer=ProgressObserver(progress, "recovering"),
        finishing=finishing,
        command=command,
    )


def verify(
    model: AnyModel | CutResult | CompressResult,
    *,
    against: AnyModel,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    force: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Verification:
    """Measure a cut model against the model it was cut from, on text it was not calibrated on.

    `options` are those below; a missed target is not an error: see `met` and `targets`. With `out`
    the record is also written to that file.

    >>> import headwise as hw
    >>> found = hw.verify("smaller", against="./model", text="held-out.txt", max_ratio=1.1)
    >>> met, ratio = found.met, found.texts[0].ratio
    """
    from headwise.data.text import read_source
    from headwise.measure.record import VERIFY_RECORD, VerifySettings
    from headwise.measure.verification import verify as verify_model
    from headwise.pipeline import measured_data
    from headwise.source import model_name, recipe_names

    cut = _folder(model)
    recipe = VerifyRecipe.of(**recipe_names(cut, tokenizer), against=model_name(against), **options)
    if out is not None:
        check_output(Path(out), force=force, inputs=recipe.reads, kind="file")
    texts = measured_data(recipe.text, recipe.images)
    others = [read_source(name) for name in recipe.held_out]
    settings = VerifySettings(
        window=recipe.window,
        stride=recipe.stride,
        max_tokens=recipe.tokens,
        tokenizer=tokenizer if recipe.tokenizer is None else recipe.tokenizer,  # type: ignore[arg-type]
        device=recipe.device,
        dtype=recipe.dtype,
        trust_remote_code=recipe.trust_remote_code,
        repeats=recipe.repeats,
        seconds=recipe.seconds,
        memory=recipe.memory,
        tasks=recipe.tasks,
        task_data=recipe.task_data,
        task_limit=recipe.task_limit,
        samples=recipe.samples,
    )
    found = verify_model(
        cut, against, texts, settings, others=others, targets=recipe.targets, progress=progress
    )
    if out is not None:
        write_record(Path(out), found, force=force, inputs=recipe.reads)
        beside = isinstance(cut, str | Path) and Path(out).resolve().parent == Path(cut).resolve()
        if beside and Path(out).name == VERIFY_RECORD:
            write_card(Path(cut))  # the record is beside the model, so the card quotes its figures
    return found


def evaluate(
    model: AnyModel,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    force: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Evaluation:
    """Score texts: nats per token, perplexity, bits per byte; for encoders nats per masked token.

    `options` are those below. With `out` the record is also written to that file.

    >>> import headwise as hw
    >>> perplexity = hw.evaluate("./model", text="held-out.txt").perplexity
    """
    from headwise.data.text import read_source
    from headwise.measure.evaluation import evaluate_model
    from headwise.source import open_source, recipe_names

    recipe = EvaluateRecipe.of(**recipe_names(model, tokenizer), **options)
    if out is not None:
        check_output(Path(out), force=force, inputs=recipe.reads, kind="file")
    found = evaluate_model(
        open_source(model, tokenizer=tokenizer, trust_remote_code=recipe.trust_remote_code),
        [read_source(name) for name in recipe.text],
        tokens=recipe.tokens,
        window=recipe.window,
        stride=recipe.stride,
        device=recipe.device,
        dtype=recipe.dtype,
        progress=progress,
    )
    if out is not None:
        write_record(Path(out), found, force=force, inputs=recipe.reads)
    return found


def export(
    model: AnyModel | CutResult | CompressResult,
    *,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
    **options: Any,
) -> ExportResult:
    """Export a model for another engine, and measure parity in that engine.

    `options` are those below. `out` is a file for GGUF and a folder otherwise. Call it again with
    the same arguments to resume after a kill.

    >>> import headwise as hw
    >>> served = hw.export("smaller", to="padded", out="served")
    >>> error, held = served.parity.error, served.held
    """
    from headwise.exporting.parts import ExportRequest
    from headwise.exporting.run import export_model
    from headwise.source import model_name, open_source

    one = _folder(model)
    recipe = ExportRecipe.of(model=model_name(one), **options)
    source = open_source(one, tokenizer=tokenizer)
    request = ExportRequest(source, recipe.to, recipe.dtype, recipe.quantize, recipe.check, command)
    return export_model(
        request,
        Path(out),
        force=force,
        progress=progress,
        finishing=lambda made: write_recipe(made, recipe),
    )


def push(
    model: str | Path | CutResult | CompressResult | ExportResult,
    repo: str,
    *,
    private: bool = False,
    endpoint: str | None = None,
    token: str | None = None,
) -> PushResult:
    """Upload a folder that headwise wrote, with its card and recipe, to the Hugging Face hub.

    `endpoint` and `token` default to those of the huggingface_hub configuration.

    >>> import headwise as hw
    >>> hw.push("smaller", "my-name/smaller")  # doctest: +SKIP
    """
    from headwise.exporting.push import push_folder

    return push_folder(Path(_folder(model)), repo, private=private, endpoint=endpoint, token=token)


def generate(
    model: AnyModel,
    *,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    **options: Any,
) -> Continuation:
    """Continue a prompt with a causal model.

    `options` are those below.

    >>> import headwise as hw
    >>> text = hw.generate("./model", prompt="The capital", max_new_tokens=3).text
    """
    from headwise.measure.generation import continuation
    from headwise.source import open_source, recipe_names

    recipe = GenerateRecipe.of(**recipe_names(model, tokenizer), **options)
    source = open_source(model, tokenizer=tokenizer, trust_remote_code=recipe.trust_remote_code)
    source.refuse_bidirectional("`headwise generate`")
    return continuation(
        source.load("causal-lm", device=recipe.device, dtype=recipe.dtype),
        source.tokenizer,
        recipe.prompt,
        max_new_tokens=recipe.max_new_tokens,
        temperature=recipe.temperature,
        top_p=recipe.top_p,
        seed=recipe.seed,
    )


def run(
    recipe: str | Path | Recipe,
    *,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
) -> Any:
    """Run a recipe; the result is that of its verb.

    `out` is the output folder, or the file of a plan, a verification or an evaluation.

    >>> import headwise as hw
    >>> again = hw.run("smaller/recipe.yaml", out="again")
    """
    found = recipe
    if not isinstance(found, Recipe):
        found = read_recipe(Path(found), replacing=out if force else None)
    check_folder(found, out)
    verb = verb_of(found)
    how = {"out": out, "force": force, "progress": progress, "command": command}
    taken = signature(verb).parameters
    return verb(**{k: v for k, v in how.items() if k in taken}, **found.stated)


def verb_of(recipe: Recipe) -> Callable[..., Any]:
    """The function that runs a recipe."""
    import headwise

    name = "evaluate" if recipe.verb == "eval" else recipe.verb  # Python has an `eval` of its own
    verb: Callable[..., Any] = getattr(headwise, name)
    return verb


def load(model: str | Path, **how: Any) -> PreTrainedModel:
    """A model, dense or headwise, ready to run: folder, hub name, .gguf file, builtin:smollm2.

    >>> import headwise as hw
    >>> model = hw.load("smaller")
    """
    from headwise.source import open_source

    found: PreTrainedModel = open_source(model).load(**how)
    return found


def _folder(model: Any) -> Any:
    """The folder of a result of ours; any other name of a model is returned unchanged."""
    out = getattr(model, "out", None)
    return out if isinstance(out, Path) else model

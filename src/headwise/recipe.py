"""A recipe: one small file that says a whole run, and the one source of every verb's options.

    # recipe.yaml
    format: headwise-recipe/1
    verb: compress
    model: builtin:smollm2
    text: notes.txt
    attn_params: 75%

A recipe's fields are the keyword arguments of the verb in Python, its options on the command line
and its keys in YAML, with the same names, defaults and help. Every output folder holds the recipe
that made it; running that again gives the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo

from headwise.artifacts import write_text
from headwise.baselines.catalogue import METHODS, RECOVERED
from headwise.cutting.settings import CutSettings
from headwise.errors import BudgetError, HeadwiseError, did_you_mean, quoted
from headwise.plan import RESOURCES, Budget, Limit
from headwise.profiling.settings import ProfileSettings
from headwise.records import Record, first_problem, read_file, without_repeats

RECIPE = "recipe.yaml"
RECIPE_FORMAT: Literal["headwise-recipe/1"] = "headwise-recipe/1"
SPLIT = 0.1  # of the text or the images, kept for verification
_P, _C = ProfileSettings(), CutSettings()


def _names(value: Any) -> Any:
    """One name stands for a list of one."""
    return (str(value),) if isinstance(value, str | Path) else value


def _name(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _limit(value: Any) -> Any:
    """A limit as people write it (75%, 1.2M, 1200000), checked."""
    if value is None or isinstance(value, bool):
        return value
    return str(Limit.parse(str(value)))


Name = Annotated[str, BeforeValidator(_name)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
LimitText = Annotated[str | None, BeforeValidator(_limit)]
Granularity = Literal["head", "layer", "model"]


def option(default: Any, help_text: str, **rules: Any) -> Any:
    """A field of a recipe, with the help that the command line and the API page show."""
    return Field(default, description=help_text, **rules)


class Recipe(Record):
    """What all recipes share; a subclass lists the options of its verb."""

    format: Literal["headwise-recipe/1"] = RECIPE_FORMAT
    verb: str

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """The fields that are options of the verb."""
        return {n: f for n, f in cls.model_fields.items() if n not in ("format", "verb")}

    @classmethod
    def of(cls, **given: Any) -> Any:
        """The recipe of these options; a wrong one is told in one sentence."""
        try:
            return cls.model_validate({k: v for k, v in given.items() if v is not None})
        except ValidationError as error:
            raise HeadwiseError(_problem(error, cls)) from error

    def to_yaml(self) -> str:
        """The recipe as the text of its file: what differs from the defaults."""
        import yaml  # type: ignore[import-untyped]

        stated = {k: v for k, v in self.to_dict().items() if k not in ("format", "verb")}
        document = {"format": self.format, "verb": self.verb, **stated}
        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


class Calibrated(Recipe):
    """Options of the verbs that look at a model on text or images."""

    model: Name = option(..., "Folder, hub name, .gguf file, builtin:smollm2 or builtin:minilm.")
    text: Name | None = option(
        None, "Text to calibrate on: file, folder, hub:owner/name or builtin:python."
    )
    images: Name | None = option(
        None,
        "For image models, instead of --text: a folder of images, or a .safetensors file with "
        "pixel_values.",
    )
    tokens: int = option(_P.tokens, "Tokens to calibrate on.", ge=1)
    length: int | None = option(None, f"Tokens per sequence [min({_P.length}, the context)].", ge=2)
    tokenizer: Name | None = option(None, "Tokenizer folder or tokenizer.json [the model's own].")
    device: str = option("auto", "auto, cpu, cuda or mps.")
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "auto, fp32 or bf16.")
    trust_remote_code: bool = option(False, "Run model code found in the folder.")


class ProfileRecipe(Calibrated):
    """Measure a model's heads on a text, or on images: one forward and one backward pass."""

    verb: Literal["profile"] = "profile"
    chunk: int = option(_P.chunk, "Sequences that run, and are saved, together.", ge=1)
    seed: int = option(_P.seed, "Random seed for an encoder's masks and probes.", ge=0, lt=2**63)
    device_map: str | None = option(
        None, "Spread the model over devices: auto, balanced, sequential."
    )
    split: float = option(
        0.0, "Share of --text left out, to be held out for verification.", ge=0, lt=1
    )


class Budgets(Recipe):
    """Options of the verbs that plan under a budget."""

    verb: str = "fit"

    attn_params: LimitText = option(
        None, "Limit on attention parameters: 75% of the dense model's, or a number (1.2M)."
    )
    params: LimitText = option(None, "Limit on all parameters.")
    kv_bytes: LimitText = option(None, "Limit on cached bytes per token.")
    flops: LimitText = option(None, "Limit on FLOPs per token.")
    granularity: Granularity = option(
        "head", "Widths free per head, or equal per layer or in the whole model."
    )
    multiple_of: int = option(8, "Head widths are multiples of this.", ge=1)

    @property
    def budget(self) -> Budget:
        """The limits as one budget."""
        stated = {r: getattr(self, r) for r in RESOURCES}
        return Budget(**{r: Limit.parse(v, _flag(r)) for r, v in stated.items() if v is not None})


class CompressRecipe(Calibrated, Budgets):
    """Cut a trained model down to a budget: profile, plan, cut, recover if asked, verify."""

    verb: Literal["compress"] = "compress"
    plan: Name | None = option(None, "Cut to this plan (from `plan fit`) instead of a budget.")
    profile: Name | None = option(None, "The profile, made if it is not there [OUT.profile].")
    split: float = option(SPLIT, "Share of --text held out for verification.", ge=0, lt=1)
    held_out: Names = option((), "Also verify on this text; repeatable.")
    refit: bool = option(
        _C.refit, "Refit each layer's output projection on the cut layers before it."
    )
    fit: int | None = option(
        _C.fit,
        "Steps of fitting each layer's projections to the dense layer; 0: none [one pass over "
        "the text].",
        ge=0,
    )
    recover: int | None = option(
        None, "Then train the attention on this many tokens (`recover`).", ge=1
    )
    verify: bool = option(True, "Measure the result against the source.")
    verify_tokens: int = option(16384, "Tokens of each text to verify on.", ge=1)
    max_ratio: float | None = option(
        None, "Target: perplexity ÷ dense at most this; exit code 1 if it is missed.", ge=0
    )

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if (self.plan is None) == (not self.budget.limited):
            came = "neither" if self.plan is None else "both"
            raise BudgetError(
                f"a cut needs a budget such as {_flag('attn_params')} 75%, or a plan, got {came}; "
                "give one of them."
            )
        if self.max_ratio is not None and not self.verify:
            raise HeadwiseError("--max-ratio needs the verification that --no-verify leaves out.")
        if self.images is None:
            return
        for name in ("recover", "held_out", "max_ratio"):
            if getattr(self, name):
                raise HeadwiseError(
                    f"{_flag(name)} is for models of text, not with --images; leave it out."
                )


class CompareRecipe(Calibrated):
    """Cut a model by every method to the same counted budgets, and measure them alike."""

    verb: Literal["compare"] = "compare"
    attn_params: str = option(
        "90%,75%,50%", "Attention parameters: shares (90%,75%) or numbers (1.2M)."
    )
    methods: str | None = option(None, f"Which of {', '.join(METHODS)} [all].")
    split: float = option(SPLIT, "Share of --text held out to measure on.", ge=0, lt=1)
    held_out: Names = option((), "Also measure on this text; repeatable.")
    profile: Name | None = option(None, "The profile, made if it is not there [OUT/profile].")
    recover: int | None = option(None, f"Tokens to train on, for {RECOVERED}.", ge=1)
    verify_tokens: int = option(16384, "Tokens of each text to measure on.", ge=1)
    multiple_of: int = option(8, "Our head widths are multiples of this.", ge=1)

    @property
    def budgets(self) -> tuple[Limit, ...]:
        """The budgets, each once."""
        parts = [Limit.parse(part, _flag("attn_params")) for part in self.attn_params.split(",")]
        return tuple(dict.fromkeys(parts))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The methods asked for, in the order of the catalogue."""
        names = [part.strip() for part in (self.methods or ",".join(METHODS)).split(",")]
        for name in names:
            if name not in METHODS:
                raise HeadwiseError(
                    f"--methods must be methods that are known, got {quoted(name)}. "
                    f"{did_you_mean(name, METHODS)}"
                )
        if self.methods is None and self.recover is None:
            names.remove(RECOVERED)
        if (self.recover is not None) != (RECOVERED in names):
            raise HeadwiseError(
                f"--recover says how long {RECOVERED} trains, so both are given or neither; got "
                f"{'--recover without it' if self.recover else 'it without --recover'}."
            )
        return tuple(name for name in METHODS if name in names)


RECIPES: dict[str, type[Recipe]] = {
    "compare": CompareRecipe,
    "compress": CompressRecipe,
    "profile": ProfileRecipe,
}


def read_recipe(path: Path) -> Recipe:
    """The recipe in a YAML file; unknown keys and wrong values are told in one sentence."""
    import yaml

    try:
        data = yaml.load(read_file(path, most=2**20), Loader=_unique_loader())  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise HeadwiseError(f"{path} is not valid YAML ({quoted(error)}); check it.") from error
    if not isinstance(data, dict) or data.get("format") != RECIPE_FORMAT:
        came = data.get("format", "no format") if isinstance(data, dict) else type(data).__name__
        raise HeadwiseError(
            f"{path} must be a recipe with `format: {RECIPE_FORMAT}`, got {quoted(came)}."
        )
    verb = data.get("verb")
    if not isinstance(verb, str) or verb not in RECIPES:
        raise HeadwiseError(
            f"{path} must name a verb, got {quoted(verb)}. {did_you_mean(str(verb), RECIPES)}"
        )
    try:
        return RECIPES[verb].model_validate(data)
    except ValidationError as error:
        raise HeadwiseError(
            f"{path} is not a valid recipe: {_problem(error, RECIPES[verb])}"
        ) from error


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Put the recipe into an output folder."""
    write_text(folder / RECIPE, recipe.to_yaml(), force=True)


def _problem(error: ValidationError, kind: type[Recipe]) -> str:
    return first_problem(error, kind, {})


def _flag(name: str) -> str:
    """An option as people write it on the command line."""
    return f"--{name.replace('_', '-')}"


def _unique_loader() -> Any:
    """PyYAML's safe loader, with duplicate keys refused."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        pairs = [
            (str(loader.construct_object(k)), loader.construct_object(v, deep=True))
            for k, v in node.value
        ]
        return without_repeats(pairs)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def choices(annotation: Any) -> tuple[str, ...]:
    """The words a Literal option takes; () for other options."""
    found = get_args(annotation)
    return tuple(found) if found and all(isinstance(x, str) for x in found) else ()

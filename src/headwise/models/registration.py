"""Makes the Auto classes of transformers know headwise models, without importing transformers.

`import headwise` must stay light, so the registration waits on the import system: when the module
that holds an Auto class has been imported, by anyone and in any order, the headwise classes are
added to it.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

_lock = threading.RLock()
_done: set[str] = set()


def _register_config(auto: ModuleType, ours: ModuleType) -> None:
    config = ours.HeadwiseConfig
    auto.AutoConfig.register(config.model_type, config, exist_ok=True)


def _register_models(auto: ModuleType, ours: ModuleType) -> None:
    for model_class in ours.TASK_CLASSES:
        auto_class = getattr(auto, str(model_class._auto_class))
        auto_class.register(model_class.config_class, model_class, exist_ok=True)


# transformers' module: our module with the classes it should know, and how it learns them.
_PAIRS: dict[str, tuple[str, Callable[[ModuleType, ModuleType], None]]] = {
    "transformers.models.auto.configuration_auto": (
        "headwise.models.configuration_headwise",
        _register_config,
    ),
    "transformers.models.auto.modeling_auto": (
        "headwise.models.modeling_headwise",
        _register_models,
    ),
}


def install() -> None:
    """Register the headwise classes now or as soon as transformers' Auto classes are imported."""
    with _lock:
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
    for name in _PAIRS:
        _imported(name)


def _imported(name: str) -> None:
    """One module of a pair is there: register if transformers' is, and ours is not half-way.

    Our modules import transformers' Auto classes themselves. Then ours is the one that is half-way,
    and the pair is registered when it is done.
    """
    for theirs, (ours, register) in _PAIRS.items():
        if name in (theirs, ours) and _is_ready(theirs) and not _is_half_way(ours):
            with _lock:
                if theirs in _done:
                    continue
                _done.add(theirs)
            try:
                register(sys.modules[theirs], importlib.import_module(ours))
            except Exception as error:  # importing transformers must not fail because of headwise
                _done.discard(theirs)
                warnings.warn(
                    f"headwise models could not be registered with transformers ({error!r}); "
                    "load them with trust_remote_code=True.",
                    stacklevel=2,
                )


def _is_half_way(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _is_ready(name: str) -> bool:
    return name in sys.modules and not _is_half_way(name)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the awaited modules as usual and adds one step to the end of their import."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PAIRS and all(fullname != ours for ours, _ in _PAIRS.values()):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find and finder is not self else None
            if spec is not None and spec.loader is not None:
                _add_step(fullname, spec.loader)
                return spec
        return None


def _add_step(name: str, loader: importlib.abc.Loader) -> None:
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        module.__spec__._initializing = False  # type: ignore[union-attr]  # it is done now
        _imported(name)

    loader.exec_module = execute_and_register  # type: ignore[method-assign]

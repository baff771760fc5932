"""How the annotations of checked rooms are checked: shapes by jaxtyping, all else by beartype.

    install(rooms) ─► every function and dataclass of these rooms is `checked` as it is imported

To remember during a call what each letter of a shape stands for costs more than many a small
function. So jaxtyping is asked only where shapes are spoken of; beartype alone checks the rest. An
int will do for a float, as for mypy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def install(modules: Sequence[str]) -> None:
    """Check what is imported from these modules from now on."""
    jaxtyping.jaxtyped = _decorator  # the name that the hook writes above every definition
    jaxtyping.install_import_hook(modules, None)


def _decorator(*, typechecker: Any) -> Any:
    return checked


def checked(thing: Any) -> Any:
    """The function, or the dataclass, with its annotations checked at every call.

    Annotations that cannot be read while a program runs, such as names that only type checkers
    import, or Self in a method or a protocol, are left to mypy.
    """
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing):
            thing.__init__ = checked(thing.__init__)
        return thing
    hints = {name: _hint(hint, thing.__globals__) for name, hint in thing.__annotations__.items()}
    thing.__annotations__ = hints
    try:
        made = _beartype(thing)
    except BeartypeDecorHintException:
        return thing
    if not any(map(_has_shape, hints.values())):
        return made

    @functools.wraps(made)
    def with_shapes(*args: Any, **kwargs: Any) -> Any:
        with _jaxtyped("context"):  # in which every letter stands for one size
            return made(*args, **kwargs)

    return with_shapes


def _hint(written: Any, names: dict[str, Any]) -> Any:
    def one() -> None: ...

    one.__annotations__ = {"one": written}
    try:
        return get_type_hints(one, names, include_extras=True)["one"]
    except Exception:  # unknown names, and shapes that are for people
        return Any


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))

"""How the annotations of checked rooms are checked: an int will do for a float, as for mypy."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    """The function with its annotations checked at every call.

    Annotations that cannot be checked while a program runs, such as Self in a method or a
    protocol, are left to mypy.
    """
    try:
        return _check(function)
    except BeartypeDecorHintException:
        return function

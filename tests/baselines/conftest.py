"""Tiny models as the recipes see them, each made once per module."""

import pytest


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def seen(request, subject, made):
    """Finds a model by its name, seen as the module's own `Seen`; tests put weights into it."""

    def find(name):
        if name not in made:
            made[name] = request.module.Seen(subject(name))
        return made[name]

    return find

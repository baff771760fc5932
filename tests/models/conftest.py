"""One model of every family, by name; the fast lane has one of each kind, where it is enough."""

import pytest

from tests import lanes, tiny


@pytest.fixture(params=tiny.CONFIGS)
def every_family(request) -> str:
    return request.param


@pytest.fixture(params=lanes.slow_but(tiny.QUICK, tiny.CONFIGS))
def any_family(request) -> str:
    return request.param


@pytest.fixture(params=lanes.slow_but(tiny.QUICK, tiny.DECODERS))
def causal_family(request) -> str:
    return request.param

"""One model of every family, by name."""

import pytest

from tests import tiny


@pytest.fixture(params=tiny.CONFIGS)
def any_family(request) -> str:
    return request.param


@pytest.fixture(params=tiny.DECODERS)
def causal_family(request) -> str:
    return request.param

"""One model of every family that can be cut, by name; encoders are cut without a head."""

import pytest

from tests import tiny

CUT = (*tiny.DECODERS, *(f"{name}_bare" for name in tiny.ENCODERS), "vit")


@pytest.fixture(params=CUT)
def any_family(request) -> str:
    return request.param

"""One model of every family that can be cut, by name; encoders are cut without a head."""

import pytest

from tests import lanes, tiny

CUT = (*tiny.DECODERS, *(f"{name}_bare" for name in tiny.ENCODERS), "vit")


@pytest.fixture(params=lanes.slow_but(("llama", "qwen3", "gpt2", "bert_bare", "vit"), CUT))
def any_family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def profiled_models():
    return {}


@pytest.fixture
def shared(profiled_models, tmp_path_factory):
    """Finds a tiny model with its profile, each made once; tests leave model and folder alone."""

    def find(name):
        if name not in profiled_models:
            profiled_models[name] = tiny.ProfiledModel(name, tmp_path_factory.mktemp(name))
        return profiled_models[name]

    return find

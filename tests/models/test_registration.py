"""`import headwise` makes the Auto classes know its models, in any order and without cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headwise.models.build import convert
from tests import tiny

_CHECK = """
import transformers
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
config = transformers.AutoConfig.from_pretrained(folder)
assert type(model).__module__ == "headwise.models.modeling_headwise", type(model)
assert type(config).__module__ == "headwise.models.configuration_headwise", type(config)
"""
_LIGHT = """
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
_HEADWISE = "import headwise.models.registration as r; r.install(); r.install()\n"
_ORDERS = {
    "headwise first": _HEADWISE + _LIGHT + _CHECK,
    "auto classes first": "from transformers import AutoModel, AutoConfig\n" + _HEADWISE + _CHECK,
    "our model first": _HEADWISE + "import headwise.models.modeling_headwise\n" + _CHECK,
    "in a thread": _HEADWISE
    # transformers itself first: its own first import is not safe in two threads at once
    + "import threading, transformers\n"
    + "t = threading.Thread(target=lambda: transformers.AutoModelForCausalLM)\n"
    + "t.start(); transformers.AutoModelForCausalLM; t.join()\n"
    + _CHECK,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    convert(tiny.stock("llama")).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("order", list(_ORDERS))
def test_no_flag_is_needed(order, folder):
    code = f"import sys; folder = {str(folder)!r}\n" + _ORDERS[order]
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:headwise", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_failed_registration_warns_and_spares_the_import(monkeypatch):
    from headwise.models import registration

    def fail(theirs, ours):
        raise RuntimeError("too new")

    monkeypatch.setattr(registration, "_PAIRS", {"json": ("headwise.plan", fail)})
    with pytest.warns(UserWarning, match=r"could not be registered .*too new"):
        registration._imported("json")
    assert "json" not in registration._done

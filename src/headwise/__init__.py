"""headwise decides how many attention heads, and how wide, each layer of a Transformer deserves.

The names below are loaded when first used, so that `import headwise` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headwise.nn import registration

if TYPE_CHECKING:
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.plan import Budget as Budget
    from headwise.plan import Cost as Cost
    from headwise.plan import HeadSpec as HeadSpec
    from headwise.plan import LayerPlan as LayerPlan
    from headwise.plan import Limit as Limit
    from headwise.plan import ModelShape as ModelShape
    from headwise.plan import Plan as Plan

__version__ = "0.1.0"

_HOME = {
    "HeadwiseError": "headwise.errors",
    **dict.fromkeys(
        ("Budget", "Cost", "HeadSpec", "LayerPlan", "Limit", "ModelShape", "Plan"), "headwise.plan"
    ),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


# So that AutoModelForCausalLM.from_pretrained knows headwise models; waits for transformers.
registration.install()

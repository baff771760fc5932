"""headwise decides how many attention heads, and how wide, each layer of a Transformer deserves.

    import headwise as hw

    result = hw.compress("./model", attn_params="75%", text="notes.txt", out="smaller")

The names below are loaded on first use, so that `import headwise` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headwise.models import registration

if TYPE_CHECKING:
    from headwise.comparing import compare as compare
    from headwise.designing import DesignResult as DesignResult
    from headwise.designing import design as design
    from headwise.errors import HeadwiseError as HeadwiseError
    from headwise.exporting.push import PushResult as PushResult
    from headwise.exporting.record import ExportResult as ExportResult
    from headwise.measure.evaluation import Evaluation as Evaluation
    from headwise.measure.generation import Continuation as Continuation
    from headwise.measure.record import Targets as Targets
    from headwise.measure.record import Verification as Verification
    from headwise.pipeline import CompressResult as CompressResult
    from headwise.pipeline import CutResult as CutResult
    from headwise.pipeline import compress as compress
    from headwise.pipeline import cut as cut
    from headwise.pipeline import profile as profile
    from headwise.plan import Budget as Budget
    from headwise.plan import Cost as Cost
    from headwise.plan import HeadSpec as HeadSpec
    from headwise.plan import LayerPlan as LayerPlan
    from headwise.plan import Limit as Limit
    from headwise.plan import ModelShape as ModelShape
    from headwise.plan import Plan as Plan
    from headwise.planning.targets import RunsIn as RunsIn
    from headwise.planning.targets import runs_in as runs_in
    from headwise.plans import fit as fit
    from headwise.plans import new_plan as new_plan
    from headwise.plans import sweep as sweep
    from headwise.profiling.format import Profile as Profile
    from headwise.reporting.pages import report as report
    from headwise.source import Source as Source
    from headwise.source import open_source as open_source
    from headwise.training.recover import RecoverResult as RecoverResult
    from headwise.training.train import TrainResult as TrainResult
    from headwise.verbs import evaluate as evaluate
    from headwise.verbs import export as export
    from headwise.verbs import generate as generate
    from headwise.verbs import load as load
    from headwise.verbs import push as push
    from headwise.verbs import recover as recover
    from headwise.verbs import run as run
    from headwise.verbs import train as train
    from headwise.verbs import verify as verify

__version__ = "0.1.0"

# The public names of each module.
_NAMES = {
    "headwise.comparing": "compare",
    "headwise.designing": "DesignResult design",
    "headwise.errors": "HeadwiseError",
    "headwise.exporting.push": "PushResult",
    "headwise.exporting.record": "ExportResult",
    "headwise.measure.evaluation": "Evaluation",
    "headwise.measure.generation": "Continuation",
    "headwise.measure.record": "Targets Verification",
    "headwise.pipeline": "CompressResult CutResult compress cut profile",
    "headwise.plan": "Budget Cost HeadSpec LayerPlan Limit ModelShape Plan",
    "headwise.planning.targets": "RunsIn runs_in",
    "headwise.plans": "fit new_plan sweep",
    "headwise.profiling.format": "Profile",
    "headwise.reporting.pages": "report",
    "headwise.source": "Source open_source",
    "headwise.training.recover": "RecoverResult",
    "headwise.training.train": "TrainResult",
    "headwise.verbs": "evaluate export generate load push recover run train verify",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


# So that AutoModelForCausalLM.from_pretrained knows headwise models; waits for transformers.
registration.install()

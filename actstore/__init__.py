"""The public names of actstore: each layer of a model chooses where its activations wait for backward.

>>> store = actstore.ActivationStore(model, "blocks.* : int8")
>>> with store:
...     loss = model(x, y)
>>> loss.backward()
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from actstore._version import __version__
from actstore.errors import ActstoreError
from actstore.policy import Auto, Bits, Derive, Encode, Keep, Offload, Recompute, Rules
from actstore.session.activation_store import ActivationStore
from actstore.session.observers import SampleErrors, Verify
from actstore.session.tagging import tag
from actstore.tiers import Disk, Group, Host, PluginTier, Window
from actstore.trace import Trace

__all__ = [
    "ActivationStore",
    "ActstoreError",
    "Auto",
    "Bits",
    "Derive",
    "Disk",
    "Encode",
    "Group",
    "Host",
    "Keep",
    "Offload",
    "Plan",
    "PluginTier",
    "Recompute",
    "Report",
    "Rules",
    "SampleErrors",
    "Trace",
    "Verify",
    "Window",
    "__version__",
    "check_gradients",
    "encode",
    "fit_step",
    "inspect_step",
    "make_plan",
    "measure_gradient_error",
    "tag",
    "tile",
]


if _TYPE_CHECKING:
    from actstore.check import check_gradients, measure_gradient_error
    from actstore.inspection import fit_step, inspect_step
    from actstore.plan.plan import Plan
    from actstore.policy.encoded import encode
    from actstore.recompute.tiles import tile
    from actstore.session.planning import make_plan
    from actstore.session.report import Report

_LATER = {  # names whose modules are imported when they are used
    "Plan": "actstore.plan.plan",
    "Report": "actstore.session.report",
    "check_gradients": "actstore.check",
    "encode": "actstore.policy.encoded",
    "fit_step": "actstore.inspection",
    "inspect_step": "actstore.inspection",
    "make_plan": "actstore.session.planning",
    "measure_gradient_error": "actstore.check",
    "tile": "actstore.recompute.tiles",
}


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module 'actstore' has no attribute {name!r}")
    found = globals()[name] = getattr(_import_module(_LATER[name]), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *_LATER]

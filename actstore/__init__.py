"""The public names of actstore: each layer of a model chooses where its activations wait for backward.

>>> store = actstore.ActivationStore(model, "blocks.* : int8")
>>> with store:
...     loss = model(x, y)
>>> loss.backward()
"""

from typing import Any as _Any

from actstore._version import __version__
from actstore.check import check_gradients, measure_gradient_error
from actstore.errors import ActstoreError
from actstore.inspection import fit_step, inspect_step
from actstore.plan.plan import Plan
from actstore.policy import Auto, Bits, Derive, Encode, Keep, Offload, Recompute, Rules
from actstore.policy.encoded import encode
from actstore.session import former as _former
from actstore.session.activation_store import ActivationStore
from actstore.session.observers import SampleErrors, Verify
from actstore.session.planning import make_plan
from actstore.session.report import Report
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
]


def __getattr__(name: str) -> _Any:
    raise _former.missing(name)

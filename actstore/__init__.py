"""The public names of actstore: each layer of a model chooses where its activations wait for backward.

>>> store = actstore.ActivationStore(model, "blocks.* : int8")
>>> with store:
...     loss = model(x, y)
>>> loss.backward()
"""

from actstore._version import __version__
from actstore.accuracy import ErrorFigures, GradientEffect, SiteEffect
from actstore.accuracy.bits.payloads import Choice
from actstore.base.spec import Site, Spec
from actstore.check import Difference, GradientCheck, GradientDeviation, check_gradients, measure_gradient_error
from actstore.codecs import Codec, Int8, Raw
from actstore.errors import (
    AccuracyError,
    ActstoreError,
    CapacityError,
    ChainError,
    ConfigError,
    KernelBuildError,
    KernelError,
    KernelUnavailable,
    MutationError,
    PayloadError,
    PolicyError,
    SpecError,
    StateError,
    TransferError,
    UnknownCodecError,
)
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile
from actstore.policy import Decision, Derive, Encode, Keep, Offload, Policy, Recompute, Rules
from actstore.policy.encoded import Encoded, encode
from actstore.session.activation_store import ActivationStore, tag
from actstore.session.planning import make_plan
from actstore.session.report import Report, SiteReport

__all__ = [
    "AccuracyError",
    "ActivationStore",
    "ActstoreError",
    "CapacityError",
    "ChainError",
    "Choice",
    "Codec",
    "ConfigError",
    "Decision",
    "Derive",
    "Difference",
    "Encode",
    "Encoded",
    "ErrorFigures",
    "GradientCheck",
    "GradientDeviation",
    "GradientEffect",
    "Int8",
    "Keep",
    "KernelBuildError",
    "KernelError",
    "KernelUnavailable",
    "MutationError",
    "Offload",
    "PayloadError",
    "Plan",
    "Policy",
    "PolicyError",
    "Profile",
    "Raw",
    "Recompute",
    "Report",
    "Rules",
    "Site",
    "SiteEffect",
    "SiteReport",
    "Spec",
    "SpecError",
    "StateError",
    "TransferError",
    "UnknownCodecError",
    "__version__",
    "check_gradients",
    "encode",
    "make_plan",
    "measure_gradient_error",
    "tag",
]

"""Errors for forms of the interface before 0.2, each with its present form."""

from __future__ import annotations

from collections.abc import Iterable

from actstore.errors import ConfigError

ARGUMENTS = {
    "budget": 'policy=Auto(budget="20GiB") or policy=Bits(budget="4GiB")',
    "max_noise": 'policy=Auto("20GiB", max_noise=0.1) or policy=Bits(max_noise=0.1)',
    "host_budget": 'tiers=[Host("64GiB")]',
    "disk_budget": 'tiers=[Disk("/scratch", budget="200GiB")]',
    "disk_path": 'tiers=[Disk("/scratch")]',
    "gpu_direct": 'tiers=[Disk("/scratch", gpu_direct=True)]',
    "window": 'tiers=[Window("64MiB")]',
    "when_full": 'tiers=[Window(when_full="keep")]',
    "sample_errors": "observe=[SampleErrors(every=200)]",
    "warn_error": "observe=[SampleErrors(warn=0.05)]",
    "fail_error": "observe=[SampleErrors(fail=0.05)]",
    "trace": "observe=[Trace()]",
    "verify": "observe=[Verify()]",
}

RESULTS = (
    "Choice", "Difference", "Encoded", "ErrorFigures", "GradientCheck", "GradientDeviation", "GradientEffect",
    "Profile", "SiteEffect", "SiteReport",
)  # fmt: skip
NAMES = {
    **dict.fromkeys(RESULTS, "actstore.results"),
    **dict.fromkeys(("Codec", "Int8", "Raw"), "actstore.codecs"),
    **dict.fromkeys(("Decision", "Policy", "Site", "Spec"), "actstore.policy"),
    **dict.fromkeys(
        (
            "AccuracyError", "CapacityError", "ChainError", "ConfigError", "KernelBuildError", "KernelError",
            "KernelUnavailable", "MutationError", "PayloadError", "PolicyError", "SpecError", "StateError",
            "TransferError", "UnknownCodecError",
        ),
        "actstore.errors",
    ),
}  # fmt: skip


def refuse(arguments: Iterable[str], function: str = "ActivationStore") -> None:
    """Refuse arguments that `function` does not have.

    Raises
    ------
    ConfigError : they are of an earlier form; the message has the present form
    TypeError : they are unknown
    """
    for name in arguments:
        if name in ARGUMENTS:
            raise ConfigError(f"{name}=: {function} has no such argument any more. Write {ARGUMENTS[name]}.")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def missing(name: str) -> AttributeError:
    """Return the error for a name that is missing at the package's top."""
    if name in NAMES:
        return AttributeError(f"actstore.{name} has moved. Write: from {NAMES[name]} import {name}")
    return AttributeError(f"module 'actstore' has no attribute {name!r}")

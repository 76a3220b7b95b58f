"""Every error that actstore raises. Each also derives from a builtin, and carries its facts as attributes."""

from __future__ import annotations

from typing import Any

# What code raises that reads a file which was edited, or has another format.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ActstoreError(Exception):
    """Base of all actstore errors.

    Keyword facts given at construction become attributes, so that a caller never parses a message.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def add_context(self, text: str) -> None:
        """Put the place of the error before the message; called once, at the boundary to user code."""
        self.args = (f"{text}: {self.args[0]}",)


class ConfigError(ActstoreError, ValueError):
    """An option or a combination of options that cannot work."""


class PolicyError(ConfigError):
    """A policy that does not parse, or does not fit the model."""


class ChainError(ConfigError):
    """Codecs or tiers combined in a way that cannot work."""


class UnknownCodecError(ConfigError):
    """A codec name that is not registered."""


class SpecError(ActstoreError, ValueError):
    """A tensor whose shape, stride, dtype or device is not the promised one."""


class PayloadError(ActstoreError, ValueError):
    """Stored bytes that are truncated, altered or of another size than their record says."""


class CapacityError(ActstoreError, MemoryError):
    """Tiers without room for a payload, in a store that was told to be strict."""


class TransferError(ActstoreError, OSError):
    """A failed move of bytes to or from a tier."""


class ReplicaError(ActstoreError, ValueError):
    """Tensors that must be equal on all ranks of a group, and differ."""


class KernelError(ActstoreError, RuntimeError):
    """A failure of a compiled kernel."""


class KernelBuildError(KernelError):
    """A kernel that did not compile; `log` holds the compiler's output."""


class KernelUnavailable(KernelError):
    """A missing package that compiles or runs a kernel."""


class StateError(ActstoreError, RuntimeError):
    """A use of the store in an order or a place where it cannot be correct."""


class AccuracyError(ActstoreError, ArithmeticError):
    """Payloads that lost more than the store was told to allow."""


class MutationError(ActstoreError, RuntimeError):
    """A saved tensor that was changed in place before backward read it."""

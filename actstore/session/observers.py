"""Values for ``ActivationStore(observe=...)``: measurements and records of the store's work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from actstore.errors import ConfigError
from actstore.trace import Trace

SAMPLE_INTERVAL_STEPS = 200  # a sampled step takes about twice as long: half a per cent of the time


@dataclass(frozen=True)
class SampleErrors:
    """The measurement of the loss of lossy payloads. It is on by default; ``SampleErrors(every=0)`` switches it off.

    In a sampled step, each lossy payload is decoded at once and compared with its tensor, for the errors in
    `Report`, `Trace` and loggers. That takes the memory of the tensor for a moment, and until the next step ends
    at most 1,024 elements of each weight's gradient. It changes nothing else. Steps that `Auto` measures are skipped.
    Graphs of `ActivationStore.compile` measure where it is given, not by default.

    Parameters
    ----------
    every : steps from one sampled step to the next; the first step with lossy payloads is sampled. 0 for never
    warn : the relative error (0.05 is 5 %) above which a site gives a RuntimeWarning, once for each site
    fail : the relative error above which the store raises AccuracyError, once: at the next entry after the sampled
        step, or in `report` or `close` if that comes first. The entry then waits until the device has reached the last
        sampled payload. Otherwise no thread waits, and a later entry that finds the figures gives the warnings

    Raises
    ------
    ConfigError : `every` is not a number of steps, a threshold is not a relative error, or no step is sampled for it
    """

    every: int = SAMPLE_INTERVAL_STEPS
    warn: float | None = None
    fail: float | None = None

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 0:
            raise ConfigError(f"SampleErrors(every={self.every!r}): must be an int >= 0. Use 0 to sample no step.")
        for name in ("warn", "fail"):
            error = getattr(self, name)
            if error is None:
                continue
            if type(error) not in (int, float) or not error >= 0:
                raise ConfigError(
                    f"SampleErrors({name}={error!r}): must be a relative error. Give a number such as 0.05, for 5 %."
                )
            if not self.every:
                raise ConfigError(
                    f"SampleErrors(every=0, {name}={error!r}): no error is measured. Give every=1 or more."
                )


@dataclass(frozen=True)
class Verify:
    """The check of every payload against the checksum of its encoding.

    Also fills memory with NaN before reuse. Slow, and the host waits for the device: for tests and for the
    search for a fault.
    """


class Observers(NamedTuple):
    """The observers of one store."""

    sample: SampleErrors
    trace: Trace | None
    verify: bool


def read_observers(given: Any) -> Observers:
    """Return the observers of a store.

    Raises
    ------
    ConfigError : another object is among them, or one kind twice
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"observe={given!r}: must be a list. Write observe=[SampleErrors(every=100), Trace()].")
    found: dict[type, Any] = {}
    for each in given:
        kind = next((kind for kind in (SampleErrors, Trace, Verify) if isinstance(each, kind)), None)
        if kind is None:
            raise ConfigError(f"observe: unknown {each!r}. Give SampleErrors(...), Trace() or Verify().")
        if kind in found:
            raise ConfigError(f"observe: {kind.__name__} is given twice. Leave one of them out.")
        found[kind] = each
    return Observers(found.get(SampleErrors, SampleErrors()), found.get(Trace), Verify in found)

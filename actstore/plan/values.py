"""The limits of the user for a plan, and the values of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from actstore.errors import ConfigError
from actstore.plan.profile import Profile


@dataclass(frozen=True)
class Grants:
    """Limits that the user grants.

    Attributes
    ----------
    device : limit of the bytes on the compute device
    host, disk : limits in host memory and on disk; None for all that exist, 0 for none
    max_noise : variance that payloads may add to the gradients, as a fraction of that from batch to batch
    tiles : whether gradients may differ by the rounding of tiles
    total : limit of the bytes on the compute device, all others than activations among them; None without one
    """

    device: int
    host: int | None
    disk: int | None
    max_noise: float
    tiles: bool = False
    total: int | None = None


@dataclass(frozen=True)
class UnitPlan:
    """Decision of one unit and its effects; sizes in bytes, times in ms.

    Attributes
    ----------
    unit : name of the module; "" for the tensors that the model itself and the loss save
    decision : policy text, with names relative to the unit
    saved : bytes that plain autograd would hold
    held : bytes held on the device between forward and backward
    moved : bytes that go to host memory or to disk
    extra : time that the decision adds to the step's compute
    stall : time that compute waits there
    """

    unit: str
    decision: str
    saved: float
    held: float
    moved: float
    extra: float
    stall: float


@dataclass(frozen=True)
class Prediction:
    """Predicted or measured time, peak and noise of a step.

    Attributes
    ----------
    step : milliseconds
    peak : bytes on the device
    noise : variance that payloads add to the gradients, as a fraction of that from batch to batch; predicted only
    """

    step: float
    peak: float
    noise: float = 0.0


@dataclass(frozen=True)
class PlanValues:
    """Fields of a `Plan`; its docstring describes them."""

    text: str
    budget: int
    limits: dict[str, float | None]
    plain: float
    predicted: Prediction
    bound: float | None
    certificate: str
    prices: dict[str, float]
    window: int | None
    limit: str
    rows: tuple[UnitPlan, ...]
    profile: Profile
    measured: Prediction | None = None
    history: tuple[str, ...] = field(default=())
    rival: str = ""

    @property
    def decisions(self) -> dict[str, str]:
        """Decisions by unit."""
        return {row.unit: row.decision for row in self.rows}

    def check(self, model: str, machine: dict[str, str]) -> None:
        """Refuse a model or a machine that the plan was not made for.

        Raises
        ------
        ConfigError : the model or the machine differs; the text names the differences and the next step
        """
        known = self.profile.model
        found = {"model": known if model in known.split() else model, **machine}
        wanted = {"model": known, **self.profile.machine}
        different = "; ".join(
            f"{key}: planned for {wanted.get(key)}, here {found.get(key)}"
            for key in wanted
            if wanted.get(key) != found.get(key)
        )
        if different:
            raise ConfigError(
                f"the plan was made for another model or machine ({different}). Plan again with "
                "ActivationStore(model, Auto(...)), or run its choices all the same: policy=plan.text.",
                differences=different,
            )

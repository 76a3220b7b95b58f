"""Plans of compiled regions: what was chosen under a budget, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from actstore.base.units import format_nbytes
from actstore.compiled.budget.lane import TierLane
from actstore.compiled.budget.lossy import LossyModules


@dataclass(frozen=True)
class GraphUnit:
    """A unit of a compiled region: operators of forward that run one after the other. Sizes in bytes, times in ms.

    Attributes
    ----------
    name : the modules of its first and its last operator
    saved : bytes that PyTorch itself saves of it
    held : bytes that the plan saves of it on the device
    again : operators of it that backward runs again
    away : bytes that the plan saves of it in a tier
    encoded : bytes of `held` that stand for tensors with a loss
    """

    name: str
    saved: int
    held: int
    again: int
    away: int = 0
    encoded: int = 0


@dataclass
class RegionBudget:
    """The budget of a compiled model.

    Attributes
    ----------
    nbytes : upper bound of what the model may allocate in a step
    tier : where saved tensors may wait as well, with the upper bound of its bytes there; None for nowhere
    windows : that a plan may choose from
    lane_of : returns the way there from a device, measured once
    lossy : modules whose saved tensors may be encoded with a loss; None for none
    plan : what was chosen last; None until the model is compiled
    """

    nbytes: int
    tier: tuple[str, float] | None = None
    windows: tuple[int, ...] = ()
    lane_of: Callable[[torch.device], TierLane | None] = lambda device: None
    lossy: LossyModules | None = None
    plan: GraphPlan | None = None

    def allow(
        self,
        tier: tuple[str, float] | None,
        windows: tuple[int, ...],
        lane_of: Callable[[torch.device], TierLane | None],
    ) -> None:
        """Let saved tensors wait in a tier, too."""
        self.tier, self.windows, self.lane_of = tier, windows, lane_of

    def allow_loss(self, lossy: LossyModules | None) -> None:
        """Let saved tensors of these modules be encoded with a loss."""
        self.lossy = lossy


@dataclass(frozen=True)
class GraphPlan:
    """The plan of a compiled region: what it saves, and what it runs again. Sizes in bytes, times in ms.

    Attributes
    ----------
    budget : upper bound of what the region may allocate in a step
    predicted_peak : peak of the plan; under Inductor as counted in the code that it wrote
    held : bytes that forward leaves for backward on the device
    predicted_ms : time of the operators of a step
    plain_peak, plain_held, plain_ms : the same of what PyTorch itself saves
    least : the smallest budget that has a plan
    certificate : prediction and bound of the planner's model as text; empty where everything fits
    units : in the order of forward
    away : bytes that forward leaves in a tier
    tier : its name; empty for none
    window : bytes that may be on their way there, or wait for backward
    encoded : bytes of payloads in `held`, which stand for tensors with a loss
    codec : of these payloads; empty for none
    noise : variance that they may add to the gradients of the weights, as a fraction of their variance from batch to
        batch, as the eager steps have measured it for their modules
    """

    budget: int
    predicted_peak: int
    held: int
    predicted_ms: float
    plain_peak: int
    plain_held: int
    plain_ms: float
    least: int
    certificate: str
    units: tuple[GraphUnit, ...]
    away: int = 0
    tier: str = ""
    window: int = 0
    encoded: int = 0
    codec: str = ""
    noise: float = 0.0

    @property
    def times_plain(self) -> float:
        """Predicted time over that of what PyTorch itself saves."""
        return self.predicted_ms / self.plain_ms if self.plain_ms else 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GraphPlan:
        """Build a plan from the result of `to_dict`."""
        return cls(**values | {"units": tuple(GraphUnit(**unit) for unit in values["units"])})

    def __str__(self) -> str:
        lines = [
            f"Compiled plan within {format_nbytes(self.budget)}: peak {format_nbytes(self.predicted_peak)} where plain "
            f"compilation has {format_nbytes(self.plain_peak)}, {self.times_plain:.2f} times its time.",
            self.certificate or "Everything fits: the graphs are PyTorch's own.",
        ]
        if self.away:
            lines.append(f"{format_nbytes(self.away)} wait in the tier {self.tier!r}.")
        if self.encoded:
            lines.append(
                f"{format_nbytes(self.encoded)} are {self.codec}, which may add {self.noise:.2g} of the variance from "
                "batch to batch to the gradients."
            )
        for unit in self.units:
            if unit.again or unit.away or unit.held != unit.saved:
                away = f", {format_nbytes(unit.encoded)} as {self.codec}" if unit.encoded else ""
                away += f", {format_nbytes(unit.away)} in {self.tier}" if unit.away else ""
                lines.append(
                    f"  {unit.name}: holds {format_nbytes(unit.held)} of {format_nbytes(unit.saved)}{away}, runs "
                    f"{unit.again} operators again"
                )
        return "\n".join(lines)

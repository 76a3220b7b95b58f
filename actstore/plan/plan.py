"""Plans: the decision of each unit of a model under a budget, and the result, as a file that can be run again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actstore.base.units import format_nbytes
from actstore.errors import ConfigError, PayloadError
from actstore.plan.fields import read_as
from actstore.plan.profile import Profile, read_json, write_json
from actstore.plan.values import PlanValues, Prediction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "actstore plan 1"


@dataclass(frozen=True)
class Plan(PlanValues):
    """Decisions for each unit of a model under a budget. As `policy=` of an ActivationStore, a plan runs unchanged.

    Attributes
    ----------
    text : the policy, as text
    budget : limit of the peak of activations on the compute device (`peak_held_bytes`)
    limits : the planner's limits: bytes on the "device" (less than the budget where steps held more than predicted), in
        "host" memory and on "disk" (None: no limit), "max_noise", the noise that payloads may add, and "tiles", 1
        where gradients may differ by the rounding of tiles, and "total", the bound on all device memory, where given
    plain : milliseconds of a step that keeps everything
    predicted, measured : figures of the step; `measured` is None before the plan has run
    bound : lower bound on the ms of any choice among the same options; None where it was not computed
    certificate : prediction and bound as text
    prices : milliseconds that one more MiB saves, by what is limited: "device", "host", "disk"
    window : limit of the bytes in transfer at once; None where nothing moves
    limit : the limiting resource of the step, in words
    rows : by unit, in the order of forward
    profile : the measurements that the plan was made from
    rival : the fastest policy in one line beside the plan, in words
    """

    def _ran(self, step: float, peak: float) -> Plan:
        """Return the same plan, with the measured time and peak of a step."""
        return replace(self, measured=Prediction(step, peak))

    # -- files --------------------------------------------------------------------------------------------------------

    def write(self, path: str | Path) -> None:
        """Write JSON.

        Raises
        ------
        ConfigError : the file cannot be written
        """
        write_json(Path(path), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "profile": self.profile.to_dict()}

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read what `write` wrote. Nothing in the file is executed.

        Raises
        ------
        ConfigError : the file cannot be opened
        PayloadError : the file is not a plan; the error names the field
        """
        return cls.from_dict(read_json(Path(path), FORMAT), str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], path: str = "") -> Plan:
        """Build a plan from the result of `to_dict`.

        Raises
        ------
        PayloadError : the values are not a plan; the error names the field
        """
        values = {name: value for name, value in values.items() if name != "format"}
        if isinstance(values.get("profile"), dict):
            values["profile"] = Profile.from_dict(values["profile"], path)
        try:
            return read_as(cls, values)
        except ConfigError as error:
            raise PayloadError(f"{path}: not a plan: {error} Plan again.", path=str(path), **error.facts) from error

    def compare(self, other: Plan) -> str:
        """Return the differences of another plan in decisions and predictions, for people; empty for equal plans."""
        mine, theirs = ({row.unit: row.decision for row in plan.rows} for plan in (self, other))
        lines = [
            f"{name or '(the model itself)'}: {mine.get(name, 'not planned')} -> {theirs.get(name, 'not planned')}"
            for name in dict.fromkeys([*mine, *theirs])
            if mine.get(name) != theirs.get(name)
        ]
        if lines or self.budget != other.budget:
            lines.append(
                f"budget {format_nbytes(self.budget)} -> {format_nbytes(other.budget)}, "
                f"step {self.predicted.step:.1f} -> {other.predicted.step:.1f} ms, "
                f"peak {format_nbytes(self.predicted.peak)} -> {format_nbytes(other.predicted.peak)}"
            )
        return "\n".join(lines)

    # -- for people ---------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return the text of the plan: decisions and reasons, gains of more memory, the step's limit, memory use."""
        from actstore.plan.explain import explain

        return explain(self)

    def plot(self) -> Figure:
        """Draw the gains of more memory, and the decision of each unit. The solver runs for some seconds.

        Raises
        ------
        ConfigError : matplotlib is not installed (the extra `bench`)
        """
        from actstore.plan.plot import draw

        return draw(self)

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        from actstore.plan.explain import to_html

        return to_html(self)

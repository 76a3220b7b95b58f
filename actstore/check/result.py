"""Results of a comparison, as values and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from actstore.base.units import format_nbytes
from actstore.display import html
from actstore.display.text import finite
from actstore.rerun.values import relative

Verdict = Literal["equal", "within tolerance", "different", "no verdict"]
PRINTED_ROWS = 24
IDLE_TEXT = (
    "Every tensor was kept, and so this says little. store.report() has the reasons: for small ones give min_bytes=0."
)
CANCELLATION_SHARE = 0.01  # of its share of all gradients: a gradient below that counts as zero but for rounding


@dataclass(frozen=True)
class TensorComparison:
    """A parameter's gradient, an output or a buffer, in both runs.

    norm : norm of the finite plain values
    error_norm : norm of the difference; infinite where only one of two elements is finite, or the shapes differ
    max_abs_error : the largest difference of two elements
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    equal: bool  # bit for bit
    norm: float
    error_norm: float
    max_abs_error: float

    @property
    def relative_error(self) -> float:
        """Norm of the difference by the norm of the plain values."""
        return relative(self.error_norm, self.norm)

    def passes(self, tolerance: float, share: float = 0.0) -> bool:
        """Return whether the error is within the tolerance.

        share : the norm of these elements if all gradients were of one size. A gradient far below that is a sum that
            cancels (the bias in front of a normalization, or of attention's keys); `share` then replaces its norm.
        """
        reference = self.norm if self.norm >= CANCELLATION_SHARE * share else share
        return self.equal or (tolerance > 0 and self.error_norm <= tolerance * reference)


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs.

    kind : "forward output", "gradient", "output of the step" or "buffer"
    module : qualified name; "" for the model itself, None for a tensor outside of all modules
    call : which call of the module in the step, from 0
    operation : the name of the autograd node that computed the gradient, "" where that is unknown
    incoming : whether the gradient already differed on input to `operation`, as code outside of all modules computed it
    index : position among the outputs, or among the gradients that the operation gives to its inputs
    relative_error, max_abs_error : None where a second run did not show the difference again
    """

    kind: str
    module: str | None
    call: int
    operation: str
    incoming: bool
    index: int
    shape: tuple[int, ...]
    dtype: str
    relative_error: float | None = None
    max_abs_error: float | None = None
    name: str = ""  # the row's name, for a tensor outside of all modules

    @property
    def site(self) -> str:
        """Description of the tensor's position."""
        if self.module is None:
            return f"{self.kind} {self.name}"
        module = f"'{self.module}'" if self.module else "the model itself"
        if self.call:
            module += f", call {self.call + 1}"
        if not self.operation:
            return f"output {self.index} of {module}"
        if self.incoming:
            return f"gradient that comes to {self.operation} in {module} from outside of the modules"
        return f"gradient {self.index} from {self.operation} in {module}"

    def __str__(self) -> str:
        text = f"{self.site}, {self.dtype} {list(self.shape)}"
        if self.relative_error is None or self.max_abs_error is None:
            return text
        return f"{text}: {_figures(self.relative_error, self.max_abs_error)}"


@dataclass(frozen=True)
class GradientCheck:
    """Result of `check_gradients`. `str()` gives a text for people.

    verdict : "equal" bit for bit; "within tolerance"; "different"; or "no verdict", where plain training differs from
        itself, and `first` says where
    first : the first difference; None for equal runs
    loss : the first number that the step returned, plainly and with the store; None where it returned none
    parameters, outputs, buffers : a comparison for each gradient, output and buffer, from the worst run
    runs : number of runs with the store
    saved_bytes, stored_bytes, held_bytes : of the store's last run, as in its report
    """

    verdict: Verdict
    first: Difference | None
    policy: str
    tolerance: float
    loss: tuple[float, float] | None
    parameters: tuple[TensorComparison, ...]
    outputs: tuple[TensorComparison, ...]
    buffers: tuple[TensorComparison, ...]
    runs: int
    saved_bytes: int
    stored_bytes: int
    held_bytes: int

    @property
    def equal(self) -> bool:
        """True where everything was equal bit for bit."""
        return self.verdict == "equal"

    @property
    def passed(self) -> bool:
        """True where everything was equal, or within the tolerance."""
        return self.verdict in ("equal", "within tolerance")

    @property
    def idle(self) -> bool:
        """True where the store left every tensor as it was, so that the comparison says little."""
        acted = self.stored_bytes or self.held_bytes < self.saved_bytes or "recompute" in self.policy
        return self.runs > 0 and not acted

    def to_dict(self) -> dict[str, Any]:
        """Return all values for JSON; errors that are not finite become text."""
        values = asdict(self)
        for name in ("parameters", "outputs", "buffers"):
            for row, written in zip(getattr(self, name), values[name], strict=True):
                written["relative_error"] = row.relative_error
        found: dict[str, Any] = finite(values, as_text=True)
        return found

    def __str__(self) -> str:
        lines = [self._headline(), *(f"  {what:<9}{text}" for what, text in self._facts())]
        if self.idle:
            lines.append(f"  {IDLE_TEXT}")
        lines.append(f"  {self._counts()}")
        unequal = self._unequal()
        if unequal:
            width = max(len(name) for name, _ in unequal[:PRINTED_ROWS])
            lines += ["", f"  {'':<{width}}  relative error  max |error|  shape"]
            for name, row in unequal[:PRINTED_ROWS]:
                errors = f"{row.relative_error:>14.2e}  {row.max_abs_error:>11.2e}"
                lines.append(f"  {name:<{width}}  {errors}  {row.dtype} {list(row.shape)}")
        return "\n".join([*lines, *(f"  {text}" for text in self._more())])

    def _repr_html_(self) -> str:
        rows = [
            (name, f"{row.relative_error:.2e}", f"{row.max_abs_error:.2e}", f"{row.dtype} {list(row.shape)}")
            for name, row in self._unequal()[:PRINTED_ROWS]
        ]
        return html.section(
            self._headline(),
            html.table(("", ""), self._facts(), words=(0, 1)),
            html.line(IDLE_TEXT if self.idle else ""),
            html.line(self._counts()),
            html.table(("", "relative error", "max |error|", "shape"), rows, words=(0, 3)) if rows else "",
            *map(html.line, self._more()),
        )

    def _facts(self) -> list[tuple[str, str]]:
        """Return the facts beside the errors, each with its name."""
        facts = [] if self.first is None else [("first", str(self.first))]
        if self.loss is not None and self.runs:
            plain, stored = self.loss
            facts.append(("loss", f"{plain:.9g} plain, {stored:.9g} with the store"))
        if self.runs:
            saved, stored_text = format_nbytes(self.saved_bytes), format_nbytes(self.stored_bytes)
            facts.append(("store", f"{self.policy}: {saved} saved, {stored_text} stored; {self.runs} runs"))
        return facts

    def _headline(self) -> str:
        if self.verdict == "equal":
            return "Equal: the step with the store is plain training, bit for bit."
        if self.verdict == "within tolerance":
            return f"Within tolerance: relative errors of at most {self.tolerance:g}, where 0 is bit for bit."
        if self.verdict == "different":
            allowed = f"more than the tolerance of {self.tolerance:g}" if self.tolerance else "not bit for bit the same"
            return f"Different: plain and with the store, {allowed}."
        return (
            "No verdict: the plain step differs from itself when it is run again from the same state. Give it the same "
            "batch each time, its own random generators and schedulers by stateful=, and on a GPU "
            "torch.use_deterministic_algorithms(True)."
        )

    @property
    def _groups(self) -> tuple[tuple[str, tuple[TensorComparison, ...]], ...]:
        return (("gradient of", self.parameters), ("output", self.outputs), ("buffer", self.buffers))

    def _unequal(self) -> list[tuple[str, TensorComparison]]:
        """Return the rows that are not equal bit for bit, with their names, the largest error first."""
        found = [(f"{what} {row.name}", row) for what, rows in self._groups for row in rows if not row.equal]
        return sorted(found, key=lambda pair: -pair[1].relative_error)

    def _counts(self) -> str:
        total = sum(len(rows) for _, rows in self._groups)
        counts = ", ".join(f"{len(r)} {word}" for word, (_, r) in zip(_PLURALS, self._groups, strict=True) if r)
        return f"compared {counts}; {total - len(self._unequal())} of {total} are equal bit for bit"

    def _more(self) -> list[str]:
        left = len(self._unequal()) - PRINTED_ROWS
        lines = [f"and {left} more with smaller errors"] if left > 0 else []
        if self.verdict == "within tolerance":
            zero = sum(row.relative_error > self.tolerance for row in self.parameters)
            if zero:
                lines.append(
                    f"{zero} above {self.tolerance:g}: zero but for rounding, and judged by the norm of all gradients"
                )
        return lines


_PLURALS = ("gradients", "outputs", "buffers")


def _figures(relative: float, largest: float) -> str:
    return f"relative error {relative:.2e}, largest difference {largest:.2e}"

"""The effect of lossy payloads on the gradients of the weights, as figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteEffect:
    """Effect of one site's payloads.

    Attributes
    ----------
    site : name of the site, as in a report
    variance : predicted variance of all weight gradients, by the square of their norm; None where it is not predicted
    sensitivity : the same for each unit of squared relative error of the payload; None where unknown
    reason : the reason why it is not predicted; empty where it is
    by_weight : the variance of each weight's gradient by the square of its own norm, averaged over all elements: the
        relevant figure for optimizers that give each weight its own scale, as Adam does
    nodes : names of the autograd nodes that read the payloads, where it is predicted
    curve : `by_weight` at other squared relative errors of the payloads, as requested
    """

    site: str
    variance: float | None
    sensitivity: float | None
    reason: str
    by_weight: float | None = None
    nodes: tuple[str, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class GradientEffect:
    """Predicted effect of one step's payloads on its gradients.

    Attributes
    ----------
    sites : the sites with lossy payloads
    norm : norm of the gradients of all weights, of this step alone
    noise : the variance of these gradients from batch to batch, by the square of their norm; None before the next step
        has come
    noise_by_weight : the same, as `SiteEffect.by_weight`
    """

    sites: tuple[SiteEffect, ...]
    norm: float
    noise: float | None
    noise_by_weight: float | None = None

    @property
    def variance(self) -> float:
        """Variance of all predicted sites: the errors of their payloads are independent."""
        return sum(site.variance for site in self.sites if site.variance is not None)

    @property
    def error(self) -> float | None:
        """Predicted error relative to the gradients' norm; None where no site is predicted, or the error exceeds 1.

        Errors are assumed to grow as gradients do. Where gradients vanish or explode on the way, that says nothing.
        """
        return self.variance**0.5 if len(self.missing) < len(self.sites) and self.variance <= 1 else None

    @property
    def by_weight(self) -> float:
        """`SiteEffect.by_weight` of all predicted sites."""
        return sum(site.by_weight for site in self.sites if site.by_weight is not None)

    @property
    def missing(self) -> tuple[SiteEffect, ...]:
        """Sites without a prediction."""
        return tuple(site for site in self.sites if site.variance is None)

    def __str__(self) -> str:
        if not self.sites:
            return "gradient error: none, no payload is lossy"
        reasons = "; ".join(sorted({site.reason for site in self.missing}))
        if len(self.missing) == len(self.sites):
            return f"gradient error: not predicted: {reasons}"
        if self.error is None:
            return (
                "gradient error: not predicted: gradients vanish or explode inside the model. Measure it: "
                "actstore.measure_gradient_error"
            )
        bound = "at least " if self.missing else ""
        text = f"gradient error: {bound}{self.error:.2%} of the gradients' norm predicted"
        if self.noise is not None:
            text += f", beside {self.noise**0.5:.2%} from batch to batch"
        if self.missing:
            text += f"; {len(self.missing)} of {len(self.sites)} sites are not predicted: {reasons}"
        return text

"""The controller that finds a codec for each payload during training: it measures a pair of steps, and chooses.

It repeats both later. Every step on the way is an ordinary training step, with the errors that its codecs state.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from torch import Tensor
from torch.nn import Module

from actstore.accuracy.bits.payloads import Choice, Sensitivity, SitePayload
from actstore.accuracy.bits.solve import least_bytes, least_variance
from actstore.accuracy.bits.trials import CANDIDATES, Trials
from actstore.accuracy.influence.effect import GradientEffect
from actstore.accuracy.influence.pairs import Pairs
from actstore.base.ledger import Ledger
from actstore.base.spec import Site, Spec
from actstore.base.units import format_nbytes
from actstore.codecs import Codec, Int8
from actstore.errors import CapacityError, StateError
from actstore.plan.fields import read_as
from actstore.policy import Bits, Encode, Policy, parse_decision
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

INITIAL_CODEC = Int8(affine=True, round="dither")  # until the first choice
ERROR_LEVELS = (0.02, 0.08, 0.4)  # relative errors, about those of 6, 4 and 2 bits
CHOICE_GAP = 2e-3  # proven relative distance of a choice from the optimum
RECHOOSE_STEPS = 128  # from one choice to the next; doubled each time
WATCH_STEPS = 16  # from a choice to the first check of its errors; doubled each time
MAX_GROWTH = 2.0  # of the effect of errors over the predicted one; beyond it, measure and choose again
# The effect of errors in queries and keys grows exponentially with these, and with the logits during training.
MAX_ATTENTION_ERROR = 0.01  # squared relative error, about that of 4 bits
ATTENTION = "Attention"  # part of the names of such nodes


@dataclass
class Course:
    """Progress of a controller from choice to choice.

    Attributes
    ----------
    interval : steps from the last choice to the next
    measures : whether the next steps measure for a choice
    steps : steps since the last choice
    look_at : value of `steps` at the next check of errors
    """

    interval: int
    measures: bool = True
    steps: int = 0
    look_at: int = WATCH_STEPS


class BitsController:
    """Controller of the policy of one store, step by step. Not thread-safe: the session calls it under its lock.

    It measures in pairs of steps. In the first step, every payload goes through each candidate codec, and errors of
    several sizes give a prediction of their effect. The second step gives the noise from batch to batch. Before the
    first choice payloads are stored in 8 bits; later in the codecs of the running choice, where kept payloads use 8
    bits in the first step of a pair.

    Attributes
    ----------
    choice : the running choice; its variance is that of each weight's gradient by the square of its norm, averaged over
        elements. None before the first choice
    noise : the same variance, from batch to batch
    """

    name = "bits"
    gauge = plan = graph_plan = None

    def __init__(self, ledger: Ledger, limits: Bits, pairs: Pairs) -> None:
        self.choice: Choice | None = None
        self.noise = 0.0
        self._ledger = ledger
        self._limits = limits
        self._pairs = pairs
        self._codecs: dict[Site, Codec] = {}  # of the choice
        self._ordinary: Policy = _initial
        self._tried: Trials | None = None  # trials of the running pair,
        self._trials: Trials | None = None  # and of the running step
        self._course = Course(RECHOOSE_STEPS)
        self._steps = self._policies()
        self._ahead: Policy | None = None  # the policy of the next step, where it is known already

    # -- the session's calls ------------------------------------------------------------------------------------------

    def next(self, _place: TierSet, _modules: Iterable[tuple[str, Module]]) -> Policy:
        """Return the policy of the step that starts now.

        Raises
        ------
        CapacityError : no choice keeps the bound on held bytes. Raised only before the first choice; later that stays,
            with a warning
        StateError : steps do not show the effect of errors on gradients. Raised only before the first choice, too
        """
        policy, self._ahead = self._advance(), None
        assert policy is not None
        return policy

    def _advance(self) -> Policy | None:
        """Return the policy of the next step, the same until that begins; None after `close`."""
        if self._ahead is None:
            try:
                self._ahead = next(self._steps, None)
            except BaseException:  # the measurements are lost with the failed frame
                self._course = Course(RECHOOSE_STEPS)
                self._steps = self._policies()
                raise
        return self._ahead

    def state(self) -> dict[str, Any]:
        """Return the state for `resume`, as JSON values. If the next step would choose, this chooses now.

        Raises
        ------
        CapacityError, StateError : as for `next`
        """
        self._advance()
        choice = self.choice
        sites = [] if choice is None else [[s.name, s.index, s.tag, text] for s, text in choice.decisions.items()]
        return {
            "course": asdict(self._course),
            "halfway": self._pairs.halfway,
            "noise": self.noise,
            "choice": None if choice is None else {**vars(choice), "decisions": sites},
        }

    def resume(self, state: dict[str, Any], _place: TierSet) -> str:
        """Continue from a state. Return why a pair of steps starts again; empty if none does."""
        self.choice, self.noise, self._ordinary, self._codecs = None, 0.0, _initial, {}
        if (values := state["choice"]) is not None:
            decisions = {Site(*site): text for *site, text in values["decisions"]}
            self._run(Choice(**{**values, "decisions": decisions}), state["noise"])
        self._course = read_as(Course, state["course"])
        self._steps, self._ahead, self._tried, self._trials = self._policies(), None, None, None
        self._pairs.halfway = False
        return "the state was saved between two steps that measure errors: both run again" if state["halfway"] else ""

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook of an entry, which notes shared payloads during trials, given the store's own."""
        return pack if self._trials is None else self._trials.noting(pack)

    def begin(self) -> None:
        """Begin the step."""

    def end_forward(self, _error: BaseException | None) -> None:
        """End the forward."""
        self._trials = None

    def close(self) -> None:
        """End the measurements, because the store is closed."""
        self._steps = iter(())
        self._tried = self._trials = None

    # -----------------------------------------------------------------------------------------------------------------

    def _policies(self) -> Iterator[Policy]:
        """Yield a policy for each step."""
        course = self._course
        while True:
            if course.measures:
                yield from self._measure()
                course.measures, course.steps, course.look_at = False, 0, WATCH_STEPS
            while course.steps < min(course.look_at, course.interval):
                yield self._ordinary
                course.steps += 1
            course.measures = yield from self._has_grown()
            course.look_at *= 2
            if not course.measures and course.steps >= course.interval:
                course.measures, course.interval = True, 2 * course.interval

    def _has_grown(self) -> Generator[Policy, None, bool]:
        """Return whether errors have a much larger effect than predicted; takes a pair of steps."""
        choice = self.choice
        if choice is None or not self._codecs or not self.noise:
            return False
        effect = yield from self._look(lambda: self._ordinary)
        if effect is None:
            return False
        found, predicted = effect.by_weight / (effect.noise_by_weight or inf), choice.variance / self.noise
        if found > MAX_GROWTH * predicted:
            log.info("bits: errors add %.2g to the noise, not %.2g: measured again", found, predicted)
        return found > MAX_GROWTH * predicted

    def _look(
        self, first: Callable[[], Policy], levels: tuple[float, ...] = ()
    ) -> Generator[Policy, None, GradientEffect | None]:
        """Run `Pairs.look`; return None, with a warning, where steps show nothing and a choice exists."""
        try:
            return (yield from self._pairs.look(first, self._ordinary, levels))
        except StateError as error:
            if self.choice is None:
                raise
            warnings.warn(f"{error} Codecs stay as they are.", RuntimeWarning, stacklevel=5)
            return None

    def _measure(self) -> Iterator[Policy]:
        """Yield the policies of a pair of steps, and choose from its measurements."""
        effect = yield from self._look(self._try, ERROR_LEVELS)
        trials, self._tried = self._tried, None
        if effect is None or trials is None:
            return
        known = {site.site: Sensitivity(site.curve) for site in effect.sites if site.curve}
        exponential = {site.site for site in effect.sites if any(ATTENTION in node for node in site.nodes)}
        payloads = [
            payload.up_to(MAX_ATTENTION_ERROR) if str(payload.site) in exponential else payload
            for payload in trials.payloads(known)
        ]
        if payloads and not known:
            why = "; ".join(sorted({site.reason for site in effect.missing}))
            warnings.warn(
                f"nothing is lossy: the effect of errors is not predicted: {why}", RuntimeWarning, stacklevel=5
            )
        self._choose(payloads, effect.noise_by_weight or 0.0)

    def _try(self) -> Policy:
        """Return the policy of a step in which each payload goes through every candidate."""
        codecs = self._codecs
        self._trials = self._tried = trials = Trials(CANDIDATES, waits=lambda site: codecs.get(site, INITIAL_CODEC))
        return trials

    def _choose(self, payloads: list[SitePayload], noise: float) -> None:
        """Choose from the measurements so far."""
        limit, max_noise = self._limits.held_nbytes, self._limits.max_noise
        try:
            if max_noise is not None:
                choice = least_bytes(payloads, variance=max_noise * noise, per="site", gap=CHOICE_GAP)
            else:
                assert limit is not None
                accounts = self._ledger.accounts()
                stored = sum(self._ledger.account(payload.site).stored for payload in payloads)
                held = max(0, sum(account.held_at_exit for account in accounts) - stored)
                choice = least_variance(payloads, nbytes=max(0, limit - held), per="site", gap=CHOICE_GAP)
        except CapacityError as refusal:
            least = held + int(refusal.facts["least"])
            why = (
                f"Bits(held={format_nbytes(limit or 0)}) is too small: {format_nbytes(held)} are held beside what "
                f"codecs may take, and the smallest codecs make {format_nbytes(least)} of it all. Give that, or "
                "Auto, which recomputes."
            )
            if self.choice is None:
                raise CapacityError(why, least=least, limit=limit) from None
            warnings.warn(f"{why} Codecs stay as they are.", RuntimeWarning, stacklevel=5)
            return
        self._run(choice, noise)
        log.info("bits: %s; %.2g from batch to batch", choice.certificate, noise)

    def _run(self, choice: Choice, noise: float) -> None:
        """Run a choice from the next step on."""
        self.choice, self.noise, self._ordinary = choice, noise, choice.policy
        decisions = {site: parse_decision(text) for site, text in choice.decisions.items()}
        self._codecs = {site: decision.codec for site, decision in decisions.items() if isinstance(decision, Encode)}


def _initial(_site: Site, _spec: Spec) -> Encode:
    """Return the decision before the first choice."""
    return Encode(INITIAL_CODEC)

"""Figures of a step that advice is made from."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.transfer.engine import PARCEL_NBYTES

PLANNING_CHOOSERS = ("auto", "plan")  # they plan for bytes on their way, and for decoded and recomputed tensors


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of one step of a store. Sizes in bytes at the end of forward, times in milliseconds of a step.

    Attributes
    ----------
    saved_bytes : bytes that plain autograd holds
    held_bytes : bytes held on the compute device at the end of forward
    peak_held_bytes : peak of these over the step
    peak_work, peak_site, peak_bytes : the work whose memory made the peak (`Transient`), its site, and its bytes; empty
        where payloads and kept tensors alone made it
    chooser : "auto", "plan" or "bits" where one of these chooses decisions, "function" for a user's function
    measuring : whether the chooser has not chosen yet
    budget : budget of a chooser; 0 for none
    lower : the fastest tier that may be used and frees memory of the compute device: "host", "disk", or empty
    hidden_rules : rules whose modules all ran inside a checkpoint of the model's own
    hidden_modules : number of the modules of these rules
    unseen_rules : rules of the user whose modules saved nothing
    outside : bytes saved outside of the model that the store was made with
    around_layers : modules around the recomputed ones, where these are single layers
    kept_small : bytes kept because the tensor is smaller than `min_bytes`
    min_bytes : that limit
    kept_no_room : bytes kept because no tier of the ladder had room
    tiers : that ladder, as policy text
    host_budget, disk_budget : budgets of these tiers; None for no limit
    kept_exact : bytes kept because the codec is lossy and the values must stay exact
    exact_site, exact_reason, exact_decision : facts of the site where most of these were saved
    kept_compiled : bytes kept for that reason, and saved by compiled regions
    compiled_decision : decision that these tensors did not follow
    kept_whole : bytes kept because the tensor has no bytes that could be encoded
    whole_site, whole_reason : facts of the site where most of these were saved
    kept_by_rule : bytes kept because the policy says so
    rule_bytes, rule_pattern, rule_decision : the rule that keeps most of these, and how many
    kept_still_alive : bytes stored, while another reference keeps the original storage
    alive_site : the site where most of these were saved
    on_host : bytes stored in memory of the host, where that is the compute device's own
    host_decision : decision that sends most of these there
    compiled : bytes stored, which one compiled region reads at once in backward
    in_flight : bytes stored, and not yet away from the device
    parcel_nbytes : upper bound of a shared parcel
    flight_decision : decision on most of these
    kept_window : bytes stored on the device because the window was full
    window : bound on bytes on their way to one tier
    moved : whether payloads were moved at all
    bound : bound on bytes that wait on the device although a tier has them or is about to: `window`, or less
    forward_ms, overrun_ms : duration of forward, and of the copies out after its end
    stall_ms, step_ms : time that compute waited, and duration of the step
    room_ms : part of `stall_ms` that compute waited for copies out, to get room for the next
    fetch_ms : duration of the copies back
    fetches, late, misses : number of payloads that backward asked for; of these, the number whose fetch was incomplete,
        and the number whose fetch had not begun
    first_step : whether no earlier step has shown the order of the fetches
    order : part of the step that differed from the step before: "forward", "backward", or empty
    """

    saved_bytes: int = 0
    held_bytes: int = 0
    peak_held_bytes: int = 0
    peak_work: str = ""
    peak_site: str = ""
    peak_bytes: int = 0
    chooser: str = ""
    measuring: bool = False
    budget: int = 0
    lower: str = ""
    hidden_rules: tuple[str, ...] = ()
    hidden_modules: int = 0
    unseen_rules: tuple[str, ...] = ()
    outside: int = 0
    around_layers: tuple[str, ...] = ()
    kept_small: int = 0
    min_bytes: int = 0
    kept_no_room: int = 0
    tiers: str = ""
    host_budget: int | None = None
    disk_budget: int | None = None
    kept_exact: int = 0
    exact_site: str = ""
    exact_reason: str = ""
    exact_decision: str = ""
    kept_compiled: int = 0
    compiled_decision: str = ""
    kept_whole: int = 0
    whole_site: str = ""
    whole_reason: str = ""
    kept_by_rule: int = 0
    rule_bytes: int = 0
    rule_pattern: str = ""
    rule_decision: str = ""
    kept_still_alive: int = 0
    alive_site: str = ""
    on_host: int = 0
    host_decision: str = ""
    compiled: int = 0
    in_flight: int = 0
    parcel_nbytes: int = PARCEL_NBYTES
    flight_decision: str = ""
    kept_window: int = 0
    window: int = 0
    moved: bool = False
    bound: int = 0
    forward_ms: float = 0.0
    overrun_ms: float = 0.0
    stall_ms: float = 0.0
    step_ms: float = 0.0
    room_ms: float = 0.0
    fetch_ms: float = 0.0
    fetches: int = 0
    late: int = 0
    misses: int = 0
    first_step: bool = False
    order: str = ""

    @property
    def by_rules(self) -> bool:
        """True if the user's own rules decide what moves."""
        return self.chooser not in PLANNING_CHOOSERS

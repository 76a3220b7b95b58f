"""Advice of a report: the reason why a store saved little or cost time, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from actstore.base.spec import Site
from actstore.base.units import format_nbytes
from actstore.transfer.engine import PARCEL_NBYTES

MAX_SENTENCES = 3
MIN_BYTES_SHARE = 0.10  # of the saved bytes: a smaller cause is not worth a sentence
MIN_PEAK_SHARE = 0.50  # of the saved bytes, above what is held at the end of forward
MIN_STALL_SHARE = 0.05  # of a step
MIN_OVERRUN_SHARE = 0.10  # of a forward: copies that run on for less count as hidden in it
OUTSIDE_PREFIX = str(Site("", -1))  # of the names of sites outside of all modules
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


def why(figures: StepFigures) -> list[str]:
    """Return at most three sentences, the weightiest first; none where no advice is needed.

    Each sentence has a figure, its cause and a remedy.
    """
    if figures.saved_bytes == 0:
        return [
            "Autograd saved 0 bytes inside the store's context: forward ran outside of it, under no_grad or inside "
            "another checkpoint; put `with store:` around the forward pass that backward follows."
        ]
    found: list[tuple[float, str]] = []
    if figures.hidden_rules:
        found.append((inf, _hidden(figures)))
    for nbytes, least, words in _causes(figures):
        share = nbytes / figures.saved_bytes
        if share >= least and words:
            found.append((share, f"{format_nbytes(nbytes)} ({100 * share:.0f} % of the saved bytes) {words}"))
    stalled = figures.stall_ms / figures.step_ms if figures.step_ms > 0 else 0.0
    if stalled >= MIN_STALL_SHARE:
        found.append((stalled, _stall(figures, stalled)))
    found.sort(key=lambda one: one[0], reverse=True)
    return [text for _, text in found[:MAX_SENTENCES]]


def _causes(f: StepFigures) -> list[tuple[int, float, str]]:
    """Return for each cause its bytes, the minimum share of the saved bytes that counts, and the text after them."""
    at_once = f.compiled >= MIN_PEAK_SHARE * f.saved_bytes
    return [
        (
            f.kept_still_alive,
            MIN_BYTES_SHARE,
            "were stored, but that freed nothing: something else keeps these tensors alive"
            f"{f', most of them at {f.alive_site}' if f.alive_site else ''}; look for the batch itself, and for "
            "attributes, lists or outputs of the model that hold activations, and drop them before forward ends.",
        ),
        (
            f.kept_small,
            MIN_BYTES_SHARE,
            f"are in tensors below min_bytes={format_nbytes(f.min_bytes)}, which are kept; set min_bytes=0 or smaller, "
            "or use larger batches.",
        ),
        (f.kept_no_room, MIN_BYTES_SHARE, _no_room(f)),
        (f.kept_exact, MIN_BYTES_SHARE, _exact(f)),
        (f.kept_compiled, MIN_BYTES_SHARE, _compiled_region(f)),
        (
            f.kept_whole,
            MIN_BYTES_SHARE,
            f"were kept because they cannot be encoded, most of them at {f.whole_site} ({f.whole_reason}); `recompute` "
            "drops them where their modules can run again.",
        ),
        (f.kept_by_rule, MIN_BYTES_SHARE, _by_rule(f)),
        (
            f.on_host,
            MIN_BYTES_SHARE,
            "were moved to host memory, which here is the compute device's own: the move frees nothing; "
            f"write {_without_host(f)}.",
        ),
        (f.in_flight, MIN_BYTES_SHARE, _in_flight(f)),
        (
            f.kept_window,
            MIN_BYTES_SHARE,
            f"stayed on the device because {_bound(f)} was on its way, as Window(when_full='keep') says; give "
            f"{'' if _is_less(f) else 'a larger Window, or '}when_full='wait'.",
        ),
        (
            f.compiled,
            MIN_PEAK_SHARE,
            "were read back at once by one compiled region, because torch.compile needs all that a region saved when "
            "its backward begins: storing them frees memory only until then; compile smaller parts of the model "
            "(`block.compile()` for each block), or recompute them.",
        ),
        (0 if at_once else f.peak_held_bytes - f.held_bytes, MIN_PEAK_SHARE, _peak(f)),
    ]


def _hidden(f: StepFigures) -> str:
    one = len(f.hidden_rules) == 1
    shown = " and ".join(f"`{rule}`" for rule in f.hidden_rules[:2])
    more = f" and {len(f.hidden_rules) - 2} more" if len(f.hidden_rules) > 2 else ""
    return (
        f"The {'rule' if one else 'rules'} {shown}{more} saw nothing: {f.hidden_modules} modules ran inside a "
        f"checkpoint of the model's own, which saves its inputs alone; switch that off (Transformers: "
        f"`model.gradient_checkpointing_disable()`), or leave {'this rule' if one else 'these rules'} out."
    )


def _no_room(f: StepFigures) -> str:
    full = [tier for tier in ("host", "disk") if tier in f.tiers.split(" > ")]
    limits = {"host": f.host_budget, "disk": f.disk_budget}
    remedies = [
        f"raise {tier.title()}(budget={format_nbytes(limit)})" for tier in full if (limit := limits[tier]) is not None
    ]
    if full == ["host"] and f.disk_budget != 0 and f.by_rules:
        remedies.append(f"end the ladder with disk: `{'@ host > disk' if f.lower == 'host' else '@ disk'}`")
    if "disk" in full and f.disk_budget is None:
        remedies.append("give Disk(path) a folder with more space")
    return f"found no room in {f.tiers} and were kept; {', or '.join(remedies or ['recompute their modules'])}."


def _exact(f: StepFigures) -> str:
    outside = f.exact_site.startswith(OUTSIDE_PREFIX)
    if outside and f.kept_exact == f.saved_bytes:
        return (
            "were saved outside of the store's model, which saved nothing; make the store with the model that trains."
        )
    if f.chooser:
        return ""
    remedies = [f"write `{f.exact_decision} @ {f.lower}` for them, where they wait exactly"] if f.lower else []
    remedies += [] if outside else ["recompute their modules"]
    return (
        f"were kept because their values must stay exact, most of them at {f.exact_site} ({f.exact_reason}); "
        f"{', or '.join(remedies) or 'smaller batches save less of them'}."
    )


def _compiled_region(f: StepFigures) -> str:
    cause = (
        "were kept: compiled regions save them without a graph, so that activations, which may be lossy, look like "
        "statistics and masks, which may not"
    )
    if f.chooser:
        return f'{cause}; leave torch.compile out, or choose recomputation: "auto".'
    return (
        f"{cause}; compile with `store.compile(model)`, which tells them apart; or recompute the modules, which is "
        f"exact; or write `unprotected {f.compiled_decision}`, where statistics and masks of floats lose something, "
        "too."
    )


def _by_rule(f: StepFigures) -> str:
    if f.measuring:
        return ""
    if f.chooser in PLANNING_CHOOSERS:
        return (
            f"were kept, because the plan for a budget of {format_nbytes(f.budget)} has room for them; a smaller "
            "budget holds less."
        )
    if f.chooser == "bits":
        return 'were kept, because "bits" found no codec for them; "auto" recomputes, too.'
    exact = f"raw @ {f.lower}" if f.lower else "expack"
    if f.chooser == "function":
        tier = f"Offload(Raw(), '{f.lower}')" if f.lower else "Encode(Expack())"
        return f"were kept, because the policy function returned Keep(); return {tier}, which is exact."
    rule = f"{f.rule_pattern} : {f.rule_decision}"
    most = "" if f.rule_bytes == f.kept_by_rule else f", {format_nbytes(f.rule_bytes)} of them"
    if f.rule_decision.startswith("recompute"):
        return (
            f"were kept{most} because `{rule}` recomputes the model's blocks, and these are not in them; write "
            f"`@blocks : {f.rule_decision}; * : {exact}` in its place, which is exact, too."
        )
    if f.rule_decision.startswith("derive"):
        return (
            f"were kept{most} because `{rule}` could not derive them; write `{f.rule_pattern} : derive({exact})` in "
            "its place, which is exact, too, or recompute the modules."
        )
    default = ", which holds where no other rule matches" if f.rule_pattern == "*" else ""
    return (
        f"were kept{most} by the rule `{rule}`{default}; write `{f.rule_pattern} : {exact}` in its place, which is "
        f"exact, or `{f.rule_pattern} : int8`, with a loss."
    )


def _without_host(f: StepFigures) -> str:
    codec, _, ladder = f.host_decision.partition(" @ ")
    lower = [tier for tier in ladder.split(" > ") if tier != "host"] or [f.lower]
    moved = [f"`{codec} @ {' > '.join(lower)}` in place of `{f.host_decision}`"] if lower[0] else []
    alone = "`recompute` for the modules" if codec == "raw" else f"`{codec}` alone"
    return ", or ".join([*moved, alone])


def _in_flight(f: StepFigures) -> str:
    if not f.by_rules:
        return ""
    tiers = f.flight_decision.partition(" @ ")[2]
    if f.in_flight <= PARCEL_NBYTES:
        return (
            f"were on the device still when forward ended: payloads travel to {tiers} in parcels of up to "
            f"{format_nbytes(PARCEL_NBYTES)}, and no more is in the last of them; larger batches leave a smaller part."
        )
    if f.forward_ms and f.overrun_ms >= MIN_OVERRUN_SHARE * f.forward_ms:
        return (
            f"had not left the device when forward ended: forward took {f.forward_ms:.1f} ms, and copies out went on "
            f"for {f.overrun_ms:.1f} ms more; {_fewer(f.flight_decision)}, or recompute some layers."
        )
    return (
        f"were on the device still when forward ended: {_bound(f)} may be on its way to {tiers} or stay for the begin "
        f"of backward; give a Window smaller than {format_nbytes(f.in_flight)}."
    )


def _peak(f: StepFigures) -> str:
    lead = "more than at the end of forward were held at the peak of the step"
    if not f.by_rules or f.peak_work == "compiled":
        return ""
    part = f"{format_nbytes(f.peak_bytes)} of it"
    if f.peak_work == "sampling":
        at = f" at {f.peak_site}" if f.peak_site else " and their effect on gradients"
        remedy = "" if f.chooser else "; SampleErrors(every=0) leaves the measurement out"
        return f"{lead}, {part} to measure errors{at}: this step was sampled, and other steps need less{remedy}."
    if f.peak_work == "recomputation":
        return (
            f"{lead}, {part} to run {f.peak_site} again; recompute smaller modules than that, or use smaller batches."
        )
    if f.peak_work:
        verb = "derive" if f.peak_work == "derivation" else "decode"
        return f"{lead}, {part} to {verb} a tensor of {f.peak_site}; use smaller batches, which have smaller tensors."
    if f.moved:
        return f"{lead}, by payloads on their way; give a Window smaller than {format_nbytes(f.window)}."
    return (
        f"{lead}, by tensors that were saved and gone again within the step; look for checkpoints of the model's own, "
        "and for graphs that are not used."
    )


def _stall(f: StepFigures, part: float) -> str:
    lead = f"Compute waited {f.stall_ms:.1f} ms of {f.step_ms:.1f} ms ({100 * part:.0f} %)"
    remedy = "keep or recompute some layers" if f.by_rules else "give a larger budget"
    wider = "" if _is_less(f) else "give a larger Window, or "
    if 2 * f.room_ms > f.stall_ms:
        return (
            f"{lead}, {f.room_ms:.1f} ms of it for copies out, before other copies could begin: {_bound(f)} may be on "
            f"its way; {wider}{remedy}."
        )
    if f.first_step and f.misses:
        return f"{lead}: this was the first step, and its order of fetches is not known before; look at the next one."
    if f.misses > f.late:
        lead = f"{lead}: the fetches of {f.misses} of {f.fetches} payloads had not begun when backward asked for them"
        if f.order == "forward":
            return (
                f"{lead}, because this forward saved other payloads than the one before; run the same graph in each "
                f"step, or {remedy}."
            )
        if f.order == "backward":
            return (
                f"{lead}, because backward's order changed from the step before; run the same graph in each step, or "
                "keep the modules whose order changes."
            )
        return (
            f"{lead}, although their order was that of the step before: fetches ahead take no more than {_bound(f)}; "
            f"{wider}{remedy}."
        )
    if f.late:
        backward_ms = f.step_ms - f.forward_ms
        slower = f.forward_ms > 0 and f.fetch_ms > backward_ms
        link = f", because the link is slower: backward had {backward_ms:.1f} ms at most" if slower else ""
        return (
            f"{lead}: {f.late} of {f.fetches} payloads came late, with {f.fetch_ms:.1f} ms of copies back{link}; "
            f"{remedy}."
        )
    return f"{lead} for payloads that were on their way; {remedy}."


def _bound(f: StepFigures) -> str:
    """Return the text for the bound on payloads that wait on the device although a tier has them or is about to."""
    return format_nbytes(f.bound) if _is_less(f) else f"Window({format_nbytes(f.window)})"


def _is_less(f: StepFigures) -> bool:
    """Return whether the bound is a share of the moved bytes, so that a larger window has no effect."""
    return f.bound < f.window


def _fewer(decision: str) -> str:
    codec, _, tiers = decision.partition(" @ ")
    if codec in ("raw", "unprotected raw"):
        return f"store fewer bytes (`expack @ {tiers}` without a loss, `int8 @ {tiers}` with one)"
    return "store fewer bytes"

"""Advice of a report: the reason why a store saved little or cost time, and the remedy."""

from __future__ import annotations

from math import inf

from actstore.base.spec import Site
from actstore.base.units import format_nbytes
from actstore.session.step_figures import PLANNING_CHOOSERS, StepFigures

MAX_SENTENCES = 3
MIN_BYTES_SHARE = 0.10  # of the saved bytes: a smaller cause is not worth a sentence
MIN_PEAK_SHARE = 0.50  # of the saved bytes, above what is held at the end of forward
MIN_STALL_SHARE = 0.05  # of a step
MIN_OVERRUN_SHARE = 0.10  # of a forward: copies that run on for less count as hidden in it
OUTSIDE_PREFIX = str(Site("", -1))  # of the names of sites outside of all modules


def why(figures: StepFigures) -> list[str]:
    """Return at most three sentences, the weightiest first; none where no advice is needed.

    Each sentence has a figure, its cause and a remedy.
    """
    if figures.saved_bytes == 0:
        return [
            "Autograd saved 0 bytes inside the store's context: forward ran outside of it, under no_grad or inside "
            "another checkpoint; put `with store:` around the forward pass that backward follows."
        ]
    if figures.outside == figures.saved_bytes:
        return [
            f"{format_nbytes(figures.outside)} (100 % of the saved bytes) were saved outside of the store's model, "
            "which did not run; make the store with the model that trains: a copy of a model has modules of its own."
        ]
    found: list[tuple[float, str]] = []
    if figures.hidden_rules:
        found.append((inf, _hidden(figures)))
    if figures.unseen_rules:
        found.append((0.0, _unseen(figures)))
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
    return (
        f"The {_listed(f.hidden_rules)} saw nothing: {f.hidden_modules} modules ran inside a "
        f"checkpoint of the model's own, which saves its inputs alone; switch that off (Transformers: "
        f"`model.gradient_checkpointing_disable()`), or leave {_these(f.hidden_rules)} out."
    )


def _unseen(f: StepFigures) -> str:
    return (
        f"The {_listed(f.unseen_rules)} saw nothing: the modules did not run, or nothing in them or before them "
        f"requires a gradient; leave {_these(f.unseen_rules)} out."
    )


def _listed(rules: tuple[str, ...]) -> str:
    shown = " and ".join(f"`{rule}`" for rule in rules[:2])
    return f"{'rule' if len(rules) == 1 else 'rules'} {shown}{f' and {len(rules) - 2} more' if len(rules) > 2 else ''}"


def _these(rules: tuple[str, ...]) -> str:
    return "this rule" if len(rules) == 1 else "these rules"


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
    if f.rule_decision.startswith("recompute") and f.around_layers:
        rules = "; ".join(f"{name} : {f.rule_decision}" for name in f.around_layers)
        return (
            f"were kept{most}: `{rule}` recomputes the model's blocks, which are single layers here, and the inputs of "
            f"these are what plain training saves; name the modules around them: `{rules}`."
        )
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
    if f.in_flight <= f.parcel_nbytes:
        return (
            f"were on the device still when forward ended: payloads travel to {tiers} in parcels of up to "
            f"{format_nbytes(f.parcel_nbytes)}, and no more is in the last of them; larger batches leave a smaller "
            "part."
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

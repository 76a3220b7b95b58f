"""Advice of a report: diagnoses of a step, each with its figure, its cause and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from actstore.base.units import format_nbytes
from actstore.policy import Decision, Keep, Recompute, Rules
from actstore.session.causes import PLANNING_CHOOSERS, AccountGroup, Step
from actstore.transfer.engine import most_parcel_nbytes

MAX_SENTENCES = 3
MIN_BYTES_SHARE = 0.10  # of the saved bytes: a smaller cause is not worth a sentence
MIN_PEAK_SHARE = 0.50  # of the saved bytes, above what is held at the end of forward
MIN_STALL_SHARE = 0.05  # of a step
MIN_OVERRUN_SHARE = 0.10  # of a forward: copies that run on for less count as hidden in it


class Finding(NamedTuple):
    """A sentence of advice and its weight: the share of the saved bytes, or of the step's time."""

    share: float
    text: str


def why(step: Step) -> list[str]:
    """Return at most three sentences, the weightiest first; none where no advice is needed.

    Each sentence has a figure, its cause and a remedy.
    """
    if step.saved == 0:
        return [
            "Autograd saved 0 bytes inside the store's context: forward ran outside of it, under no_grad or inside "
            "another checkpoint; put `with store:` around the forward pass that backward follows."
        ]
    if not step.request.runs and all(not a.site.name for a in step.accounts if a.saved):
        return [
            f"{format_nbytes(step.saved)} (100 % of the saved bytes) were saved outside of the store's model, "
            "which did not run; make the store with the model that trains: a copy of a model has modules of its own."
        ]
    found = [finding for diagnose in DIAGNOSES if (finding := diagnose(step)) is not None]
    found.sort(key=lambda finding: finding.share, reverse=True)
    return [finding.text for finding in found[:MAX_SENTENCES]]


def _of_bytes(step: Step, nbytes: int, words: str, min_share: float = MIN_BYTES_SHARE) -> Finding | None:
    """Return the finding about a number of bytes; None where they are too few."""
    share = nbytes / step.saved
    if share < min_share:
        return None
    return Finding(share, f"{format_nbytes(nbytes)} ({100 * share:.0f} % of the saved bytes) {words}")


def hidden_rules(step: Step) -> Finding | None:
    """Find rules whose modules all ran inside a checkpoint of the model's own."""
    policy, hidden = step.request.policy, step.request.hidden
    if not isinstance(policy, Rules) or not hidden:
        return None
    seen = {policy.pattern_of(account.site.name) for account in step.accounts if account.count}
    blind = [name for name in hidden if policy.pattern_of(name) not in seen]
    rules = [*dict.fromkeys(f"{policy.pattern_of(name)} : {policy.decide(name)}" for name in blind)]
    if not rules:
        return None
    return Finding(
        inf,
        f"The {_listed(rules)} saw nothing: {len(blind)} modules ran inside a checkpoint of the model's own, which "
        "saves its inputs alone; switch that off (Transformers: `model.gradient_checkpointing_disable()`), or leave "
        f"{_these(rules)} out.",
    )


def unseen_rules(step: Step) -> Finding | None:
    """Find rules of the user, but for `keep` and those of `hidden_rules`, whose modules saved nothing."""
    policy, request = step.request.policy, step.request
    if not isinstance(policy, Rules) or request.chooser or step.ledger.compiled:
        return None
    seen = {"*", *(policy.pattern_of(account.site.name) for account in step.accounts if account.count or account.saved)}
    names = [name for name in request.named if name not in request.hidden and policy.pattern_of(name) not in seen]
    decided = {policy.pattern_of(name): policy.decide(name) for name in names}
    rules = [
        f"{pattern} : {decision}"
        for pattern, decision in decided.items()
        if not isinstance(decision, Keep) and not _tiles_of(decision)  # a loss in tiles saves nothing
    ]
    if not rules:
        return None
    return Finding(
        0.0,
        f"The {_listed(rules)} saw nothing: the modules did not run, or nothing in them or before them requires a "
        f"gradient; leave {_these(rules)} out.",
    )


def still_alive(step: Step) -> Finding | None:
    """Find stored tensors that another reference than autograd's keeps alive."""
    alive = AccountGroup((account for account in step.accounts if account.alive), lambda account: account.alive)
    most = "" if alive.most is None else f", most of them at {alive.most.site}"
    return _of_bytes(
        step,
        alive.nbytes,
        f"were stored, but that freed nothing: something else keeps these tensors alive{most}; look for the batch "
        "itself, and for attributes, lists or outputs of the model that hold activations, and drop them before forward "
        "ends.",
    )


def small(step: Step) -> Finding | None:
    """Find tensors below the limit of `min_bytes`."""
    return _of_bytes(
        step,
        step.small.nbytes,
        f"are in tensors below min_bytes={format_nbytes(step.facts.min_nbytes)}, which are kept; set min_bytes=0 or "
        "smaller, or use larger batches.",
    )


def no_room(step: Step) -> Finding | None:
    """Find tensors that no tier of their ladder had room for."""
    if step.no_room.most is None:
        return None
    tiers, facts = step.no_room.accounts[0].note.full, step.facts
    full = [tier for tier in ("host", "disk") if tier in tiers]
    limits = {"host": facts.host_nbytes, "disk": facts.disk_nbytes}
    remedies = [
        f"raise {tier.title()}(budget={format_nbytes(limit)})" for tier in full if (limit := limits[tier]) is not None
    ]
    if full == ["host"] and facts.disk_nbytes != 0 and step.request.by_rules:
        remedies.append(f"end the ladder with disk: `{'@ host > disk' if step.lower == 'host' else '@ disk'}`")
    if "disk" in full and facts.disk_nbytes is None:
        remedies.append("give Disk(path) a folder with more space")
    remedy = ", or ".join(remedies or ["recompute their modules"])
    return _of_bytes(step, step.no_room.nbytes, f"found no room in {' > '.join(tiers)} and were kept; {remedy}.")


def must_stay_exact(step: Step) -> Finding | None:
    """Find tensors that a lossy codec must leave as they are."""
    most = step.exact.most
    if most is None or step.request.chooser:
        return None
    wait = f"{most.where} @ {step.lower}"
    if step.derives(most):
        wait = f"derive({wait})"
    remedies = [f"write `{wait}` for them, where they wait exactly"] if step.lower else []
    remedies += ["recompute their modules"] if most.site.name else []
    return _of_bytes(
        step,
        step.exact.nbytes,
        f"were kept because their values must stay exact, most of them at {most.site} ({most.note.reason}); "
        f"{', or '.join(remedies) or 'smaller batches save less of them'}.",
    )


def compiled_without_graph(step: Step) -> Finding | None:
    """Find tensors that compiled regions save without a graph, and that a lossy codec must leave as they are."""
    cause = (
        "were kept: compiled regions save them without a graph, so that activations, which may be lossy, look like "
        "statistics and masks, which may not"
    )
    remedy = (
        "compile with `store.compile(model)`, which tells them apart; or recompute the modules, which is exact; or "
        f"write `unprotected {step.compiled.where}`, where statistics and masks of floats lose something, too"
    )
    if step.request.chooser:
        remedy = 'leave torch.compile out, or choose recomputation: "auto"'
    return _of_bytes(step, step.compiled.nbytes, f"{cause}; {remedy}.")


def cannot_be_encoded(step: Step) -> Finding | None:
    """Find tensors that have no bytes to encode."""
    most = step.whole.most
    if most is None:
        return None
    return _of_bytes(
        step,
        step.whole.nbytes,
        f"were kept because they cannot be encoded, most of them at {most.site} ({most.note.reason}); `recompute` "
        "drops them where their modules can run again.",
    )


def kept_by_rule(step: Step) -> Finding | None:
    """Find tensors that only the policy keeps."""
    request, nbytes = step.request, sum(step.by_rule.values())
    if request.measuring or nbytes <= step.freed_before_peak:
        return None
    if request.chooser in PLANNING_CHOOSERS:
        words = (
            f"were kept, because the plan for a budget of {format_nbytes(request.budget)} has room for them; a smaller "
            "budget holds less."
        )
    elif request.chooser == "bits":
        words = 'were kept, because "bits" found no codec for them; "auto" recomputes, too.'
    elif request.chooser == "function":
        tier = f"Offload(Raw(), '{step.lower}')" if step.lower else "Encode(Expack())"
        words = f"were kept, because the policy function returned Keep(); return {tier}, which is exact."
    else:
        words = _of_largest_rule(step, nbytes)
    return _of_bytes(step, nbytes, words)


def _of_largest_rule(step: Step, nbytes: int) -> str:
    """Return the words about the rule that keeps most of `nbytes`."""
    pattern, decision = largest = max(step.by_rule, key=step.by_rule.__getitem__)
    rule, exact = f"{pattern} : {decision}", f"raw @ {step.lower}" if step.lower else "expack"
    most = "" if step.by_rule[largest] == nbytes else f", {format_nbytes(step.by_rule[largest])} of them"
    if decision.startswith("recompute") and step.request.around_layers:
        rules = "; ".join(f"{name} : {decision}" for name in step.request.around_layers)
        return (
            f"were kept{most}: `{rule}` recomputes the model's blocks, which are single layers here, and the inputs of "
            f"these are what plain training saves; name the modules around them: `{rules}`."
        )
    if decision.startswith("recompute"):
        return (
            f"were kept{most} because `{rule}` recomputes the model's blocks, and these are not in them; write "
            f"`@blocks : {decision}; * : {exact}` in its place, which is exact, too."
        )
    if decision.startswith("derive"):
        return (
            f"were kept{most} because `{rule}` could not derive them; write `{pattern} : derive({exact})` in its "
            "place, which is exact, too, or recompute the modules."
        )
    default = ", which holds where no other rule matches" if pattern == "*" else ""
    return (
        f"were kept{most} by the rule `{rule}`{default}; write `{pattern} : {exact}` in its place, which is exact, or "
        f"`{pattern} : int8`, with a loss."
    )


def moved_within_host(step: Step) -> Finding | None:
    """Find payloads that moved to host memory, where that is the compute device's own."""
    codec, _, ladder = step.on_host.where.partition(" @ ")
    lower = [tier for tier in ladder.split(" > ") if tier != "host"] or [step.lower]
    remedies = [f"`{codec} @ {' > '.join(lower)}` in place of `{step.on_host.where}`"] if lower[0] else []
    remedies.append("`recompute` for the modules" if codec == "raw" else f"`{codec}` alone")
    return _of_bytes(
        step,
        step.on_host.nbytes,
        "were moved to host memory, which here is the compute device's own: the move frees nothing; write "
        f"{', or '.join(remedies)}.",
    )


def in_flight(step: Step) -> Finding | None:
    """Find payloads that had not left the device when forward ended."""
    facts, flying = step.facts, step.in_flight
    if not step.request.by_rules or flying.most is None:
        return None
    tiers, parcel = flying.where.partition(" @ ")[2], most_parcel_nbytes(on_host=facts.on_host)
    largest = max(account.stored // max(1, account.count) for account in flying)
    if flying.nbytes <= parcel:
        words = (
            f"were on the device still when forward ended: payloads travel to {tiers} in parcels of up to "
            f"{format_nbytes(parcel)}, and no more is in the last of them; larger batches leave a smaller part."
        )
    elif facts.forward_ms and facts.overrun_ms >= MIN_OVERRUN_SHARE * facts.forward_ms:
        words = (
            f"had not left the device when forward ended: forward took {facts.forward_ms:.1f} ms, and copies out went "
            f"on for {facts.overrun_ms:.1f} ms more; {_fewer(flying.where)}, or recompute some layers."
        )
    elif flying.nbytes <= largest + parcel:  # no window is smaller than a payload
        words = (
            f"were on the device still when forward ended: the last payloads travel to {tiers} then, and one of them "
            f"has {format_nbytes(largest)}; {_fewer(flying.where)}, or recompute some layers."
        )
    else:
        words = (
            f"were on the device still when forward ended: {step.bound} may be in transit to {tiers} or kept for the "
            f"start of backward; give a Window smaller than {format_nbytes(flying.nbytes)}."
        )
    return _of_bytes(step, flying.nbytes, words)


def window_full(step: Step) -> Finding | None:
    """Find payloads that stayed on the device, as the user says, because the window was full."""
    return _of_bytes(
        step,
        step.crowded.nbytes,
        f"stayed on the device because {step.bound} was on its way, as Window(when_full='keep') says; give "
        f"{'a larger Window, or ' if step.window_counts else ''}when_full='wait'.",
    )


def read_at_once(step: Step) -> Finding | None:
    """Find a compiled region that reads most of the saved bytes at once in backward."""
    return _of_bytes(
        step,
        max(step.ledger.compiled.values(), default=0),
        "were read back at once by one compiled region, because torch.compile needs all that a region saved when "
        "its backward begins: storing them frees memory only until then; compile smaller parts of the model "
        "(`block.compile()` for each block), or recompute them.",
        MIN_PEAK_SHARE,
    )


def peak(step: Step) -> Finding | None:
    """Find the work that makes the peak, where that is far above what is held at the end of forward."""
    transient, nbytes = step.ledger.transient, step.ledger.peak - step.ledger.held_at_exit
    work = "" if transient is None else transient.work
    if not step.request.by_rules or work == "compiled" or read_at_once(step) is not None:
        return None
    lead, min_share = "more than at the end of forward were held at the peak of the step", MIN_PEAK_SHARE
    if transient is None:
        return _of_bytes(step, nbytes, f"{lead}, {_of_payloads(step)}", min_share)
    part, site = f"{format_nbytes(transient.nbytes)} of it", str(transient.site or "")
    if work == "sampling":
        at = f" at {site}" if site else " and their effect on gradients"
        remedy = "" if step.request.chooser else "; SampleErrors(every=0) leaves the measurement out"
        words = f"{part} to measure errors{at}: this step was sampled, and other steps need less{remedy}."
    elif work == "recomputation":
        tiles = ", put a rule recompute(tiles=auto) before for those that treat each token by itself, such as an MLP"
        smaller = f"recompute smaller modules than that{'' if _has_tiles(step) else tiles}"
        words = f"{part} to run {site} again; {smaller}, or use smaller batches."
        if 2 * transient.nbytes > step.ledger.peak and step.freed_before_peak:  # what is held later does not matter
            min_share = MIN_BYTES_SHARE
    else:
        verb = "derive" if work == "derivation" else "decode"
        words = f"{part} to {verb} a tensor of {site}; use smaller batches, which have smaller tensors."
    return _of_bytes(step, nbytes, f"{lead}, {words}", min_share)


def _has_tiles(step: Step) -> bool:
    """Return whether a rule of the user's runs modules in tiles."""
    policy = step.request.policy
    return isinstance(policy, Rules) and any(_tiles_of(decision) for _, decision in policy.rules)


def _tiles_of(decision: Decision) -> int | str | None:
    return decision.tiles if isinstance(decision, Recompute) else None


def _of_payloads(step: Step) -> str:
    """Return the words about a peak that payloads and kept tensors alone made."""
    largest = max((account.stored // max(1, account.count) for account in step.moved), default=0)
    if largest and largest < step.facts.window_nbytes:
        return f"by payloads on their way; give a Window smaller than {format_nbytes(step.facts.window_nbytes)}."
    if largest:
        return f"by payloads on their way, one of them of {format_nbytes(largest)}; use smaller batches."
    return (
        "by tensors that were saved and gone again within the step; look for checkpoints of the model's own, and for "
        "graphs that are not used."
    )


def stall(step: Step) -> Finding | None:
    """Find the time that compute waited for copies."""
    facts, accounts = step.facts, step.accounts
    stall_ms = sum(account.stall_ns for account in accounts) / 1e6
    share = stall_ms / facts.step_ms if facts.step_ms > 0 else 0.0
    if share < MIN_STALL_SHARE:
        return None
    room_ms = sum(account.room_ns for account in accounts) / 1e6
    late, misses = sum(account.late for account in accounts), sum(account.misses for account in accounts)
    fetches = late + misses + sum(account.hits for account in accounts)
    remedy = "keep or recompute some layers" if step.request.by_rules else "give a larger budget"
    wider = "give a larger Window, or " if step.window_counts else ""
    if 2 * room_ms > stall_ms:
        words = (
            f", {room_ms:.1f} ms of it for copies out, before other copies could begin: {step.bound} may be on its "
            f"way; {wider}{remedy}."
        )
    elif facts.first_step and misses:
        words = ": this was the first step, and its order of fetches is not known before; look at the next one."
    elif misses > late:
        reason = {
            "forward": "because this forward saved other payloads than the one before; run the same graph in each "
            f"step, or {remedy}.",
            "backward": "because backward's order changed from the step before; run the same graph in each step, or "
            "keep the modules whose order changes.",
        }.get(
            facts.order,
            f"although their order was that of the step before: fetches ahead take no more than {step.bound}; "
            f"{wider}{remedy}.",
        )
        words = f": the fetches of {misses} of {fetches} payloads had not begun when backward asked for them, {reason}"
    elif late:
        fetch_ms, backward_ms = sum(account.fetch_ns for account in accounts) / 1e6, facts.step_ms - facts.forward_ms
        slower = facts.forward_ms > 0 and fetch_ms > backward_ms
        link = f", because the link is slower: backward had {backward_ms:.1f} ms at most" if slower else ""
        words = f": {late} of {fetches} payloads came late, with {fetch_ms:.1f} ms of copies back{link}; {remedy}."
    else:
        words = f" for payloads that were on their way; {remedy}."
    return Finding(share, f"Compute waited {stall_ms:.1f} ms of {facts.step_ms:.1f} ms ({100 * share:.0f} %){words}")


DIAGNOSES: tuple[Callable[[Step], Finding | None], ...] = (
    hidden_rules,
    unseen_rules,
    still_alive,
    small,
    no_room,
    must_stay_exact,
    compiled_without_graph,
    cannot_be_encoded,
    kept_by_rule,
    moved_within_host,
    in_flight,
    window_full,
    read_at_once,
    peak,
    stall,
)


def _listed(rules: list[str]) -> str:
    shown = " and ".join(f"`{rule}`" for rule in rules[:2])
    return f"{'rule' if len(rules) == 1 else 'rules'} {shown}{f' and {len(rules) - 2} more' if len(rules) > 2 else ''}"


def _these(rules: list[str]) -> str:
    return "this rule" if len(rules) == 1 else "these rules"


def _fewer(decision: str) -> str:
    """Return the words that advise to store fewer bytes than a decision does."""
    codec, _, tiers = decision.partition(" @ ")
    if codec in ("raw", "unprotected raw"):
        return f"store fewer bytes (`expack @ {tiers}` without a loss, `int8 @ {tiers}` with one)"
    return "store fewer bytes"

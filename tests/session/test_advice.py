"""Advice: for each sentence a situation in which it must appear, and near ones in which it must not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from actstore.autograd.protect import COMPILED
from actstore.base.ledger import Account, Circumstances, Ledger, Transient
from actstore.base.note import SMALL, Note
from actstore.base.spec import Site
from actstore.codecs import Raw
from actstore.policy import Derive, Keep, Offload, Rules, parse_decision
from actstore.session.advice import why
from actstore.session.causes import Request, Step

MIB = 2**20
BASE: dict[str, Any] = {"saved_bytes": 100 * MIB, "lower": "disk", "window": 32 * MIB, "bound": 32 * MIB}
KEPT = {  # figures of sites that are kept, and their notes
    "kept_small": lambda given: Note(SMALL),
    "kept_no_room": lambda given: Note.no_room(tuple(given["tiers"].split(" > "))),
    "kept_exact": lambda given: Note(given["exact_reason"], kept=True),
    "kept_compiled": lambda given: Note(COMPILED, kept=True),
    "kept_whole": lambda given: Note(given["whole_reason"], kept=True),
}


class Made:
    """A step with the figures that a case names; what is left of the saved bytes is stored, and gone at the end."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.ledger = Ledger()
        self.left = given.get("saved_bytes", 0)
        self.policy: Any = Rules([], default=Keep())
        for name, note_of in KEPT.items():
            if name in given:
                account = self.add(name, note=note_of(given), exact=name in ("kept_exact", "kept_compiled"))
                account.decision = self.decision(name.replace("kept_", "") + "_decision")
        if "kept_by_rule" in given:
            self.keep_by_rule()
        if "kept_still_alive" in given:
            self.add("kept_still_alive", site="alive_site", stored=True, alive=given["kept_still_alive"])
        for name, decision, held in (
            ("on_host", "host_decision", True),
            ("in_flight", "flight_decision", True),
            ("moved", "flight_decision", False),
        ):
            if given.get(name):
                self.move(name, self.decision(decision, "raw @ disk"), held=held)
        if "kept_window" in given:
            self.move("kept_window", self.decision("", "raw @ disk"), held=True).note = Note("full", full=("disk",))
        rest = self.account("(top)[0]" if "outside" in given else "rest[0]")
        rest.saved = given.get("outside", self.left)
        rest.stored, rest.count = rest.saved // 4, 100
        if given.get("outside", 0) < given.get("saved_bytes", 0) and "outside" in given:
            self.account("rest[0]").saved = given["saved_bytes"] - given["outside"]
        self.time(rest)
        self.mark()

    def account(self, site: str) -> Account:
        name, _, index = site.rpartition("[")
        return self.ledger.account(Site("" if name == "(top)" else name or site, int(index.rstrip("]") or 0)))

    def decision(self, name: str, default: str = "int8") -> Any:
        return parse_decision(self.given.get(name) or default)

    def add(self, name: str, *, site: str = "", stored: bool = False, **facts: Any) -> Account:
        where = site or name.replace("kept_", "") + "_site"
        account = self.account(self.given.get(where) or f"{name}[0]")
        account.saved, account.count = self.given[name], 100
        account.stored = account.saved if stored else 0
        self.left -= account.saved
        for fact, value in facts.items():
            setattr(account, fact, value)
        return account

    def move(self, name: str, decision: Any, *, held: bool) -> Account:
        account = self.account(f"{name}[0]")
        nbytes = self.given[name] if held else MIB
        account.saved, account.stored, account.count = nbytes, nbytes, self.given.get("payloads", 100)
        account.held_at_exit = nbytes if held else 0
        account.decision = decision
        self.left -= nbytes
        return account

    def keep_by_rule(self) -> None:
        given = self.given
        decision = parse_decision(given["rule_decision"])
        default = given["rule_pattern"] == "*"
        self.policy = Rules([], default=decision) if default else Rules([(given["rule_pattern"], decision)])
        for site, nbytes in (("0[0]", given["rule_bytes"]), ("1[0]", given["kept_by_rule"] - given["rule_bytes"])):
            account = self.account(site)
            account.saved = account.held_at_exit = nbytes
            account.decision = decision if isinstance(decision, Derive) else Keep()
            self.left -= nbytes

    def time(self, account: Account) -> None:
        given = self.given
        account.late, account.misses = given.get("late", 0), given.get("misses", 0)
        account.hits = max(0, given.get("fetches", 0) - account.late - account.misses)
        for kind in ("stall", "room", "fetch"):
            setattr(account, f"{kind}_ns", round(1e6 * given.get(f"{kind}_ms", 0)))

    def mark(self) -> None:
        given, ledger = self.given, self.ledger
        ledger.held_at_exit = given.get("held_bytes", 0)
        ledger.peak = given.get("peak_held_bytes", 0)
        if "compiled" in given:
            ledger.compiled[0, 0] = given["compiled"]
        if given.get("peak_work"):
            name, _, index = given.get("peak_site", "").removesuffix("]").partition("[")
            site = Site(name, int(index or -1)) if name else None
            nbytes = given.get("peak_bytes", 0)
            ledger._transient_peak = Transient(given["peak_work"], site, nbytes, ledger.peak)

    def step(self) -> Step:
        given = self.given
        lower = given.get("lower", "")
        disk = given.get("disk_budget") if lower or "disk_budget" in given else 0
        facts = Circumstances(
            min_nbytes=given.get("min_bytes", 0),
            on_host=lower != "host",
            step_ms=given.get("step_ms", 0.0),
            first_step=given.get("first_step", False),
            forward_ms=given.get("forward_ms", 0.0),
            overrun_ms=given.get("overrun_ms", 0.0),
            keeps_when_full="kept_window" in given,
            order=given.get("order", ""),
            window_nbytes=given.get("window", 0),
            bound_nbytes=given.get("bound", 0),
            host_nbytes=given.get("host_budget"),
            disk_nbytes=disk,
        )
        rules = given.get("hidden_rules", ()) + given.get("unseen_rules", ())
        if rules:
            self.policy = Rules.parse("; ".join(rules))
        names = tuple(rule.partition(" :")[0] for rule in rules)
        hidden: tuple[str, ...] = ()
        if "hidden_modules" in given and rules:
            more = given["hidden_modules"] - len(names)
            hidden = (*names, *(f"{names[0]}.{number}" for number in range(more)))
        request = Request(
            self.policy,
            given.get("chooser", ""),
            measuring=given.get("measuring", False),
            budget=given.get("budget", 0),
            hidden=hidden,
            named=() if hidden else names,
            runs="outside" not in given,
            around_layers=given.get("around_layers", ()),
        )
        return Step(self.ledger, facts, request)


def advice(**given: Any) -> list[str]:
    return why(Made(**given).step())


class Case(NamedTuple):
    """A sentence.

    Attributes
    ----------
    when : figures in which it must appear
    says : what it says, after its figure
    unless : for each near situation, the figures that differ
    """

    when: dict[str, Any]
    says: str
    unless: list[dict[str, Any]]


HALF = 50 * MIB
FLYING = {"in_flight": HALF, "flight_decision": "raw @ disk", "forward_ms": 100.0, "overrun_ms": 40.0}
PEAK = {"peak_held_bytes": 60 * MIB, "held_bytes": 10 * MIB}
RULE = {"kept_by_rule": HALF, "rule_bytes": HALF, "rule_pattern": "*", "rule_decision": "keep"}
EXACT = {"kept_exact": HALF, "exact_site": "1[0]", "exact_reason": "output of Softmax", "exact_decision": "int8"}
HOST = {"on_host": HALF, "host_decision": "int8 @ host"}
ROOM = {"kept_no_room": HALF, "tiers": "disk", "disk_budget": MIB}
STALL = {"stall_ms": 20.0, "step_ms": 80.0, "fetches": 8, "forward_ms": 30.0, "fetch_ms": 40.0}
MISSES = {**STALL, "misses": 5, "late": 1}
HIDDEN = {"hidden_rules": ("mlp : recompute",), "hidden_modules": 4}

BYTES = {
    "alive": Case(
        {"kept_still_alive": HALF, "alive_site": "blocks.3[0]"},
        "were stored, but that freed nothing: something else keeps these tensors alive, most of them at blocks.3[0]; "
        "look for the batch itself, and for attributes, lists or outputs of the model that hold activations, and drop "
        "them before forward ends.",
        [{"kept_still_alive": 9 * MIB}],
    ),
    "small": Case(
        {"kept_small": HALF, "min_bytes": 256 * 1024},
        "are in tensors below min_bytes=256.0 KiB, which are kept; set min_bytes=0 or smaller, or use larger batches.",
        [{"kept_small": 9 * MIB}],
    ),
    "blocks of one layer": Case(
        {"kept_by_rule": HALF, "rule_bytes": HALF, "rule_pattern": "*", "rule_decision": "recompute"}
        | {"around_layers": ("features", "classifier")},
        "were kept: `* : recompute` recomputes the model's blocks, which are single layers here, and the inputs of "
        "these are what plain training saves; name the modules around them: `features : recompute; classifier : "
        "recompute`.",
        [{"around_layers": ()}, {"rule_decision": "int8"}],
    ),
    "no room on disk": Case(
        ROOM, "found no room in disk and were kept; raise Disk(budget=1.0 MiB).", [{"kept_no_room": 9 * MIB}]
    ),
    "no room on a full disk": Case(
        ROOM | {"disk_budget": None},
        "found no room in disk and were kept; give Disk(path) a folder with more space.",
        [{"disk_budget": MIB}],
    ),
    "no room in host memory": Case(
        ROOM | {"tiers": "host", "host_budget": MIB, "disk_budget": None, "lower": "host"},
        "found no room in host and were kept; raise Host(budget=1.0 MiB), or end the ladder with disk: "
        "`@ host > disk`.",
        [{"disk_budget": 0}, {"chooser": "auto"}, {"lower": "disk"}],
    ),
    "no room in host memory of a CPU": Case(
        ROOM | {"tiers": "host", "host_budget": MIB, "disk_budget": None},
        "found no room in host and were kept; raise Host(budget=1.0 MiB), or end the ladder with disk: `@ disk`.",
        [{"lower": "host"}],
    ),
    "no room in a tier of another package": Case(
        ROOM | {"tiers": "shelf"}, "found no room in shelf and were kept; recompute their modules.", [{"tiers": "disk"}]
    ),
    "exact": Case(
        EXACT,
        "were kept because their values must stay exact, most of them at 1[0] (output of Softmax); write `int8 @ "
        "disk` for them, where they wait exactly, or recompute their modules.",
        [{"kept_exact": 9 * MIB}, {"chooser": "auto"}, {"chooser": "bits"}, {"lower": ""}, {"exact_site": "(top)[0]"}],
    ),
    "exact, and no tier": Case(
        EXACT | {"lower": ""},
        "were kept because their values must stay exact, most of them at 1[0] (output of Softmax); recompute their "
        "modules.",
        [{"lower": "disk"}],
    ),
    "exact, outside of modules": Case(
        EXACT | {"exact_site": "(top)[0]"},
        "were kept because their values must stay exact, most of them at (top)[0] (output of Softmax); write `int8 @ "
        "disk` for them, where they wait exactly.",
        [{"exact_site": "1[0]"}],
    ),
    "exact, outside of modules, and no tier": Case(
        EXACT | {"exact_site": "(top)[0]", "lower": ""},
        "were kept because their values must stay exact, most of them at (top)[0] (output of Softmax); smaller "
        "batches save less of them.",
        [{"lower": "disk"}],
    ),
    "compiled and lossy": Case(
        {"kept_compiled": HALF, "compiled_decision": "int8"},
        "were kept: compiled regions save them without a graph, so that activations, which may be lossy, look like "
        "statistics and masks, which may not; compile with `store.compile(model)`, which tells them apart; or "
        "recompute the modules, which is exact; or write `unprotected int8`, where statistics and masks of floats lose "
        "something, too.",
        [{"kept_compiled": 9 * MIB}, {"chooser": "bits"}],
    ),
    "compiled under bits": Case(
        {"kept_compiled": HALF, "chooser": "bits"},
        "were kept: compiled regions save them without a graph, so that activations, which may be lossy, look like "
        'statistics and masks, which may not; leave torch.compile out, or choose recomputation: "auto".',
        [{"chooser": ""}],
    ),
    "whole": Case(
        {"kept_whole": HALF, "whole_site": "0[0]", "whole_reason": "a view or a cast of a parameter"},
        "were kept because they cannot be encoded, most of them at 0[0] (a view or a cast of a parameter); "
        "`recompute` drops them where their modules can run again.",
        [{"kept_whole": 9 * MIB}],
    ),
    "kept by the last rule": Case(
        RULE,
        "were kept by the rule `* : keep`, which holds where no other rule matches; write `* : raw @ disk` in its "
        "place, which is exact, or `* : int8`, with a loss.",
        [
            {"kept_by_rule": 9 * MIB},
            {"rule_pattern": "0"},
            {"rule_decision": "derive"},
            {"rule_decision": "recompute"},
            {"chooser": "auto"},
            {"chooser": "plan"},
            {"chooser": "bits"},
            {"chooser": "function"},
            {"chooser": "auto", "measuring": True},
            {"lower": "host"},
        ],
    ),
    "kept by a rule": Case(
        RULE | {"rule_bytes": 30 * MIB, "rule_pattern": "0", "lower": "host"},
        "were kept, 30.0 MiB of them by the rule `0 : keep`; write `0 : raw @ host` in its place, which is exact, or "
        "`0 : int8`, with a loss.",
        [{"rule_bytes": HALF}, {"lower": "disk"}],
    ),
    "kept by a rule, and no tier": Case(
        RULE | {"lower": ""},
        "were kept by the rule `* : keep`, which holds where no other rule matches; write `* : expack` in its place, "
        "which is exact, or `* : int8`, with a loss.",
        [{"lower": "disk"}],
    ),
    "kept under derive": Case(
        RULE | {"rule_decision": "derive"},
        "were kept because `* : derive` could not derive them; write `* : derive(raw @ disk)` in its place, which is "
        "exact, too, or recompute the modules.",
        [{"rule_decision": "keep"}],
    ),
    "kept outside of recomputed blocks": Case(
        RULE | {"rule_decision": "recompute"},
        "were kept because `* : recompute` recomputes the model's blocks, and these are not in them; write "
        "`@blocks : recompute; * : raw @ disk` in its place, which is exact, too.",
        [{"rule_decision": "keep"}],
    ),
    "kept by a function": Case(
        RULE | {"chooser": "function"},
        "were kept, because the policy function returned Keep(); return Offload(Raw(), 'disk'), which is exact.",
        [{"chooser": ""}, {"lower": ""}],
    ),
    "kept by a function, and no tier": Case(
        RULE | {"chooser": "function", "lower": ""},
        "were kept, because the policy function returned Keep(); return Encode(Expack()), which is exact.",
        [{"lower": "disk"}],
    ),
    "kept by a plan": Case(
        RULE | {"chooser": "auto", "budget": 20 * MIB},
        "were kept, because the plan for a budget of 20.0 MiB has room for them; a smaller budget holds less.",
        [{"measuring": True}, {"chooser": "bits"}, {"chooser": ""}],
    ),
    "kept under bits": Case(
        RULE | {"chooser": "bits"},
        'were kept, because "bits" found no codec for them; "auto" recomputes, too.',
        [{"measuring": True}, {"chooser": ""}],
    ),
    "host of a CPU": Case(
        HOST,
        "were moved to host memory, which here is the compute device's own: the move frees nothing; write `int8 @ "
        "disk` in place of `int8 @ host`, or `int8` alone.",
        [{"on_host": 9 * MIB}],
    ),
    "host of a CPU, raw": Case(
        HOST | {"host_decision": "raw @ host > disk"},
        "were moved to host memory, which here is the compute device's own: the move frees nothing; write `raw @ "
        "disk` in place of `raw @ host > disk`, or `recompute` for the modules.",
        [{"host_decision": "int8 @ host"}],
    ),
    "host of a CPU without a disk": Case(
        HOST | {"lower": ""},
        "were moved to host memory, which here is the compute device's own: the move frees nothing; write `int8` "
        "alone.",
        [{"lower": "disk"}],
    ),
    "link": Case(
        FLYING,
        "had not left the device when forward ended: forward took 100.0 ms, and copies out went on for 40.0 ms more; "
        "store fewer bytes (`expack @ disk` without a loss, `int8 @ disk` with one), or recompute some layers.",
        [
            {"overrun_ms": 9.0},  # they fitted into it
            {"forward_ms": 0.0},  # unknown
            {"in_flight": 9 * MIB},
            {"chooser": "auto"},
            {"chooser": "plan"},
            {"flight_decision": "int8 @ disk"},
        ],
    ),
    "link, encoded": Case(
        FLYING | {"flight_decision": "int8 @ disk"},
        "had not left the device when forward ended: forward took 100.0 ms, and copies out went on for 40.0 ms more; "
        "store fewer bytes, or recompute some layers.",
        [{"flight_decision": "raw @ disk"}],
    ),
    "window": Case(
        FLYING | {"overrun_ms": 9.0},
        "were on the device still when forward ended: Window(32.0 MiB) may be in transit to disk or kept for the "
        "start of backward; give a Window smaller than 50.0 MiB.",
        [{"overrun_ms": 11.0}, {"chooser": "auto"}],
    ),
    "one large payload": Case(
        FLYING | {"overrun_ms": 9.0, "payloads": 1},
        "were on the device still when forward ended: the last payloads travel to disk then, and one of them has "
        "50.0 MiB; store fewer bytes (`expack @ disk` without a loss, `int8 @ disk` with one), or recompute some "
        "layers.",
        [{"payloads": 2}, {"overrun_ms": 11.0}],
    ),
    "window is full": Case(
        {"kept_window": HALF},
        "stayed on the device because Window(32.0 MiB) was on its way, as Window(when_full='keep') says; give a larger "
        "Window, or when_full='wait'.",
        [{"kept_window": 9 * MIB}, {"bound": 9 * MIB}],
    ),
    "a third is full": Case(
        {"kept_window": HALF, "bound": 9 * MIB},
        "stayed on the device because 9.0 MiB was on its way, as Window(when_full='keep') says; give when_full='wait'.",
        [{"bound": 32 * MIB}],
    ),
    "read at once": Case(
        {"compiled": HALF},
        "were read back at once by one compiled region, because torch.compile needs all that a region saved when its "
        "backward begins: storing them frees memory only until then; compile smaller parts of the model "
        "(`block.compile()` for each block), or recompute them.",
        [{"compiled": 49 * MIB}],
    ),
    "peak of sampling": Case(
        PEAK | {"peak_work": "sampling", "peak_site": "5[0]", "peak_bytes": 20 * MIB},
        "more than at the end of forward were held at the peak of the step, 20.0 MiB of it to measure errors at 5[0]: "
        "this step was sampled, and other steps need less; SampleErrors(every=0) leaves the measurement out.",
        [
            {"peak_held_bytes": HALF},
            {"chooser": "auto"},
            {"chooser": "bits"},
            {"peak_work": "decoding"},
            {"peak_work": ""},
            {"compiled": HALF},
        ],
    ),
    "peak of a predicted effect": Case(
        PEAK | {"peak_work": "sampling", "peak_bytes": 20 * MIB, "chooser": "bits"},
        "more than at the end of forward were held at the peak of the step, 20.0 MiB of it to measure errors and "
        "their effect on gradients: this step was sampled, and other steps need less.",
        [{"chooser": ""}, {"peak_site": "5[0]"}],
    ),
    "peak of recomputation": Case(
        PEAK | {"peak_work": "recomputation", "peak_site": "0", "peak_bytes": 20 * MIB},
        "more than at the end of forward were held at the peak of the step, 20.0 MiB of it to run 0 again; recompute "
        "smaller modules than that, put a rule recompute(tiles=auto) before for those that treat each token by itself, "
        "such as an MLP, or use smaller batches.",
        [{"peak_work": "decoding"}, {"chooser": "plan"}],
    ),
    "peak of decoding": Case(
        PEAK | {"peak_work": "decoding", "peak_site": "0[1]", "peak_bytes": 20 * MIB},
        "more than at the end of forward were held at the peak of the step, 20.0 MiB of it to decode a tensor of "
        "0[1]; use smaller batches, which have smaller tensors.",
        [{"peak_work": "recomputation"}, {"peak_work": "derivation"}, {"peak_work": "compiled"}],
    ),
    "peak of derivation": Case(
        PEAK | {"peak_work": "derivation", "peak_site": "0[1]", "peak_bytes": 20 * MIB},
        "more than at the end of forward were held at the peak of the step, 20.0 MiB of it to derive a tensor of "
        "0[1]; use smaller batches, which have smaller tensors.",
        [{"peak_work": "decoding"}],
    ),
    "peak of payloads": Case(
        PEAK | {"moved": True},
        "more than at the end of forward were held at the peak of the step, by payloads on their way; give a Window "
        "smaller than 32.0 MiB.",
        [{"moved": False}, {"peak_work": "sampling"}, {"chooser": "auto"}],
    ),
    "peak of one large payload": Case(
        PEAK | {"moved": True, "window": MIB // 2, "payloads": 1},
        "more than at the end of forward were held at the peak of the step, by payloads on their way, one of them of "
        "1.0 MiB; use smaller batches.",
        [{"moved": False}, {"window": 2 * MIB}],
    ),
    "peak of what is gone": Case(
        PEAK,
        "more than at the end of forward were held at the peak of the step, by tensors that were saved and gone again "
        "within the step; look for checkpoints of the model's own, and for graphs that are not used.",
        [{"moved": True}, {"peak_work": "sampling"}],
    ),
}

STALLS = {
    "room": Case(
        STALL | {"room_ms": 11.0, "misses": 5},
        ", 11.0 ms of it for copies out, before other copies could begin: Window(32.0 MiB) may be on its way; give a "
        "larger Window, or keep or recompute some layers.",
        [{"room_ms": 9.0}, {"stall_ms": 3.0}, {"bound": 9 * MIB}],
    ),
    "room, of a third": Case(
        STALL | {"room_ms": 11.0, "misses": 5, "bound": 9 * MIB},
        ", 11.0 ms of it for copies out, before other copies could begin: 9.0 MiB may be on its way; keep or "
        "recompute some layers.",
        [{"room_ms": 9.0}, {"bound": 32 * MIB}],
    ),
    "first step": Case(
        MISSES | {"first_step": True},
        ": this was the first step, and its order of fetches is not known before; look at the next one.",
        [{"first_step": False}, {"misses": 0}],
    ),
    "another forward": Case(
        MISSES | {"order": "forward"},
        ": the fetches of 5 of 8 payloads had not begun when backward asked for them, because this forward saved "
        "other payloads than the one before; run the same graph in each step, or keep or recompute some layers.",
        [{"order": ""}, {"order": "backward"}, {"first_step": True}, {"late": 5}],
    ),
    "another order": Case(
        MISSES | {"order": "backward"},
        ": the fetches of 5 of 8 payloads had not begun when backward asked for them, because backward's order "
        "changed from the step before; run the same graph in each step, or keep the modules whose order changes.",
        [{"order": ""}, {"order": "forward"}, {"first_step": True}, {"late": 5}],
    ),
    "the same order": Case(
        MISSES,
        ": the fetches of 5 of 8 payloads had not begun when backward asked for them, although their order was that "
        "of the step before: fetches ahead take no more than Window(32.0 MiB); give a larger Window, or keep or "
        "recompute some layers.",
        [{"bound": 9 * MIB}, {"order": "forward"}, {"order": "backward"}, {"misses": 1}, {"chooser": "auto"}],
    ),
    "the same order, under a plan": Case(
        MISSES | {"chooser": "auto"},
        ": the fetches of 5 of 8 payloads had not begun when backward asked for them, although their order was that "
        "of the step before: fetches ahead take no more than Window(32.0 MiB); give a larger Window, or give a larger "
        "budget.",
        [{"chooser": ""}],
    ),
    "late": Case(
        STALL | {"misses": 1, "late": 5},
        ": 5 of 8 payloads came late, with 40.0 ms of copies back; keep or recompute some layers.",
        [{"misses": 6}, {"late": 0}, {"fetch_ms": 60.0}],
    ),
    "late, by the link": Case(
        STALL | {"misses": 1, "late": 5, "fetch_ms": 60.0},
        ": 5 of 8 payloads came late, with 60.0 ms of copies back, because the link is slower: backward had 50.0 ms "
        "at most; keep or recompute some layers.",
        [{"fetch_ms": 49.0}, {"forward_ms": 0.0}],
    ),
    "on their way": Case(
        STALL, " for payloads that were on their way; keep or recompute some layers.", [{"late": 1}, {"misses": 1}]
    ),
}

PARCELS = Case(
    FLYING | {"in_flight": 4 * MIB, "saved_bytes": 8 * MIB},
    "were on the device still when forward ended: payloads travel to disk in parcels of up to 4.0 MiB, and no more is "
    "in the last of them; larger batches leave a smaller part.",
    [{"in_flight": 5 * MIB}, {"chooser": "auto"}, {"saved_bytes": 100 * MIB}],
)
RULES_HIDDEN = {
    "one": Case(
        HIDDEN,
        "The rule `mlp : recompute` saw nothing: 4 modules ran inside a checkpoint of the model's own, which saves "
        "its inputs alone; switch that off (Transformers: `model.gradient_checkpointing_disable()`), or leave this "
        "rule out.",
        [{"hidden_rules": ()}],
    ),
    "several": Case(
        HIDDEN | {"hidden_rules": ("a : raw", "b : raw", "c : raw")},
        "The rules `a : raw` and `b : raw` and 1 more saw nothing: 4 modules ran inside a checkpoint of the model's "
        "own, which saves its inputs alone; switch that off (Transformers: `model.gradient_checkpointing_disable()`), "
        "or leave these rules out.",
        [{"hidden_rules": ("a : raw",)}],
    ),
}


UNSEEN = [
    Case(
        {"unseen_rules": ("mlp : int8",)},
        "The rule `mlp : int8` saw nothing: the modules did not run, or nothing in them or before them requires a "
        "gradient; leave this rule out.",
        [{"unseen_rules": ()}],
    ),
    Case(
        {"outside": 100 * MIB},
        "100.0 MiB (100 % of the saved bytes) were saved outside of the store's model, which did not run; make the "
        "store with the model that trains: a copy of a model has modules of its own.",
        [{"outside": 99 * MIB}],
    ),
]


def sentence(case: Case, lead: str) -> str:
    (found,) = advice(**{**BASE, **case.when})
    assert found == lead + case.says
    return found


def check(case: Case, lead: str) -> None:
    sentence(case, lead)
    for near in case.unless:
        assert all(case.says not in found for found in advice(**{**BASE, **case.when, **near})), near


@pytest.mark.parametrize("name", BYTES)
def test_a_sentence_about_bytes_appears_in_its_situation_alone(name: str) -> None:
    check(BYTES[name], "50.0 MiB (50 % of the saved bytes) ")


@pytest.mark.parametrize("name", STALLS)
def test_a_sentence_about_a_stall_appears_in_its_situation_alone(name: str) -> None:
    check(STALLS[name], "Compute waited 20.0 ms of 80.0 ms (25 %)")


def test_so_little_that_it_travels_in_one_parcel() -> None:
    check(PARCELS, "4.0 MiB (50 % of the saved bytes) ")


@pytest.mark.parametrize("name", RULES_HIDDEN)
def test_rules_that_saw_nothing(name: str) -> None:
    check(RULES_HIDDEN[name], "")
    found = advice(**{**BASE, **RULES_HIDDEN[name].when, "peak_held_bytes": 400 * MIB})
    assert [text.split()[0] for text in found] == ["The", "400.0"]


@pytest.mark.parametrize("case", UNSEEN, ids=lambda case: next(iter(case.when)))
def test_what_did_not_run_is_told(case: Case) -> None:
    check(case, "")


def test_what_backward_has_freed_before_the_peak_is_not_advised_about() -> None:
    kept = {**BASE, **RULE, "rule_decision": "recompute", "held_bytes": 60 * MIB, "peak_work": "recomputation"}
    kept |= {"peak_site": "0", "peak_bytes": 70 * MIB}
    (found,) = advice(**kept, peak_held_bytes=80 * MIB)  # beside 10 MiB, where the 50 MiB are gone
    assert found.startswith("20.0 MiB (20 % of the saved bytes) more than at the end of forward were held")
    assert "70.0 MiB of it to run 0 again" in found
    found = advice(**kept, peak_held_bytes=81 * MIB)[0]  # beside 11 MiB: they were not all gone
    assert "were kept because `* : recompute`" in found


def test_nothing_saved_at_all() -> None:
    (found,) = advice()
    assert "saved 0 bytes" in found
    assert "with store:" in found
    assert not any("saved 0 bytes" in one for one in advice(saved_bytes=1, kept_small=1))


def test_nothing_amiss_needs_no_words() -> None:
    fine = {"saved_bytes": 1000, "held_bytes": 100, "peak_held_bytes": 300, "kept_small": 99, "in_flight": 50}
    assert advice(**fine, stall_ms=1, step_ms=100) == []


def test_the_weightiest_three_in_their_order() -> None:
    kept = {"kept_small": 15, "kept_window": 30, "on_host": 12, "host_decision": "raw @ host", "kept_no_room": 20}
    found = advice(saved_bytes=100, **kept, tiers="disk", stall_ms=25, step_ms=100, late=1)
    assert [one.split()[0] for one in found] == ["30", "Compute", "20"]


def test_the_table_of_the_guide_quotes_sentences() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    table = page.split("## It saves nothing")[1].split("##")[0]
    quoted = re.findall(r"^\| \*(.+?)\* \|", table, re.MULTILINE)
    assert len(quoted) >= 10
    cases = [*BYTES.values(), *RULES_HIDDEN.values(), *UNSEEN, PARCELS]
    said = " ".join([*advice(), *(case.says for case in cases)])
    assert [words for words in quoted if words not in said] == []


@pytest.mark.parametrize(
    ("note", "options", "group"),
    [
        (Note(SMALL), {}, "small"),
        (Note(SMALL, kept=True), {}, "small"),
        (Note.no_room(("host", "disk")), {}, "no_room"),
        (Note("softmax", kept=True), {"exact": True}, "exact"),
        (Note(COMPILED, kept=True), {"exact": True}, "compiled"),
        (Note("a nested tensor", kept=True), {}, "whole"),
        (Note(), {}, "by_rule"),
        (Note(kept=True), {}, "by_rule"),
        (Note("window of host full", full=("host",)), {"stored": 50}, "crowded"),
        (Note(decisions="relu"), {}, None),
        (Note("its output, which recomputations read"), {}, None),
        (Note.no_room(("host",)), {"stored": 50}, "in_flight"),
        (Note("window of host full", full=("host",)), {}, None),
    ],
)
def test_a_note_puts_a_site_into_one_group(note: Note, options: dict[str, Any], group: str | None) -> None:
    ledger = Ledger()
    account = ledger.account(Site("a", 0))
    account.note, account.exact = note, options.get("exact", False)
    account.decision = Offload(Raw(), ("host", "disk")) if "stored" in options else Keep()
    ledger.add(account, 100, options.get("stored", 0), 100)
    ledger.mark_exit()
    facts = Circumstances(min_nbytes=0, on_host=False, step_ms=1, first_step=True, keeps_when_full=True)
    step = Step(ledger, facts, Request(Rules([], default=Keep())))
    found = {name: getattr(step, name).nbytes for name in ("small", "no_room", "exact", "compiled", "whole")}
    found |= {name: getattr(step, name).nbytes for name in ("crowded", "in_flight")}
    found["by_rule"] = sum(step.by_rule.values())
    assert {name: nbytes for name, nbytes in found.items() if nbytes} == ({group: 100} if group else {})

"""The groups of accounts that advice counts: each kept site is in one of them, by its note."""

import pytest

from actstore.autograd.protect import COMPILED
from actstore.base.ledger import Circumstances, Ledger
from actstore.base.note import SMALL, Note
from actstore.base.spec import Site
from actstore.codecs import Raw
from actstore.policy import Keep, Offload, Rules
from actstore.session.advice import StepFigures
from actstore.session.causes import Request, figures_of

GROUPS = ("kept_small", "kept_no_room", "kept_exact", "kept_compiled", "kept_whole", "kept_by_rule", "kept_window")


def figures(note: Note, *, stored: int = 0, exact: bool = False) -> StepFigures:
    """Figures of a step with one site of 100 bytes that has this note."""
    ledger = Ledger()
    account = ledger.account(Site("a", 0))
    account.note, account.exact = note, exact
    account.decision = Offload(Raw(), ("host", "disk")) if stored else Keep()
    ledger.add(account, 100, stored, 100)
    ledger.mark_exit()
    circumstances = Circumstances(min_nbytes=0, on_host=False, step_ms=1, first_step=True, keeps_when_full=True)
    return figures_of(ledger, circumstances, Request(Rules([], default=Keep())))


@pytest.mark.parametrize(
    ("note", "options", "group"),
    [
        (Note(SMALL), {}, "kept_small"),
        (Note(SMALL, kept=True), {}, "kept_small"),
        (Note.no_room(("host", "disk")), {}, "kept_no_room"),
        (Note("softmax", kept=True), {"exact": True}, "kept_exact"),
        (Note(COMPILED, kept=True), {"exact": True}, "kept_compiled"),
        (Note("a nested tensor", kept=True), {}, "kept_whole"),
        (Note(), {}, "kept_by_rule"),
        (Note(kept=True), {}, "kept_by_rule"),
        (Note("window of host full", full=("host",)), {"stored": 50}, "kept_window"),
        (Note(decisions="relu"), {}, None),
        (Note("its output, which recomputations read"), {}, None),
        (Note.no_room(("host",)), {"stored": 50}, None),
        (Note("window of host full", full=("host",)), {}, None),
    ],
)
def test_a_note_puts_a_site_into_one_group(note, options, group):
    found = figures(note, **options)
    assert {name: nbytes for name in GROUPS if (nbytes := getattr(found, name))} == ({group: 100} if group else {})


def test_facts_come_from_notes():
    assert figures(Note.no_room(("host", "disk"))).tiers == "host > disk"
    assert figures(Note("softmax", kept=True), exact=True).exact_reason == "softmax"
    assert figures(Note("a nested tensor", kept=True)).whole_reason == "a nested tensor"

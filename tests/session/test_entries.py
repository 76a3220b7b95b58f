"""Entries: what they undo, whatever fails or interrupts it."""

import pytest

from actstore.session.entries import StoreEntry
from tests.system.interrupts import Instructions


class Hooks:
    def entry_hook(self):
        return None


def entry_with(undos):
    entry = StoreEntry(None, Hooks(), None)
    entry.undos += undos
    return entry


def noting(ran, number, error=None):
    def undo():
        ran.append(number)
        if error is not None:
            raise error

    return undo


def test_the_last_registration_is_undone_first():
    ran = []
    entry = entry_with([noting(ran, 0), noting(ran, 1), noting(ran, 2)])
    entry.unwind(None)
    entry.unwind(None)
    assert ran == [2, 1, 0]


def test_all_undos_run_when_some_fail():
    ran, first = [], ValueError("first")
    entry = entry_with([noting(ran, 0), noting(ran, 1, OSError("second")), noting(ran, 2, first), noting(ran, 3)])
    with pytest.raises(OSError, match="second") as raised:
        entry.unwind(None)
    assert raised.value.__context__ is first
    assert ran == [3, 2, 1, 0]


def test_undos_know_the_error_and_the_entry_forgets_it():
    seen, error = [], ValueError()
    entry = entry_with([lambda: seen.append(entry.error)])
    entry.unwind(error)
    assert seen == [error]
    assert entry.error is None


def test_an_interrupt_before_any_instruction_loses_no_undo():
    """Not even of an undo that fails; one may run twice, and only the one that ran at the interrupt."""

    def unwind(at):
        ran = []
        entry = entry_with([noting(ran, 0), noting(ran, 1, OSError("fails")), noting(ran, 2)])
        try:
            with Instructions({StoreEntry.unwind.__code__}, at) as instructions:
                entry.unwind(None)
        except KeyboardInterrupt as interrupt:
            try:
                entry.unwind(interrupt)
            except OSError:
                assert ran.count(1) >= 1
        except OSError:
            assert at is None
        assert list(dict.fromkeys(ran)) == [2, 1, 0]
        assert len(ran) <= 4
        assert not entry.undos
        return instructions.count

    count = unwind(None)
    assert count > 30
    for at in range(1, count + 1):
        unwind(at)

"""The equation of bytes: what was added and not released is held, and the peak is the most there ever was."""

import gc
import threading

from hypothesis import given
from hypothesis import strategies as st

from actstore.base.ledger import Claim, Ledger
from actstore.base.note import Note
from actstore.base.spec import Site

SITES = [Site("a", 0), Site("a", 1), Site("b", 0)]


class Naive:
    """Books everything at once, by adding up again and again."""

    def __init__(self):
        self.items = []  # (site, held, away)
        self.saved = dict.fromkeys(SITES, 0)
        self.stored = dict.fromkeys(SITES, 0)
        self.peaks = dict.fromkeys([*SITES, None], 0)
        self.at_exit = dict.fromkeys([*SITES, None], 0)
        self.turns = []
        self.turned = False

    def mark(self, *, turned):
        """A turn to backward, or the exit: the first one counts, and each later one with more bytes."""
        if not self.turned:
            self.turns = []
        if turned or self.turned:
            self.turns.append({key: held for key in SITES if (held := self.held(key))})
        if not self.turned or self.held() > self.at_exit[None]:
            self.at_exit = {key: self.held(key) for key in self.at_exit}
        self.turned = turned

    def held(self, site=None, column=1):
        return sum(item[column] for item in self.items if site in (None, item[0]))

    def touch(self, transient, site):
        for key in (site, None):
            self.peaks[key] = max(self.peaks[key], self.held(key) + transient)

    def start(self):
        self.saved, self.stored = dict.fromkeys(SITES, 0), dict.fromkeys(SITES, 0)
        self.peaks = {key: self.held(key) for key in self.peaks}


def check(ledger, naive):
    accounts = {account.site: account for account in ledger.accounts()}
    for site in SITES:
        account = accounts.get(site) or ledger.account(site)
        assert account.held == naive.held(site)
        assert account.away == naive.held(site, 2)
        assert (account.saved, account.stored) == (naive.saved[site], naive.stored[site])
        assert account.peak == naive.peaks[site]
        assert account.held_at_exit == naive.at_exit[site]
    assert ledger._held == naive.held()
    assert ledger.peak == naive.peaks[None]
    assert ledger.held_at_exit == naive.at_exit[None]
    assert [{account.site: held for account, held in turn.items()} for turn in ledger.turns] == naive.turns


commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(SITES), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("release"), st.integers(0, 99)),
        st.tuples(st.just("move"), st.integers(0, 99)),
        st.tuples(st.just("touch"), st.sampled_from(SITES), st.integers(0, 20)),
        st.tuples(st.sampled_from(["start", "turn", "exit", "check"])),
    ),
    max_size=40,
)


@given(commands)
def test_random_orders(commands):
    ledger, naive = Ledger(), Naive()
    for what, *args in commands:
        if what == "add":
            site, held, away = args
            ledger.add(ledger.account(site), 3 * held, held + away, held, away)
            naive.items.append((site, held, away))
            naive.saved[site] += 3 * held
            naive.stored[site] += held + away
            naive.touch(0, site)
        elif what == "release" and naive.items:
            site, held, away = naive.items.pop(args[0] % len(naive.items))
            ledger.release([ledger.account(site), held, away])
        elif what == "move" and naive.items:
            site, held, away = naive.items.pop(args[0] % len(naive.items))
            ledger.add(ledger.account(site), 0, 0, -held, held)
            naive.items.append((site, 0, away + held))
        elif what == "touch":
            site, transient = args
            ledger.touch_peak(ledger.account(site), transient)
            naive.touch(transient, site)
        elif what == "start":
            ledger.start()
            naive.start()
        elif what == "exit":
            ledger.mark_exit()
            naive.mark(turned=False)
        elif what == "turn":
            ledger.mark_turn()
            naive.mark(turned=True)
        elif what == "check":
            check(ledger, naive)
    check(ledger, naive)


def test_the_peak_does_not_count_what_was_released_before():
    ledger = Ledger()
    account = ledger.account(SITES[0])
    ledger.add(account, 0, 0, 100)
    ledger.release([account, 100, 0])
    ledger.add(account, 0, 0, 60)
    assert (ledger.peak, account.peak) == (100, 100)
    ledger.release([account, 60, 0])
    ledger.touch_peak(account, 101)
    assert (ledger.peak, account.peak) == (101, 101)


def test_threads_and_finalizers():
    ledger = Ledger()

    class Holding:
        def __init__(self, account, nbytes, *, cycle):
            ledger.add(account, 0, nbytes, nbytes)
            self.account, self.nbytes = account, nbytes
            self.me = self if cycle else None

        def __del__(self):
            ledger.release([self.account, self.nbytes, 0])

    def work(number):
        account = ledger.account(Site(f"thread {number}", 0))
        for i in range(200):
            Holding(account, 1 + i % 7, cycle=i % 3 == 0)
            kept = Holding(account, 5, cycle=False)
            ledger.touch_peak(account, 3)
            if i % 50 == 0:
                with ledger._lock:
                    gc.collect()
            del kept

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "deadlock"
    gc.collect()
    assert [account.held for account in ledger.accounts()] == [0] * 4
    assert ledger._held == 0
    assert ledger.peak >= max(account.peak for account in ledger.accounts()) >= 8


class Owner:
    """Owns 100 bytes through its claim."""

    def __init__(self, ledger, idle):
        self.claim = claim = Claim(self, ledger.release)
        claim.booking, claim.memory, claim.idle = [ledger.account(SITES[0]), 0, 0], bytearray(100), idle
        ledger.add(claim.booking[0], 0, 100, 100, booking=claim.booking)


def test_a_claim_is_given_back_when_its_owner_dies():
    ledger, idle = Ledger(), []
    owner = Owner(ledger, idle)
    claim = owner.claim
    (account,) = ledger.accounts()
    assert (account.held, idle) == (100, [])
    del owner
    assert [bool(ledger.gone), idle] == [True, []]
    ledger.settle()
    assert (account.held, [len(memory) for memory in idle], claim.memory) == (0, [100], None)


def test_a_claim_that_was_released_before_is_given_back_once():
    ledger, idle = Ledger(), []
    owner = Owner(ledger, idle)
    claim = owner.claim
    ledger.release(claim)
    ledger.settle()
    del owner
    (account,) = ledger.accounts()
    assert (account.held, len(idle), claim.memory) == (0, 1, None)


def test_a_claim_that_an_interrupt_left_empty_gives_nothing_back():
    ledger = Ledger()
    owner = Owner(ledger, [])
    empty = Claim(owner, ledger.release)
    del owner
    (account,) = ledger.accounts()
    assert (account.held, hasattr(empty, "memory"), list(ledger.gone)) == (0, False, [])


def test_a_claim_that_somebody_holds_survives_the_collection_of_a_cycle():
    ledger, idle = Ledger(), []
    owner = Owner(ledger, idle)
    owner.itself, held = owner, owner.claim
    del owner
    gc.collect()
    ledger.settle()
    assert (len(idle), held.memory) == (1, None)


def test_an_account_is_opened_once():
    ledger = Ledger()
    barrier, found = threading.Barrier(4), []

    def work():
        barrier.wait()
        found.append([ledger.account(Site("x", i)) for i in range(100)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(accounts == found[0] for accounts in found)
    assert [account.site.index for account in ledger.accounts()] == list(range(100))


def test_a_step_forgets_the_decision_of_the_one_before():
    ledger = Ledger()
    account = ledger.account(Site("a", 0))
    account.decision, account.note = "int8 @ host", Note("small")
    ledger.start()
    assert (account.where, account.note) == ("", Note())


def test_a_peak_names_the_work_that_made_it():
    ledger = Ledger()
    account = ledger.account(Site("a", 0))
    assert ledger.transient is None
    ledger.add(account, 10, 0, 10)
    ledger.touch_peak(account, 5, "sampling")
    ledger.touch_peak(account, 3, "recomputation")  # less
    found = ledger.transient
    assert (found.work, found.site, found.nbytes, found.peak) == ("sampling", Site("a", 0), 5, 15)
    ledger.add(account, 6, 0, 6)  # more is held than ever existed for a moment
    assert ledger.transient is None
    ledger.touch_peak(None, 1)
    assert (ledger.transient.work, ledger.transient.site) == ("decoding", None)
    ledger.start()
    assert ledger.transient is None


def test_stalls_for_room_are_stalls():
    ledger = Ledger()
    account = ledger.account(Site("a", 0))
    ledger.time(account, "stall", 3)
    ledger.time(account, "room", 4)
    assert (account.stall_ns, account.room_ns) == (7, 4)
    ledger.start()
    assert (account.stall_ns, account.room_ns) == (0, 0)

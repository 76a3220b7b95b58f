"""Many calls, plain and in a few stores, each of which sees them all: what is equal bit for bit, and what is not."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest

from actstore import ActivationStore
from actstore.transfer import engine
from actstore.transfer.parcel import Loan
from tests.autograd.checks import check_drained, gc_off, same_bits, settle
from tests.operators.calls import Call
from tests.operators.derivatives import Context, Results, changed_inputs, changed_outputs, survivors, unchanged

Derive = Callable[[Call, Context], Results]
CHANGES = (changed_inputs, changed_outputs)

LENT = "raw @ disk, lent"  # every payload travels alone, and what is fetched serves as the tensors' memory
KEPT = "*/nothing : raw; * : keep"  # where names of tensors matter, each tensor that is kept has a handle of its own
POLICIES = ("raw", "raw @ host", "raw @ disk", LENT)


class Landed:
    """A store's context, after which whatever left for a tier has arrived there: from then on memory can be lent."""

    def __init__(self, store: ActivationStore) -> None:
        self.store = store

    def __enter__(self) -> None:
        self.store.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.store.__exit__(*error)
        for place in self.store._store._places.values():
            settle(place.engine)


class Subject:
    """A store, and what it did to all calls so far.

    Attributes
    ----------
    counts : how many calls had which verdict; "stored", those of which the store stored something; "lent", payloads
        whose memory was lent
    """

    def __init__(self, policy: str, store: ActivationStore | None = None) -> None:
        self.policy = policy
        with pytest.MonkeyPatch.context() as patch:
            if policy == LENT:
                patch.setattr(engine, "SMALL_NBYTES", 1)  # an engine reads it once
            self.store = store or ActivationStore(policy=policy.partition(",")[0], min_bytes=0)
        self.counts: Counter[str] = Counter()

    @contextmanager
    def acting(self) -> Iterator[Context]:
        """While the call's derivatives are computed: the memory of fetched payloads is lent, where it should be."""
        init = Loan.__init__

        def counted(*args):
            self.counts["lent"] += 1
            init(*args)

        with pytest.MonkeyPatch.context() as patch:
            if self.policy == LENT:
                patch.setattr(Loan, "__init__", counted)
            yield Landed(self.store) if self.policy == LENT else self.store
        self.counts["stored"] += self.store.report().stored_bytes > 0

    def close(self) -> None:
        check_drained(self.store)
        self.store.close()


class Outcome(NamedTuple):
    """The derivatives of a call, or the error in place of them."""

    results: Results
    error: Exception | None

    @classmethod
    def of(cls, call: Call, derive: Derive, context: Context) -> Outcome:
        try:
            return cls(derive(call, context), None)
        except Exception as error:  # any error is an outcome
            return cls((), error.with_traceback(None))

    def same(self, other: Outcome) -> bool:
        return len(self.results) == len(other.results) and all(map(same_bits, self.results, other.results))


def judge(call: Call, derive: Derive, subject: Subject, plain: Outcome) -> str:
    """A verdict; what is wrong begins with "differs: "."""
    with subject.acting() as context:
        found = Outcome.of(call, derive, context)
    if plain.error is not None:
        if isinstance(found.error, type(plain.error)):
            return "refused by both"
        return f"differs: plain raises {plain.error!r}, the store {found.error!r}"
    if found.error is not None:
        return f"differs: {type(found.error).__name__}: {found.error}"
    if not plain.results:
        return "nothing to differentiate"
    if found.same(plain):
        return "equal"
    if derive in CHANGES and found.same(Outcome.of(call, unchanged, nullcontext())):
        return "right where plain is wrong"  # a change that no version tells: kron saves an `_unsafe_view`
    return "differs: other bits" if Outcome.of(call, derive, nullcontext()).same(plain) else "differs from run to run"


def compare(calls: Iterable[Call], derive: Derive, subjects: Iterable[Subject]) -> list[str]:
    """What differs from plain, in words; each subject's counts tell of the rest."""
    findings = []
    for call in calls:
        plain = Outcome.of(call, derive, nullcontext())
        for subject in subjects:
            verdict = judge(call, derive, subject, plain)
            subject.counts[verdict.partition(":")[0]] += 1
            if verdict.startswith("differs: "):
                findings.append(f"{subject.policy}: {call.name}: {verdict}")
    return findings


def sweep(calls: Iterable[Call], derive: Derive, policies: Iterable[str]) -> tuple[dict[str, Counter[str]], list[str]]:
    """Counts of each policy, with one store over all calls, and what differs."""
    subjects = [Subject(policy) for policy in policies]
    findings = compare(calls, derive, subjects)
    for subject in subjects:
        subject.close()
    return {subject.policy: subject.counts for subject in subjects}, findings


def leaks(calls: Iterable[Call], policies: Iterable[str]) -> tuple[Counter[str], list[str]]:
    """What outlives the outputs where only reference counts free anything: nodes of the graph, and payloads."""
    counts: Counter[str] = Counter()
    findings = []
    subjects = [Subject(policy) for policy in policies]
    with gc_off():
        for i, call in enumerate(calls, 1):
            if not i % 500:  # what the samples themselves leave
                gc.collect()
            if Outcome.of(call, survivors, nullcontext()) != ([], None):
                counts["refused or held by plain"] += 1
                continue
            for subject in subjects:
                with subject.acting() as context:
                    alive = survivors(call, context)
                left = subject.store.report().live_bytes
                if alive or left:
                    findings.append(f"{subject.policy}: {call.name}: {alive} outlive the outputs, {left} bytes stored")
                counts[subject.policy] += 1
    for subject in subjects:
        subject.close()
    return counts, findings

"""Order of the payloads in backward, learned from the last backward of the same forward."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

B = TypeVar("B")  # the berth of a payload

MAX_LESSONS = 64  # one for each first payload


@dataclass
class Lesson:
    """Record of the payloads and the order of one run.

    Attributes
    ----------
    signs : for each payload a hash of the sites of all payloads up to it
    order : serial numbers of the payloads in the order in which backward first asked for them
    nbytes : size of each payload
    """

    signs: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def first(self, nbytes: int) -> set[int]:
        """Return the payloads that backward asks for first, of at most `nbytes` in all; always at least one."""
        found: set[int] = set()
        for serial in self.order:
            nbytes -= self.nbytes[serial]
            if nbytes < 0 and found:
                break
            found.add(serial)
        return found


class TransferRun(Generic[B]):
    """One forward and its backward, or several of both between an enter and an exit. Not thread-safe.

    Attributes
    ----------
    berths : the payloads that are alive, by serial number
    soon : payloads that backward is expected to ask for first, which may stay on the device
    ahead_nbytes : bytes that wait for backward on the device, as the quota counts them
    """

    def __init__(self, lessons: Lessons) -> None:
        self._lessons = lessons
        self.ahead_nbytes = 0
        self._begin()

    def _begin(self) -> None:
        self.berths: dict[int, B] = {}
        self.soon: set[int] = set()
        self._own = Lesson()
        self._own_nbytes = 0
        self._foreseen_nbytes: float = inf  # of all payloads, until backward begins
        self._known: Lesson | None = None
        self._asked: set[int] = set()
        self._ranks: dict[int, int] = {}
        self._expected: list[int] = []
        self._position = 0  # in `_expected`, after the last one that backward has asked for
        self._ahead = 0  # in `_expected`, the next one for `upcoming`

    def recall(self, site: int) -> None:
        """Look up the last forward that began at `site`. Does nothing after the first payload is numbered."""
        if self._own.signs and not self.berths:  # all payloads are dead: another forward begins
            self._begin()
        if not self._own.signs:
            self._known = self._lessons.of(hash((0, site)))
            self._foreseen_nbytes = inf if self._known is None else sum(self._known.nbytes)

    @property
    def moved_nbytes(self) -> float:
        """Size of all payloads: the last run's until backward begins, inf in the first run."""
        return max(self._foreseen_nbytes, self._own_nbytes)

    def keep_soon(self, nbytes: int) -> None:
        """Let `nbytes` stay that backward is expected to ask for first. Call after the first `number`."""
        if self._known is not None:
            self.soon = self._known.first(nbytes)

    def number(self, site: int, nbytes: int) -> int:
        """Return the serial number of the next payload, which is saved at `site`."""
        own = self._own
        if not own.signs or not self.berths:
            self.recall(site)
            own = self._own
        serial = len(own.signs)
        sign = hash((own.signs[-1] if serial else 0, site))
        own.signs.append(sign)
        own.nbytes.append(nbytes)
        self._own_nbytes += nbytes
        if self._known is not None and not (serial < len(self._known.signs) and self._known.signs[serial] == sign):
            self._known = None
            self.soon = set()
        return serial

    def ask(self, serial: int) -> None:
        """Note that backward asks for a payload."""
        if serial in self._asked:
            return
        if not self._expected or serial >= len(self._expected):
            self._expect()
        self._asked.add(serial)
        self._own.order.append(serial)
        rank = self._ranks.get(serial)
        if rank is not None:
            self._position = rank + 1
            self._ahead = max(self._ahead, self._position)

    def foresee(self) -> None:
        """Predict the order, where backward has not asked for a payload yet."""
        if not self._expected:
            self._expect()

    def expects(self, serial: int) -> bool:
        """Return whether `upcoming` has passed the payload and backward has not asked for it yet."""
        return serial not in self._asked and self._position <= self._ranks.get(serial, -1) < self._ahead

    def upcoming(self) -> B | None:
        """Return the next payload to fetch ahead, or None; the same one until `passed` is called."""
        while self._ahead < len(self._expected):
            berth = self.berths.get(self._expected[self._ahead])
            if berth is not None and self._expected[self._ahead] not in self._asked:
                return berth
            self._ahead += 1
        return None

    def passed(self) -> None:
        self._ahead += 1

    def forget(self, serial: int) -> None:
        """Remove a payload that died. With the last one, learn the lesson."""
        self.berths.pop(serial, None)
        if not self.berths:
            self._lessons.learn(self._own)

    def _expect(self) -> None:
        """Predict the order: the order of the last run, else the last payload first."""
        count = len(self._own.signs)
        self._foreseen_nbytes = 0
        known = self._known
        if known is not None and len(known.signs) == count:
            self._expected = known.order
        else:
            self._expected = list(range(count - 1, -1, -1))
        self._ranks = {serial: rank for rank, serial in enumerate(self._expected)}
        self._position = self._ahead = 0


class Lessons:
    """The last lesson of each forward, keyed by the site of its first payload. Not thread-safe.

    Attributes
    ----------
    differed : "forward" where the last lesson had other payloads than the one before, "backward" where it had another
        order of them, else empty
    """

    def __init__(self) -> None:
        self._of: OrderedDict[int, Lesson] = OrderedDict()
        self.differed = ""

    def of(self, sign: int) -> Lesson | None:
        return self._of.get(sign)

    def learn(self, lesson: Lesson) -> None:
        if lesson.order:
            before = self._of.get(lesson.signs[0])
            if before is None or before.signs != lesson.signs:
                self.differed = "forward"
            elif before.order != lesson.order:
                self.differed = "backward"
            self._of[lesson.signs[0]] = lesson
            self._of.move_to_end(lesson.signs[0])
            if len(self._of) > MAX_LESSONS:
                self._of.popitem(last=False)

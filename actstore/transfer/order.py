"""In which order payloads come back: learned from the last backward of the same forward."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

B = TypeVar("B")  # what a run knows a payload by

REMEMBERED = 64  # forwards that differ from their first payload on


@dataclass
class Lesson:
    """What a run has shown.

    Attributes
    ----------
    signs : for each payload a number that stands for the sites of all payloads up to it
    order : serial numbers of the payloads in the order in which backward first asked for them
    nbytes : of each payload
    """

    signs: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def first(self, nbytes: int) -> set[int]:
        """The payloads that backward asks for first, up to a sum of `nbytes`, and one at least."""
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
    soon : payloads that backward is expected to ask for first: they may stay on the device
    ahead_nbytes : what waits for backward on the device, as the quota counts it
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
        self._position = 0  # in `expected`: what comes before it was asked for
        self._ahead = 0  # and this is the next to be looked at by `upcoming`

    def recall(self, site: int) -> None:
        """Remember the last forward that began at `site`, before the first payload is numbered; do nothing after."""
        if self._own.signs and not self.berths:  # all that was saved has been used: another forward begins
            self._begin()
        if not self._own.signs:
            self._known = self._lessons.of(hash((0, site)))
            self._foreseen_nbytes = inf if self._known is None else sum(self._known.nbytes)

    @property
    def moved_nbytes(self) -> float:
        """Return the bytes of all payloads: as many as the last time until backward begins, inf the first time."""
        return max(self._foreseen_nbytes, self._own_nbytes)

    def keep_soon(self, nbytes: int) -> None:
        """Have so many bytes stay for backward, which is expected to ask for them first. After the first `number`."""
        if self._known is not None:
            self.soon = self._known.first(nbytes)

    def number(self, site: int, nbytes: int) -> int:
        """The serial number of the next payload. `site` stands for where it was saved."""
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
        """Backward asks for a payload."""
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

    def expects(self, serial: int) -> bool:
        """Whether the payload was looked ahead to and has not been asked for yet."""
        return serial not in self._asked and self._position <= self._ranks.get(serial, -1) < self._ahead

    def upcoming(self) -> B | None:
        """The next payload to look at, or None; the same one until `passed` is called."""
        while self._ahead < len(self._expected):
            berth = self.berths.get(self._expected[self._ahead])
            if berth is not None and self._expected[self._ahead] not in self._asked:
                return berth
            self._ahead += 1
        return None

    def passed(self) -> None:
        self._ahead += 1

    def forget(self, serial: int) -> None:
        """A payload is gone; with the last one the lesson is learned."""
        self.berths.pop(serial, None)
        if not self.berths:
            self._lessons.learn(self._own)

    def _expect(self) -> None:
        """Foresee the order: as it was the last time, or the last payload first."""
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
    """The last lesson of each forward, told apart by their first payload's site. Not thread-safe.

    Attributes
    ----------
    differed : the last lesson differed from the one before by its "forward" (other payloads) or by its "backward"
        (another order); empty where it did not
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
            if len(self._of) > REMEMBERED:
                self._of.popitem(last=False)

"""Sets of moments, as sorted disjoint spans (begin, end) in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]], gap: int = 0) -> Spans:
    """Return all moments in any of the spans. Spans at most `gap` apart merge; empty spans hold no moment."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1] + gap:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(left: Spans, right: Spans) -> Spans:
    """Return the moments in both."""
    both: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            both.append((begin, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return both


def difference(left: Spans, right: Spans) -> Spans:
    """Return the moments in `left` that are not in `right`."""
    if not left:
        return []
    edges = [left[0][0], *(edge for span in right for edge in span), left[-1][1]]
    return intersection(left, list(zip(edges[::2], edges[1::2], strict=True)))


def total(spans: Spans) -> int:
    """Return the total length in nanoseconds."""
    return sum(end - begin for begin, end in spans)

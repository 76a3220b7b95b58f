"""Says in words why a store saved little or cost time, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from actstore.base.units import format_nbytes

MOST = 3  # sentences
LEAST_BYTES = 0.10  # of the saved bytes: a smaller cause is not worth a sentence
LEAST_PEAK = 0.50  # of the saved bytes, above what is held at the end of forward
LEAST_STALL = 0.05  # of a step


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one step of a store came to. Sizes in bytes at the end of forward, times in milliseconds of a step.

    Attributes
    ----------
    saved_bytes : what plain autograd would hold
    held_bytes : held on the compute device at the end of forward
    peak_held_bytes : high-water of that over the step
    kept_small : kept because the tensor is smaller than `min_bytes`
    min_bytes : that limit
    kept_no_room : kept because no tier of the ladder had room
    tiers : that ladder, as policy text
    kept_protected : kept because the values may not be lossy
    kept_by_policy : kept because the policy says keep
    kept_still_alive : stored, and yet the original storage is held by somebody else
    alive_site : where most of that was saved
    on_host : stored in memory of the host, where that is the compute device's own
    compiled : stored, and in backward read at once by one compiled region
    in_flight : stored, and not yet away from the device
    stall_ms, step_ms : compute waited, of a step
    fetches, late, misses : payloads that backward asked for; of these, those whose fetch had begun and was not
        complete, and those whose fetch had not begun
    first_step : whether no step came before, whose order the fetches could follow
    """

    saved_bytes: int = 0
    held_bytes: int = 0
    peak_held_bytes: int = 0
    kept_small: int = 0
    min_bytes: int = 0
    kept_no_room: int = 0
    tiers: str = ""
    kept_protected: int = 0
    kept_by_policy: int = 0
    kept_still_alive: int = 0
    alive_site: str = ""
    on_host: int = 0
    compiled: int = 0
    in_flight: int = 0
    stall_ms: float = 0.0
    step_ms: float = 0.0
    fetches: int = 0
    late: int = 0
    misses: int = 0
    first_step: bool = False


def why(figures: Figures) -> list[str]:
    """At most three sentences, the weightiest first; none where nothing is amiss. Each has figure, cause and remedy."""
    if figures.saved_bytes == 0:
        return [
            "Autograd saved 0 bytes inside the store's context: forward ran outside of it, under no_grad or inside "
            "another checkpoint; put `with store:` around the forward pass that backward follows."
        ]
    found: list[tuple[float, str]] = []
    for nbytes, least, words in _causes(figures):
        share = nbytes / figures.saved_bytes
        if share >= least:
            found.append((share, f"{format_nbytes(nbytes)} ({_percent(share)} of the saved bytes) {words}"))
    stalled = figures.stall_ms / figures.step_ms if figures.step_ms > 0 else 0.0
    if stalled >= LEAST_STALL:
        found.append((stalled, _stall(figures, stalled)))
    found.sort(key=lambda one: one[0], reverse=True)
    return [text for _, text in found[:MOST]]


def _causes(f: Figures) -> list[tuple[int, float, str]]:
    """Each cause: its bytes, the least part of the saved bytes that counts, and the words after the figure."""
    return [
        (
            f.kept_still_alive,
            LEAST_BYTES,
            "were stored, but that freed nothing: something else keeps these tensors alive"
            f"{f', most of them at {f.alive_site}' if f.alive_site else ''}; look for attributes, lists or outputs of "
            "the model that hold activations, and drop them before forward ends.",
        ),
        (
            f.kept_small,
            LEAST_BYTES,
            f"are in tensors below min_bytes={format_nbytes(f.min_bytes)}, which are kept; set min_bytes=0 or smaller, "
            "or use larger batches.",
        ),
        (
            f.kept_no_room,
            LEAST_BYTES,
            f"found no room in {f.tiers or 'the tiers'} and were kept; raise host_budget or disk_budget, or end the "
            "ladder with disk, such as `raw @ host > disk`.",
        ),
        (
            f.kept_protected,
            LEAST_BYTES,
            "were kept because their values may not be lossy (integers, statistics, softmax, what needs no gradient); "
            "give the rule a tier, where they go exactly, such as `int8 @ host`, or recompute their modules.",
        ),
        (
            f.kept_by_policy,
            LEAST_BYTES,
            "were kept because the policy says so or no rule matches; add a rule for their modules, such as "
            "`* : int8` at the end.",
        ),
        (
            f.on_host,
            LEAST_BYTES,
            "were moved to host memory, which here is the compute device's own, and so freed nothing; use `@ disk`, a "
            "codec such as int8, or recompute.",
        ),
        (
            f.in_flight,
            LEAST_BYTES,
            "had not left the device when forward ended, because the link is slower than forward; store fewer bytes "
            "(a codec before the link, such as `int8 @ host`), keep the last layers, or recompute some.",
        ),
        (
            f.compiled,
            LEAST_PEAK,
            "were read back at once by one compiled region, because torch.compile needs all that a region saved when "
            "its backward begins: storing them frees memory only until then; compile the blocks instead of the model "
            "(`block.compile()`), or recompute them.",
        ),
        (
            0 if f.compiled >= LEAST_PEAK * f.saved_bytes else f.peak_held_bytes - f.held_bytes,
            LEAST_PEAK,
            "more than at the end of forward are held at the peak of the step, by payloads on their way, decoding or "
            "recomputation; recompute smaller blocks, or store fewer bytes.",
        ),
    ]


def _stall(f: Figures, part: float) -> str:
    lead = f"Compute waited {f.stall_ms:.1f} ms of {f.step_ms:.1f} ms ({_percent(part)})"
    if f.first_step and f.misses:
        return f"{lead}: this was the first step, and its order of fetches is not known before; look at the next one."
    if f.misses > f.late:
        return (
            f"{lead}: {f.misses} of {f.fetches} payloads were not asked for in advance, because backward's order "
            "changes from step to step; keep the modules whose order changes, or run the same graph in each step."
        )
    if f.late:
        return (
            f"{lead}: {f.late} of {f.fetches} payloads came late, because the link is slower than backward; store "
            "fewer bytes (a codec before the link, such as `int8 @ host`), or keep or recompute some layers."
        )
    return f"{lead} for room to offload into; store fewer bytes, raise the budgets, or keep some layers."


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"

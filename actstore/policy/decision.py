"""Decisions on a saved tensor, as values. The text of each parses back to an equal value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actstore.base import extensions
from actstore.base.spec import Site, Spec
from actstore.codecs import Raw
from actstore.codecs.base import Codec
from actstore.errors import ChainError
from actstore.policy.options import codec_text

TIERS = ("device", "group", "host", "disk")  # each is larger and slower than the one before


@dataclass(frozen=True)
class Keep:
    """The decision to leave the tensor where it is, as plain autograd does."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True)
class Encode:
    """The decision to encode the tensor; the payload stays on the compute device.

    Parameters
    ----------
    protected : whether a lossy codec skips the tensors whose error training amplifies or cannot bear: tensors that
        require no gradient (statistics, masks), outputs of softmax and the like, and the loss. They stay exact.

    Raises
    ------
    ChainError : `codec` is not a codec
    """

    codec: Codec
    protected: bool = True

    def __post_init__(self) -> None:
        _require_codec("Encode", self.codec)

    def __str__(self) -> str:
        return _unprotected(self) + codec_text(self.codec)


@dataclass(frozen=True, init=False)
class Offload:
    """The decision to encode the tensor and move the payload to the first of `tiers` that has room.

    Parameters
    ----------
    codec : Codec; `Raw()` for the unchanged bytes
    tiers : a tier, or several from the fastest down: ``"host"``, ``("host", "disk")``
    protected : as for Encode

    Raises
    ------
    ChainError : `codec` is not a codec; no tier, an unknown tier, a tier twice, an upward step, or the device alone
    """

    codec: Codec
    tiers: tuple[str, ...]
    protected: bool = True

    def __init__(self, codec: Codec, tiers: str | Sequence[str], protected: bool = True) -> None:
        _require_codec("Offload", codec)
        object.__setattr__(self, "codec", codec)
        object.__setattr__(self, "protected", protected)
        object.__setattr__(self, "tiers", _ladder((tiers,) if isinstance(tiers, str) else tuple(tiers)))
        if self.tiers == ("device",):
            raise ChainError(
                f"Offload to the device alone moves nothing. Write Encode({codec!r}), whose payload stays on the "
                "device, or name a lower tier: 'host', 'disk'.",
                tiers=self.tiers,
            )

    def __str__(self) -> str:
        return f"{_unprotected(self)}{codec_text(self.codec)} @ {' > '.join(self.tiers)}"


@dataclass(frozen=True)
class Derive:
    """The decision to save nothing of tensors that one cheap operator can compute from other saved tensors in backward.

    GELU's backward reads GELU's input. So its output, which the next linear layer saves, is computed from that input
    when backward reads it. The same holds for SiLU and other activations that keep their inputs, for products, as in
    SwiGLU, and for LayerNorm, RMSNorm and GroupNorm modules. ReLU, tanh, sigmoid and softmax save their outputs, and
    gain nothing; on a CPU, dropout of such an output is computed from it. Masks take one bit an element. A rule covers
    the module that *reads* the tensor: the linear layer, not the GELU before it. Gradients are identical, bit for bit,
    unless `rest` is lossy.

    With a lossy `rest`, as in ``derive(int8)``, a tensor is computed from decoded payloads of that codec, where
    `rest` would encode it with loss, too. Statistics of norms stay exact. Signs, bounds and divisors by which backward
    decides stay as under `rest` alone: such a tensor has a payload of its own.

    Parameters
    ----------
    rest : the decision on all other tensors: Keep, Encode or Offload

    Raises
    ------
    ChainError : `rest` is another decision

    Notes
    -----
    Derived are tensors of `min_bytes` or more whose operator's inputs were saved through the store, too, and come
    back exactly or through the codec of `rest`. At most four operators run in a row for one tensor. In-place changes of
    the tensor, or of its operator's inputs, raise the error that autograd raises. A change without a version counter is
    not noticed, and the tensor then differs: a write through ``.data`` to the tensor, or to the weight of a
    normalization before backward has read its output. `actstore verify` shows whether a model does that. Backends that
    were switched off in forward (``torch.backends.mkldnn``) must be off in backward.
    """

    rest: Keep | Encode | Offload = field(default_factory=Keep)

    def __post_init__(self) -> None:
        if not isinstance(self.rest, Keep | Encode | Offload):
            raise ChainError(
                f"derive takes the decision on all other tensors, such as Keep() or Offload(Raw(), 'host'), not "
                f"{self.rest}."
            )

    def __str__(self) -> str:
        return "derive" if self.rest == Keep() else f"derive({self.rest})"


@dataclass(frozen=True)
class Recompute:
    """The decision to save only the inputs of the module, and to run its forward again in backward.

    An input that an earlier recomputed call returned need not be stored either, as between the blocks of a model or
    the steps of a recurrent cell. It is *replayed*, by running that call, and those before it, once more
    from the last stored input. Such calls are a chain. `segment` and `schedule` choose the inputs of a chain to
    store; the input of its last call always waits as it is. Gradients are identical, bit for bit.

    Parameters
    ----------
    inputs : the decision on the stored inputs: Keep, Encode or Offload
    segment : one input of each `segment` calls of a chain is stored, 1 or more; each other input costs one forward,
        and exists again while backward is in its segment
    schedule : in place of a segment. "sqrt": segments of as many calls as the square root of the chain's length;
        "revolve": at most `slots` inputs exist at any moment, and forwards are the fewest that this allows;
        "auto": Revolve with the fewest slots that keep replays below two forwards for each call
    slots : for Revolve, 1 or more; the input of the chain's first call takes one of them, that of its last call none
    first : only the first calls of the module in each entry of the store are recomputed, this number of them; later
        calls are kept
    tiles : the module runs on this number of slices of its tokens, one after the other, in forward and in backward; the
        tokens are the dimension before the last of its inputs. "auto" chooses the number, as `actstore.tile` does. For
        a module that treats each token by itself, such as an MLP, or returns its loss, which its first call checks.
        Weight gradients are sums over slices, and so rounded in another way. Gradients of a loss are computed in
        forward; its inputs are not stored
    decisions : "kept": the second run repeats the decisions of the first: masks of ReLU and its like, in one bit an
        element, chosen indices, results of comparisons. "anew": it decides for itself. None: "kept" where inputs are
        stored with a loss, "anew" where they come back exactly

    Raises
    ------
    ChainError : an invalid value, or an invalid combination of values

    Notes
    -----
    Revolve and sqrt place inputs by the length that the chain had in the last step. In the first step it is the number
    of modules that the rule matches. A chain that grows longer, as of one cell called again and again, drops every
    second stored input whenever the slots are full (sqrt: stores inputs ever farther apart). That costs forwards, never
    exactness.
    """

    inputs: Keep | Encode | Offload = field(default_factory=Keep)
    segment: int = 1
    schedule: str | None = None
    slots: int | None = None
    first: int | None = None
    tiles: int | str | None = None
    decisions: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Recompute | Derive):
            raise ChainError(
                "the inputs of a recomputed module cannot be recomputed or derived themselves. Keep, encode or offload "
                "them, as in recompute(keep), recompute(int8), recompute(raw @ host)."
            )
        if not isinstance(self.inputs, Keep | Encode | Offload):
            raise ChainError(
                f"Recompute takes the decision on its inputs, such as Keep() or Offload(Raw(), 'host'), "
                f"not {self.inputs!r}."
            )
        for name, what in COUNT_UNITS.items():
            value = getattr(self, name)
            if name == "tiles" and value == "auto":
                continue
            if (value is not None or name == "segment") and (type(value) is not int or value < 1):
                raise ChainError(f"recompute({name}={value!r}): must be a number of {what}. Give an int >= 1.")
        if self.schedule not in (None, *SCHEDULES):
            raise ChainError(
                f"schedule={self.schedule!r} of recompute: must be {' or '.join(SCHEDULES)}. For segments of one "
                "length write segment=4."
            )
        if self.schedule is not None and self.segment != 1:
            raise ChainError(
                f"segment={self.segment} and schedule={self.schedule} both say which inputs of a chain are stored. "
                "Leave one out."
            )
        if self.schedule == "revolve" and self.slots is None:
            raise ChainError(
                "schedule=revolve needs the number of inputs that it may store. Write "
                "recompute(schedule=revolve, slots=10), or schedule=auto, which finds one."
            )
        if self.schedule != "revolve" and self.slots is not None:
            raise ChainError(
                f"slots={self.slots} is for schedule=revolve. Write recompute(schedule=revolve, slots={self.slots}), "
                "or leave slots out."
            )
        if self.tiles is not None and (self.replays or self.first is not None):
            raise ChainError(
                f"tiles={self.tiles} of recompute goes with neither segment, schedule nor first, which count calls. "
                "Leave one of them out."
            )
        if self.decisions not in (None, *DECISIONS):
            raise ChainError(
                f"decisions={self.decisions!r} of recompute: must be {' or '.join(DECISIONS)}. Leave it out to keep "
                "them where the inputs are stored with a loss."
            )

    @property
    def keeps_decisions(self) -> bool:
        """True if the second run repeats the decisions of the first, where its inputs do not come back exactly."""
        if self.decisions is not None:
            return self.decisions == "kept"
        return not (isinstance(self.inputs, Keep) or self.inputs.codec.lossless)

    @property
    def replays(self) -> bool:
        """True if inputs of a chain are replayed."""
        return self.segment > 1 or self.schedule is not None

    def __str__(self) -> str:
        words = [] if self.inputs == Keep() else [str(self.inputs)]
        words += [f"{name}={value}" for name, default in _OPTIONS if (value := getattr(self, name)) != default]
        return f"recompute({', '.join(words)})" if words else "recompute"


SCHEDULES = ("sqrt", "revolve", "auto")
DECISIONS = ("kept", "anew")
COUNT_UNITS = {"segment": "calls", "slots": "inputs", "first": "calls", "tiles": "slices"}
_OPTIONS = (("segment", 1), *((name, None) for name in ("schedule", "slots", "first", "tiles", "decisions")))

Decision = Keep | Derive | Encode | Offload | Recompute
Policy = Callable[[Site, Spec], Decision]


def waits_as(decision: Decision) -> Keep | Encode | Offload:
    """Return the decision on the tensors that a decision saves."""
    if isinstance(decision, Recompute):
        return decision.inputs
    return decision.rest if isinstance(decision, Derive) else decision


def exactly(decision: Decision) -> Keep | Encode | Offload:
    """Return a decision that waits in the same place, without loss."""
    wait = waits_as(decision)
    if isinstance(wait, Keep) or wait.codec.lossless:
        return wait
    return Offload(Raw(), wait.tiers) if isinstance(wait, Offload) else Keep()


def policy_text(policy: object) -> str:
    """Return the text of a policy, without the pattern of its default alone; of a function, its name."""
    return str(getattr(policy, "__name__", policy)).removeprefix("* : ")


def known_tiers() -> tuple[str, ...]:
    """Return the tiers of actstore and of installed packages."""
    return (*TIERS, *extensions.names(extensions.TIERS))


def _unprotected(decision: Encode | Offload) -> str:
    return "" if decision.protected else "unprotected "


def _require_codec(where: str, codec: object) -> None:
    if isinstance(codec, Codec):
        return
    if isinstance(codec, type) and issubclass(codec, Codec):
        raise ChainError(f"{where} takes a codec, not its class. Call it: {codec.__name__}().", codec=codec)
    raise ChainError(
        f"{where} takes a codec such as Int8() or Raw(), not {codec!r}. Rules.parse takes text.", codec=codec
    )


def _ladder(tiers: tuple[str, ...]) -> tuple[str, ...]:
    """Check that `tiers` names known tiers, each once, actstore's own from the fastest down."""
    if not tiers:
        raise ChainError("Offload needs a tier. Give 'host', 'disk' or both: ('host', 'disk').", tiers=tiers)
    for tier in tiers:
        if tier not in TIERS and tier not in known_tiers():
            raise ChainError(f"{tier!r} is not a tier. The tiers are {', '.join(known_tiers())}.", tiers=tiers)
    own = iter([tier for tier in TIERS if tier in tiers])
    downward = tuple(next(own) if tier in TIERS else tier for tier in dict.fromkeys(tiers))
    if tiers != downward:
        found, wanted = " > ".join(tiers), " > ".join(downward)
        reason = "names a tier twice" if len(tiers) > len(downward) else "goes up"
        raise ChainError(
            f"the ladder '{found}' {reason}. Each tier holds what the one before refuses: '{wanted}'.", tiers=tiers
        )
    return tiers

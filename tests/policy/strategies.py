"""Random decisions, patterns and rules. Each strategy is made once: that takes longer than a draw."""

from functools import cache

from hypothesis import strategies as st

from actstore.codecs import Int8, Raw
from actstore.errors import PolicyError
from actstore.policy import Derive, Encode, Keep, Offload, Recompute, Rules
from actstore.policy.decision import TIERS
from tests.policy.codecs import Needy, Options, Wrap


@cache
def codecs():
    plain = st.sampled_from([Raw(), Int8()]) | st.builds(
        Options,
        flag=st.booleans(),
        on=st.booleans(),
        count=st.integers(-1000, 1000).map(lambda n: 2 * n),
        ratio=st.floats(allow_nan=False, allow_infinity=False),
        mode=st.sampled_from(["nearest", "dither"]),
        word=st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True),
    )
    return st.recursive(plain, lambda inner: st.builds(Wrap, inner=inner) | st.builds(Needy, inner=inner), max_leaves=3)


@cache
def ladders():
    ladder = st.sets(st.sampled_from(TIERS), min_size=1).map(lambda tiers: tuple(sorted(tiers, key=TIERS.index)))
    return ladder.filter(lambda tiers: tiers != ("device",))


@cache
def stored():
    return st.just(Keep()) | (
        st.builds(Encode, codecs(), st.booleans()) | st.builds(Offload, codecs(), ladders(), st.booleans())
    )


@cache
def decisions():
    return stored() | recomputations() | st.builds(Derive, stored())


@cache
def recomputations():
    first = st.none() | st.integers(1, 10**6)
    return (
        st.builds(Recompute, stored(), segment=st.integers(1, 10**6), first=first)
        | st.builds(Recompute, stored(), schedule=st.sampled_from(["sqrt", "auto"]), first=first)
        | st.builds(Recompute, stored(), schedule=st.just("revolve"), slots=st.integers(1, 10**6), first=first)
    )


@cache
def patterns():
    part = st.sampled_from(["blocks", "encoder", "attn", "mlp", "0", "11", "*", "?", "[ab]", "[0-11]", "head*"])
    alias = st.sampled_from(["@blocks", "@blocks[::2]", "@blocks[-2:]", "@mlp[3].0"])
    module = st.lists(part, min_size=1, max_size=4).map(".".join) | alias
    tensors = st.sampled_from(["qkv", "q*", "*", "@sdpa", "@matmul", "@aten.mm", "@aten.*"])
    return module | st.tuples(module, tensors).map("/".join)


@st.composite
def rules(draw):
    """Rules, without those that could not be built in this order."""
    chosen = []
    for rule in draw(st.lists(st.tuples(patterns(), decisions()), max_size=6)):
        try:
            Rules([*chosen, rule], default=Keep())
        except PolicyError:
            continue
        chosen.append(rule)
    return Rules(chosen, draw(decisions()))


@cache
def names():
    part = st.sampled_from(["blocks", "encoder", "attn", "mlp", "0", "1", "11", "head", "headed", "a"])
    return st.lists(part, max_size=5).map(".".join)

"""Aliases: names for the parts of any model, ``@blocks``, ``@attention``, ``@mlp`` and ``@norm``, in a policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from torch.nn import Module

from actstore.errors import PolicyError
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.model.operations import is_attention, mixes_positions
from actstore.policy import Decision, Rules
from actstore.policy.globs import select, split_slice
from actstore.policy.operators import CLASSES
from actstore.policy.options import did_you_mean
from actstore.policy.pattern import Pattern, ancestry, shapes

ALIASES = ("@attention", "@blocks", "@mlp", "@norm")

_ATTENTION = re.compile(r"(\w+_)?(attn|attention)\d*|\w*Attention|cross_?attention", re.ASCII)
_MLP = re.compile(
    r"(\w+_)?mlp|ffn?|feed_?forward|DenseReluDense|(\w+_)?moe|intermediate|output|fc[12]|linear[12]", re.ASCII
)
_SOUGHT = {
    "@attention": "module that runs scaled_dot_product_attention, a softmax and products, or a scan",
    "@mlp": "module with a name of feed-forward networks",
}


def expand(rules: Rules, model: Module) -> Rules:
    """Return the same rules with the module names of `model` in place of aliases.

    ``@blocks`` are the modules that the model repeats. ``@attention`` are the modules in them whose forward runs
    attention: ``scaled_dot_product_attention``, a kernel or an ``autograd.Function`` of such a name, a softmax and
    products, or a scan; around these, the outermost module with a name that models give to attention (``self_attn``,
    ``SelfAttention``). ``@mlp`` are the outermost modules in the blocks with a name that models give to feed-forward
    networks and experts (``mlp``, ``DenseReluDense``, ``block_sparse_moe``). ``@norm`` are all normalizations outside
    of these two, by the name of their class; of a module in a normalization's class with normalizations inside, these.
    A slice selects some of them, in the order of the model: ``@blocks[::2]``, ``@blocks[-1]``.
    Text after an alias follows each of its names: ``@mlp.down_proj``.

    Raises
    ------
    PolicyError : an unknown alias, an alias without a module in the model, or a slice that selects none; the message
        lists the known names
    """
    if not any(pattern.startswith("@") for pattern, _ in rules.rules):
        return rules
    named = dict(named_modules(model))
    parts = _parts(named, repeated_blocks(model, callable_only=False)) | {"@blocks": repeated_blocks(model)}
    expanded: list[tuple[Pattern, Decision]] = []
    for text, decision in rules.rules:
        pattern = Pattern.parse(text)
        names = _names(pattern.module, parts, named) if text.startswith("@") else [pattern.module]
        found = [pattern._replace(module=name) for name in names]
        # slices may overlap: `Rules` refuses a rule only if earlier ones cover all that it covers
        live = [one for one in found if not any(earlier.includes(one) for earlier, _ in expanded)]
        live = [one for one in live if not any(wider != one and wider.includes(one) for wider in live)]
        expanded += [(one, decision) for one in live or found]
    return Rules([(str(pattern), decision) for pattern, decision in expanded], default=rules.default)


def modules_of(alias: str, model: Module) -> list[str]:
    """Return the names that ``@attention``, ``@mlp`` or ``@norm`` stands for in a model."""
    return _parts(dict(named_modules(model)), repeated_blocks(model))[alias]


def _parts(named: dict[str, Module], blocks: Sequence[str]) -> dict[str, list[str]]:
    around = set(blocks)
    inner = [name for name in named if not around.isdisjoint(ancestry(name.rpartition(".")[0]))]
    attention = _outermost(inner, lambda name: _matches(name, _ATTENTION) and mixes_positions(named[name]))
    rest = _outside(inner, attention)
    mlp = _outermost(rest, lambda name: _matches(name, _MLP))
    by_code = _outermost(_outside(rest, mlp), lambda name: is_attention(named[name]))
    whole = [name for name in blocks if is_attention(named[name]) and name not in inner]
    by_code += whole if len(whole) < len(blocks) else []  # some blocks are attention
    attention = [name for name in named if name in {*attention, *by_code}]
    taken = {*attention, *mlp}
    norm = [name for name, module in named.items() if _is_norm(name, module) and taken.isdisjoint(ancestry(name))]
    return {"@attention": attention, "@mlp": mlp, "@norm": norm}


def _is_norm(name: str, module: Module) -> bool:
    """Return whether a module normalizes activations: its class says so, and that of no module in it."""
    norms = [each for each in module.modules() if "Norm" in type(each).__name__]
    return norms == [module] and "parametrizations" not in name.split(".")


def _matches(name: str, words: re.Pattern[str]) -> bool:
    return words.fullmatch(name.rpartition(".")[2]) is not None


def _outermost(names: Iterable[str], accepts: Callable[[str], bool]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        if not any(outer in found for outer in ancestry(name)) and accepts(name):
            found[name] = None
    return list(found)


def _outside(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    within = set(taken)
    return [name for name in names if within.isdisjoint(ancestry(name))]


def _names(module: str, parts: dict[str, list[str]], named: dict[str, Module]) -> list[str]:
    """Return patterns for an alias and its further text: one pattern for all layers where it covers nothing else."""
    sliced, dot, rest = module.partition(".")
    alias, text = split_slice(sliced)
    if alias not in parts and alias.removeprefix("@") in CLASSES:
        raise PolicyError(f"'{alias}' is a class of operators. Write '*/{alias}'.", alias=alias)
    if alias not in parts:
        raise PolicyError(
            f"'{alias}' is an unknown alias{did_you_mean(alias, ALIASES)} The aliases are {', '.join(ALIASES)}. "
            "Other modules go by their names.",
            alias=alias,
        )
    if not parts[alias]:
        inner = shapes(name for name in named if any(block in parts["@blocks"] for block in ancestry(name)))
        has = ", ".join((inner or shapes(named))[:12])
        step = f"Name the modules that you mean: it has {has}" if has else "Write a rule for all of it, '* : recompute'"
        searched = f"{', '.join(shapes(parts['@blocks'])[:4])} have no {_SOUGHT[alias]}. " if alias in _SOUGHT else ""
        raise PolicyError(f"'{alias}' finds nothing in this model. {searched}{step}.", alias=alias)
    chosen = parts[alias] if text is None else select(alias, text, parts[alias])
    found: list[str] = []
    for pattern in map(Pattern, shapes(chosen)):
        covered = dict.fromkeys(name for name in chosen if pattern.matches(name))
        matched = (name for name in named if pattern.matches(name))
        exact = not pattern.any_module and all(any(outer in covered for outer in ancestry(name)) for name in matched)
        found += [pattern.module] if exact else covered
    return [name + dot + rest for name in dict.fromkeys(found)]

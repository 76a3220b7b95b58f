"""Policies that choose decisions: `Auto` and `Bits`, and their text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from actstore.base.units import format_nbytes, parse_budget
from actstore.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Auto:
    """The policy that measures the first steps, then runs the fastest decisions that fit into a budget.

    All decisions have exact gradients, unless `max_noise` is above 0 or `tiles` is set. Host memory is used up to the
    budget of `Host`, and a disk only where `Disk` has a budget. As text: ``"auto(20GiB, max_noise=0.1, tiles)"``.

    Parameters
    ----------
    budget : bound on bytes of activations on the compute device (`Report.peak_held_bytes`), an int or text such as
        ``"20GiB"``; with ``"160GiB/node"`` the processes that torchrun started on this machine share them equally. None
        where `total` is given
    max_noise : the variance that payloads may add to the gradients of the weights, as a fraction of their variance from
        batch to batch; 0.1 costs what a batch that is a tenth smaller costs. Above 0, lossy codecs are among the
        decisions
    group : the process group whose ranks run one plan, `torch.distributed.group.WORLD` for all ranks. All of them make
        their stores in the same order, and enter them equally often. Ranks with other models of the group, such as
        stages of a pipeline, have a plan of their own. None: this process plans by itself
    wait_s : the most seconds that a rank waits for other ranks in a step that measures
    total : bound on what the device's allocator holds in forward and backward, as text or int, in place of a budget:
        activations get what weights, gradients, buffers, optimizer states and temporary results leave, as the first
        steps measure them. These reset the allocator's peak (`torch.cuda.reset_peak_memory_stats`). As text:
        ``"auto(total=24GiB)"``. Not for a group or compiled models
    tiles : whether plans may run the MLP of a recomputed block in tiles: less memory, and gradients that differ by the
        rounding of ``recompute(tiles=8)``, a few units in the last place. Not for a group or compiled models

    Raises
    ------
    ConfigError : not exactly one of `budget` and `total` is given, or it does not parse; `max_noise` is negative or not
        finite; `tiles` is not a bool; `wait_s` is not a number above 0; `group` is not a process group that this rank
        is in, or comes with `max_noise`, `total` or `tiles`
    """

    budget: int | str | None = None
    max_noise: float = 0.0
    group: ProcessGroup | None = None
    wait_s: float = 600.0
    total: int | str | None = None
    tiles: bool = False

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.total is None):
            raise ConfigError(
                f"Auto(budget={self.budget!r}, total={self.total!r}): exactly one must be given. Write "
                'Auto("20GiB") to bound activations, or Auto(total="24GiB") to bound all that '
                "the device holds."
            )
        check_noise(self.max_noise, "Auto(max_noise)")
        if type(self.wait_s) not in (int, float) or not 0 < self.wait_s < inf:
            raise ConfigError(f"Auto(wait_s={self.wait_s!r}): must be a number of seconds > 0. Use 600.")
        if type(self.tiles) is not bool:
            raise ConfigError(f"Auto(tiles={self.tiles!r}): must be true or false. The number of tiles is the plan's.")
        if self.group is not None:
            _check_group(self.group)
            if self.tiles:
                raise ConfigError(
                    "Auto(tiles=True, group): a group agrees on exact decisions only. Leave tiles out, or leave group "
                    "out, and each rank plans by itself."
                )
            if self.total is not None:
                raise ConfigError(
                    f"Auto(total={self.total!r}, group): the ranks of a group plan activations. Give a budget of "
                    "activations in place of total."
                )
            if self.max_noise:
                raise ConfigError(
                    f"Auto(max_noise={self.max_noise:g}, group): a group agrees on exact decisions only. "
                    "Leave max_noise out, or leave group out, and each rank plans by itself."
                )
        _ = self.total_nbytes if self.budget is None else self.budget_nbytes

    def __str__(self) -> str:
        budget = self.budget if self.total is None else f"total={self.total}"
        noise = f", max_noise={self.max_noise:g}" if self.max_noise else ""
        group = "" if self.group is None else f", group of {self.group.size()}"
        return f"auto({budget}{noise}{', tiles' if self.tiles else ''}{group})"

    @property
    def budget_nbytes(self) -> int:
        """Budget of this process in bytes, where it is given.

        Raises
        ------
        ConfigError : `total` is given, and bounds more than activations
        """
        if self.budget is None:
            raise ConfigError(f"{self}: bounds more than activations. Give a budget of activations: Auto('20GiB').")
        return parse_budget(self.budget, "Auto(budget)")

    @property
    def total_nbytes(self) -> int | None:
        """Bound of this process on all device memory in bytes; None where a budget is given."""
        return None if self.total is None else parse_budget(self.total, "Auto(total)")

    def beside(self, nbytes: int) -> Auto:
        """Return the policy with a budget of activations: what a total leaves beside `nbytes` of other tensors.

        Raises
        ------
        CapacityError : nothing is left
        """
        total = self.total_nbytes
        if total is None:
            return self
        if nbytes >= total:
            raise CapacityError(
                f"Auto(total={self.total!r}): weights, gradients, buffers, optimizer states and temporary results take "
                f"{format_nbytes(nbytes)}, and leave nothing for activations. Give more, shard weights, or train fewer "
                "parameters.",
                least=nbytes,
            )
        return replace(self, budget=total - nbytes, total=None)


@dataclass(frozen=True)
class Bits:
    """The policy that chooses a codec for each site, by the effect of its errors on the gradients of the weights.

    The first two steps measure with 8 bits, and later pairs of steps with the chosen codecs. As text:
    ``"bits(max_noise=0.1)"`` or ``"bits(held=4GiB)"``.

    Parameters
    ----------
    max_noise : the variance that payloads may add to the gradients, as for `Auto`: Bits chooses the fewest bytes that
        stay below it
    held : bound on bytes held at the end of forward, an int or text: Bits chooses the codecs that disturb gradients
        least. A budget bounds the peak of a step instead

    Raises
    ------
    ConfigError : not exactly one of the two is given, `held` does not parse, or `max_noise` is negative or not
        finite
    """

    max_noise: float | None = None
    held: int | str | None = None

    def __post_init__(self) -> None:
        if (self.held is None) == (self.max_noise is None):
            raise ConfigError(
                f"Bits(max_noise={self.max_noise!r}, held={self.held!r}): exactly one must be given. Write "
                'Bits(max_noise=0.1) for the fewest bytes, or Bits(held="4GiB") for gradients disturbed least.'
            )
        if self.max_noise is not None:
            check_noise(self.max_noise, "Bits(max_noise)")
        _ = self.held_nbytes

    def __str__(self) -> str:
        return f"bits(max_noise={self.max_noise:g})" if self.max_noise is not None else f"bits(held={self.held})"

    @property
    def held_nbytes(self) -> int | None:
        """Bound for this process in bytes; None where noise is the limit."""
        return None if self.held is None else parse_budget(self.held, "Bits(held)")


_TEXT = re.compile(r"\s*(auto|bits)\s*(?:\(([^()]*)\))?\s*", re.DOTALL)
# the first one needs no name, a flag no value
_ARGUMENTS = {"auto": ("budget", "max_noise", "total", "tiles"), "bits": ("max_noise", "held")}
_FLAGS = {"true": True, "false": False}


def parse_chooser(text: str) -> Auto | Bits | None:
    """Read ``"auto(20GiB)"``, ``"auto(20GiB, max_noise=0.1)"``, ``"bits(0.1)"`` or ``"bits(held=4GiB)"``.

    Returns
    -------
    Auto, Bits or None : None for any other policy text

    Raises
    ------
    ConfigError : an argument is missing, unknown, given twice, or does not parse
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    name, inside = found.groups()
    arguments: dict[str, Any] = {}
    for number, part in enumerate(part.strip() for part in (inside or "").split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            is_flag = number > 0 and key == "tiles"
            key, value = (key, "true") if is_flag else (_ARGUMENTS[name][0] if number == 0 else "", key)
        if not value:
            continue
        if key not in _ARGUMENTS[name] or key in arguments:
            raise ConfigError(f"policy={text!r}: {part!r} is unknown or given twice. {_usage(name)}")
        arguments[key] = _number(value) if key == "max_noise" else _FLAGS.get(value, value) if key == "tiles" else value
    if name == "auto" and not {"budget", "total"} & arguments.keys():
        raise ConfigError(f"policy={text!r}: a budget must be given. {_usage(name)}")
    if name == "bits" and not arguments:
        raise ConfigError(f"policy={text!r}: a limit must be given. {_usage(name)}")
    return Auto(**arguments) if name == "auto" else Bits(**arguments)


def _usage(name: str) -> str:
    if name == "auto":
        return 'Write Auto("20GiB"), or "auto(20GiB)". max_noise=0.1 lets it use lossy codecs, tiles let it round.'
    return 'Write Bits(max_noise=0.1) for the fewest bytes, or Bits(held="4GiB") for gradients disturbed least'


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # `check_noise` refuses it


def _check_group(group: Any) -> None:
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"Auto(group={group!r}): must be a process group that this rank is in. Call init_process_group first, and "
            "give torch.distributed.group.WORLD or what new_group returns."
        )


def check_noise(max_noise: float, name: str = "max_noise") -> None:
    """Check a fraction of the noise of gradients from batch to batch.

    Raises
    ------
    ConfigError : it is not a number >= 0
    """
    if type(max_noise) not in (int, float) or not 0 <= max_noise < inf:
        raise ConfigError(
            f"{name}={max_noise!r}: must be a fraction of the gradients' noise from batch to batch. Give 0 for exact "
            "gradients, or a number such as 0.1."
        )

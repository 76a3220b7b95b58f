"""Values for ``ActivationStore(tiers=...)``: the options of each tier, and the bound on the bytes that move there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Literal, Protocol

import torch.distributed as dist

from actstore.base import extensions
from actstore.base.units import parse_budget, parse_nbytes
from actstore.devices import Device
from actstore.errors import ActstoreError, ConfigError
from actstore.tiers.base import Limited, Tier
from actstore.tiers.device import DeviceTier, HostMemoryTier

WHEN_FULL = ("wait", "keep", "spill")


class TierOptions(Protocol):
    """Options of one tier, which open it for a compute device."""

    @property
    def name(self) -> str:
        """The word of the policy text."""

    @property
    def budget_nbytes(self) -> int | None:
        """Limit of the bytes that wait there; None for no limit."""

    def open(self, device: Device) -> Tier:
        """Open the tier for payloads of `device`.

        Raises
        ------
        ConfigError : the tier cannot work here
        """


class _Budgeted:
    """The budget of a tier's options."""

    budget: int | str | None

    @property
    def budget_nbytes(self) -> int | None:
        """Limit of the bytes that wait there, of this process; None for no limit."""
        return None if self.budget is None else parse_budget(self.budget, self._budget_name)

    @property
    def _budget_name(self) -> str:
        return f"{type(self).__name__}(budget)"

    def __post_init__(self) -> None:
        _ = self.budget_nbytes  # refuses what does not parse

    def _limited(self, tier: Tier) -> Tier:
        """Return the tier within the budget."""
        return tier if (nbytes := self.budget_nbytes) is None else Limited(tier, nbytes)


@dataclass(frozen=True)
class Host(_Budgeted):
    """Host memory, pinned where the compute device is a GPU.

    Parameters
    ----------
    budget : limit of the bytes, as an int or text such as ``"64GiB"``; with ``"160GiB/node"`` the processes that
        torchrun started on this machine share it equally. None for no limit

    Raises
    ------
    ConfigError : the budget does not parse
    """

    name: ClassVar[str] = "host"
    budget: int | str | None = None

    def open(self, device: Device) -> Tier:
        """Open the tier for payloads of `device`."""
        if device.on_host:
            return self._limited(HostMemoryTier(device))
        from actstore.tiers.host import HostTier

        return HostTier(device, self.budget_nbytes)


@dataclass(frozen=True)
class Disk(_Budgeted):
    """A nameless file in a folder, gone with the process.

    Parameters
    ----------
    path : an existing folder; None for the system's temporary folder
    budget : limit of the bytes, as of `Host`. `Auto` uses a disk only where this is given
    gpu_direct : whether payloads move between GPU memory and disk without host memory in between (GPUDirect Storage).
        Needs an NVIDIA GPU and the package kvikio: the extra `gds12` or `gds13`. kvikio waits for CUDA's default stream
        before each transfer: compute on another stream, else disk and GPU take turns

    Raises
    ------
    ConfigError : the budget does not parse, or `path` is of another type
    """

    name: ClassVar[str] = "disk"
    path: str | PathLike[str] | None = None
    budget: int | str | None = None
    gpu_direct: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.path, str | PathLike | None):
            raise ConfigError(f"Disk(path)={self.path!r}: must be a folder. For a limit write Disk(budget=...).")

    def open(self, device: Device) -> Tier:
        """Open the tier for payloads of `device`.

        Raises
        ------
        ConfigError : the folder is missing or cannot be written, or `gpu_direct` cannot work here
        """
        from actstore.tiers.disk import DiskTier

        return self._limited(DiskTier(self.path, device, gpu_direct=self.gpu_direct))


@dataclass(frozen=True)
class Group(_Budgeted):
    """The memory of all ranks of a process group, for tensors that are equal on all of them.

    Each rank keeps one slice of a tensor, and backward reads the rest from the other ranks. Before a rank lets the rest
    go, it compares fingerprints with all ranks: a tensor that differs stays whole, and is a ReplicaError.

    Parameters
    ----------
    group : the process group, or a device mesh of one dimension. All of its ranks make the store, with the same policy,
        budget and window, and enter it equally often
    budget : limit of the bytes of slices, as of `Host`
    wait_s : the most seconds to wait for another rank, above 0

    Raises
    ------
    ConfigError : the budget does not parse, `wait_s` is not above 0, or this process is outside of `group`
    """

    name: ClassVar[str] = "group"
    group: Any
    budget: int | str | None = None
    wait_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.wait_s < float("inf"):
            raise ConfigError(f"Group(wait_s={self.wait_s!r}): must be seconds above 0. Use 600 for ten minutes.")
        group = self._process_group
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"Group(group={self.group!r}): must be a process group that this rank is in, or a mesh of one "
                "dimension. Call init_process_group first, and give torch.distributed.group.WORLD or what new_group "
                "returns."
            )

    @property
    def _process_group(self) -> Any:
        """The process group, also where a mesh was given."""
        return self.group.get_group() if hasattr(self.group, "get_group") else self.group

    def open(self, device: Device) -> Tier:
        """Open the tier for payloads of `device`, together with the other ranks.

        Raises
        ------
        ConfigError : another rank has not opened it within `wait_s`
        """
        from actstore.tiers.group import GroupTier

        return self._limited(GroupTier(self._process_group, self.wait_s, on_host=device.on_host))


@dataclass(frozen=True, init=False)
class PluginTier(_Budgeted):
    """A tier of another package, with arguments for it.

    Parameters
    ----------
    name : the word of the policy text, which the package offers by an entry point of the group ``actstore.tiers``
    budget : limit of the bytes, as of `Host`
    arguments : arguments of the tier's class, beside the compute device

    Raises
    ------
    ConfigError : the budget does not parse
    """

    name: str
    budget: int | str | None
    arguments: Mapping[str, Any]

    @property
    def _budget_name(self) -> str:
        return f"PluginTier({self.name!r}, budget)"

    def __init__(self, name: str, budget: int | str | None = None, **arguments: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "arguments", arguments)
        super().__post_init__()

    def open(self, device: Device) -> Tier:
        """Open the tier for payloads of `device`.

        Raises
        ------
        ConfigError : no installed package offers it, or its class refuses the arguments
        """
        kind = extensions.load(extensions.TIERS, self.name, Tier)
        if kind is None:
            raise ConfigError(
                f"PluginTier(name={self.name!r}): no installed package offers this tier. Install the package that "
                f"does, or use one of {', '.join(('host', 'disk', *extensions.names(extensions.TIERS)))}.",
                tier=self.name,
            )
        try:
            tier: Tier = kind(device, **self.arguments)
        except ActstoreError:
            raise
        except Exception as error:  # whatever another package may raise
            raise ConfigError(
                f"the tier {self.name!r} cannot be opened: {type(error).__name__}: {error}. "
                f"Repair or uninstall its package: {extensions.source(extensions.TIERS, self.name)}.",
                tier=self.name,
            ) from error
        return self._limited(tier)


@dataclass(frozen=True)
class Window:
    """The bound on payloads that wait on the compute device although a tier has them, or is about to have them.

    Parameters
    ----------
    nbytes : limit of the bytes on their way to one tier at once, and of those fetched ahead in backward. From the
        second step on the bound is a third of the moved bytes where that is less (4 MiB at least), unless there is a
        budget. None for 256 MiB, or 32 MiB where the compute device is a CPU. With None, on a GPU and without a
        budget, more bytes come back early where the link was idle while compute waited: link rate times the longest
        such time, at most an eighth of the moved bytes, and half of the memory that no step has needed
    when_full : what a tensor does when the window is full. "wait": the compute stream waits for the oldest copy (the
        host waits too where the tier is a disk); "keep": it stays on the device, encoded; "spill": it goes to the next
        tier of its ladder, and waits at the last one

    Raises
    ------
    ConfigError : `nbytes` does not parse or is 0; `when_full` is not one of the three words
    """

    nbytes: int | str | None = None
    when_full: Literal["wait", "keep", "spill"] = "wait"

    def __post_init__(self) -> None:
        if self.limit_nbytes == 0:
            raise ConfigError(
                'Window(nbytes=0): must be above 0, as nothing could move. Give some megabytes: Window("64MiB").'
            )
        if self.when_full not in WHEN_FULL:
            raise ConfigError(
                f'Window(when_full={self.when_full!r}): must be "wait", "keep" or "spill".', when_full=self.when_full
            )

    @property
    def limit_nbytes(self) -> int | None:
        """Bytes; None for the default of the compute device."""
        return None if self.nbytes is None else parse_nbytes(self.nbytes, "Window(nbytes)")


def read_tiers(given: Any) -> tuple[dict[str, TierOptions], Window]:
    """Return the options of each tier by its name, and the window.

    Raises
    ------
    ConfigError : an item of another type, or a tier that is given twice
    """
    if isinstance(given, str | Group | Host | Disk | PluginTier | Window) or not isinstance(given, Iterable):
        raise ConfigError(f'tiers={given!r}: must be a list of tiers. Write tiers=[Host("64GiB"), Disk("/scratch")].')
    tiers: dict[str, TierOptions] = {}
    windows = []
    for each in given:
        if isinstance(each, Window):
            windows.append(each)
            continue
        if not isinstance(each, Group | Host | Disk | PluginTier):
            raise ConfigError(
                f"tiers: unknown {each!r}. Give Group(...), Host(...), Disk(...), PluginTier(...) or Window(...)."
            )
        if each.name in tiers:
            raise ConfigError(f"tiers: {each.name!r} is given twice. Leave one of them out.", tier=each.name)
        tiers[each.name] = each
    if len(windows) > 1:
        raise ConfigError("tiers: Window is given twice. Leave one of them out.")
    window = windows[0] if windows else Window()
    if "group" in tiers and window.when_full != "wait":
        raise ConfigError(
            f"Window(when_full={window.when_full!r}): must be 'wait' beside Group(...), because all ranks store the "
            "same tensors. Leave when_full out.",
            when_full=window.when_full,
        )
    return tiers, window


def open_tier(name: str, device: Device, options: Mapping[str, TierOptions]) -> Tier:
    """Open a tier by its name, with its options.

    Raises
    ------
    ConfigError : the tier is unknown, or cannot work here
    """
    if name == "device":
        return DeviceTier(device)
    if name == "group" and name not in options:
        raise ConfigError("the tier 'group' needs its process group. Give tiers=[Group(dist.group.WORLD)].", tier=name)
    defaults: dict[str, TierOptions] = {"host": Host(), "disk": Disk()}
    return (options.get(name) or defaults.get(name) or PluginTier(name)).open(device)

"""Options of a run, and their form in the environment of processes that the script starts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from actstore.errors import ConfigError
from actstore.session.activation_store import MIN_NBYTES
from actstore.session.arguments import check_policy
from actstore.tiers import Disk, Host

VARIABLE = "ACTSTORE_RUN"
START = Path(__file__).parent / "start"


@dataclass(frozen=True)
class Settings:
    """Options of ``actstore run``.

    Attributes
    ----------
    policy : of each store
    models : class names of the models that get a store; empty for all
    min_bytes, host_budget, disk_budget, disk_path : as for `ActivationStore`, `Host` and `Disk`
    report : JSON file of the reports; "" for none
    every : steps between two lines of figures; 0 for none
    replace_checkpointing : whether to switch off the gradient checkpointing of Transformers' models
    first_step : what to do with the first step of the first model before the script runs it
    """

    policy: str = "keep"
    models: tuple[str, ...] = ()
    min_bytes: str = str(MIN_NBYTES)
    host_budget: str | None = None
    disk_budget: str | None = None
    disk_path: str | None = None
    report: str = ""
    every: int = 0
    replace_checkpointing: bool = False
    first_step: Literal["", "inspect", "verify"] = ""

    def check(self) -> None:
        """Refuse what can be refused before the script starts.

        Raises
        ------
        PolicyError, UnknownCodecError, ConfigError : an option is invalid
        """
        check_policy(self.policy)
        if self.every < 0:
            raise ConfigError(f"--every {self.every}: must be 0 or more. Give the steps between two lines.")
        self.tiers()

    def tiers(self) -> list[Host | Disk]:
        """Return the options of the tiers."""
        return [Host(self.host_budget), Disk(self.disk_path, self.disk_budget)]

    def export(self) -> None:
        """Set the environment of processes that this one starts: each gets stores once it has imported torch."""
        os.environ[VARIABLE] = json.dumps(asdict(self))
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(START), *([path] if path else [])])

    @classmethod
    def inherited(cls) -> Settings:
        """Return the settings of the run that has started this process."""
        values = json.loads(os.environ[VARIABLE])
        return cls(**{**values, "models": tuple(values["models"])})

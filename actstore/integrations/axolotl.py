"""Plugin of Axolotl: a policy in the YAML file of a run.

.. code-block:: yaml

    plugins: [actstore.integrations.axolotl.ActivationStorePlugin]
    actstore_policy: "@blocks : recompute(raw @ host)"
    actstore_host: 64GiB
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from actstore.integrations.huggingface import ActivationStoreCallback
from actstore.tiers.options import Disk, Host


class ActivationStoreArgs(BaseModel):
    """Keys in the YAML file.

    Attributes
    ----------
    actstore_policy : policy, such as ``int8`` or ``auto(20GiB)``; without it nothing is stored
    actstore_host : limit of the host tier, such as ``64GiB``
    actstore_disk : folder of the disk tier
    """

    actstore_policy: str | None = None
    actstore_host: str | None = None
    actstore_disk: str | None = None


class ActivationStorePlugin(BasePlugin):
    """Adds an `ActivationStoreCallback` to Axolotl's trainer."""

    def get_input_args(self) -> str:
        """Return the path of the keys' class, as Axolotl asks for it."""
        return f"{__name__}.{ActivationStoreArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[ActivationStoreCallback]:
        """Return the callback for the keys in `cfg`; an empty list without a policy.

        Raises
        ------
        ConfigError, GrammarError : the policy or a tier is malformed
        """
        if cfg.actstore_policy is None:
            return []
        host = [Host(cfg.actstore_host)] if cfg.actstore_host else []
        disk = [Disk(cfg.actstore_disk)] if cfg.actstore_disk else []
        return [ActivationStoreCallback(cfg.actstore_policy, tiers=[*host, *disk])]

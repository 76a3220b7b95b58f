from tests.contracts.clean import all_freed
from tests.tiers.conftest import disk_folder

__all__ = ["all_freed", "disk_folder"]

import pytest

from tests.contracts.clean import all_freed

__all__ = ["all_freed"]


@pytest.fixture
def disk_folder(tmp_path):
    """A folder for a disk tier, which is empty again at the end."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:  # the temporary folder of this machine may be a tmpfs
        patch.setattr("actstore.tiers.disk.warn_if_memory", lambda folder: None)
        yield folder
    assert list(folder.iterdir()) == []

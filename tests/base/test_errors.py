import pickle

import pytest

from actstore import errors
from actstore.errors import ActstoreError, PolicyError, TransferError

BUILTINS = {
    "ConfigError": ValueError,
    "PolicyError": ValueError,
    "ChainError": ValueError,
    "UnknownCodecError": ValueError,
    "SpecError": ValueError,
    "PayloadError": ValueError,
    "CapacityError": MemoryError,
    "TransferError": OSError,
    "ReplicaError": ValueError,
    "KernelError": RuntimeError,
    "KernelBuildError": RuntimeError,
    "KernelUnavailable": RuntimeError,
    "StateError": RuntimeError,
    "MutationError": RuntimeError,
    "AccuracyError": ArithmeticError,
}
CLASSES = [getattr(errors, name) for name in BUILTINS]


def test_the_table_names_every_error():
    found = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, ActstoreError)
    }
    assert found == {"ActstoreError", *BUILTINS}


@pytest.mark.parametrize("kind", CLASSES)
def test_each_is_also_a_builtin(kind):
    assert issubclass(kind, ActstoreError)
    assert issubclass(kind, BUILTINS[kind.__name__])


@pytest.mark.parametrize("kind", [ActstoreError, *CLASSES])
def test_facts_become_attributes_and_survive_pickling(kind):
    error = kind("no room", site="blocks.0", nbytes=4096)
    assert (str(error), error.site, error.nbytes) == ("no room", "blocks.0", 4096)
    assert error.facts == {"site": "blocks.0", "nbytes": 4096}
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.site, copy.nbytes, copy.facts) == ("no room", "blocks.0", 4096, error.facts)


@pytest.mark.parametrize("kind", [ActstoreError, *CLASSES])
def test_context_is_put_before_the_message(kind):
    error = kind("checksum differs", tier="disk")
    error.add_context("while decoding blocks.3.mlp[2]")
    assert str(error) == "while decoding blocks.3.mlp[2]: checksum differs"
    assert error.tier == "disk"


def test_facts_do_not_leak_between_errors():
    PolicyError("one", line=1)
    assert not hasattr(PolicyError("two"), "line")


def test_a_transfer_error_is_caught_as_the_operating_systems():
    with pytest.raises(OSError, match="disk full"):
        raise TransferError("disk full", nbytes=1)

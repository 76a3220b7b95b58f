import pytest

from actstore.codecs import Int8, Raw, get, names
from actstore.errors import UnknownCodecError


def test_names():
    assert names() == ("raw", "int8")
    assert [get(name) for name in names()] == [Raw, Int8]


@pytest.mark.parametrize(("name", "words"), [("int9", "did you mean 'int8'"), ("zstd", "there are 'raw', 'int8'")])
def test_unknown_names(name, words):
    with pytest.raises(UnknownCodecError, match=words) as caught:
        get(name)
    assert caught.value.name == name

import pytest

from actstore.codecs import Int8, Raw, get, names
from actstore.errors import UnknownCodecError


def test_names():
    assert names()[:2] == ("raw", "int8")
    assert [get(name) for name in names()][:2] == [Raw, Int8]
    assert [get(name).name for name in names()] == list(names())


@pytest.mark.parametrize(("name", "words"), [("int9", "Did you mean 'int8'"), ("wavelet", "There are 'raw', 'int8'")])
def test_unknown_names(name, words):
    with pytest.raises(UnknownCodecError, match=words) as caught:
        get(name)
    assert caught.value.name == name

"""No module sets an attribute of another room's object, except records that rooms fill by design."""

from tests.system import attributes


def test_each_object_sets_its_own_attributes():
    assert list(attributes.findings()) == []
    assert len(attributes.EXCEPTIONS) <= 5


def test_a_foreign_assignment_is_found(tmp_path, monkeypatch):
    root = tmp_path / "actstore"
    sources = {
        "store": "class Store:\n    __slots__ = ('limit',)\n",
        "session": "def f(store):\n    store.limit = 8\n",
    }
    for room, text in sources.items():
        (root / room).mkdir(parents=True)
        (root / room / "module.py").write_text(text)
    monkeypatch.setattr(attributes, "ROOT", root)
    assert list(attributes.findings(root)) == ["actstore/session/module.py:2: store.limit is an attribute of Store"]

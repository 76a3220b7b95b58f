"""Each module leads to the files that test it."""

from tests.system.places import TESTS, own_files, places

BY_NAME = ("actstore.__main__", "actstore.bench.peers.", "actstore.bench.worker")  # loaded by name: the tests run rows


def test_every_module_leads_to_its_tests():
    assert [module for module, files in places().items() if not files and not module.startswith(BY_NAME)] == []


def test_a_name_leads_to_its_file():
    files = sorted(TESTS.rglob("test_*.py"))
    assert [path.name for path in own_files("actstore.kernels.cpu.nf4", files)] == ["test_nf4.py"]
    assert [path.name for path in own_files("actstore.trace.trace", files)] == ["test_trace.py"]
    assert own_files("actstore.codecs.no_such_module", files) == []


def test_a_module_without_a_file_is_found_by_imports(tmp_path):
    package, tests = tmp_path / "actstore", tmp_path / "tests"
    sources = {
        package / "__init__.py": "",
        package / "tiers/__init__.py": "",
        package / "tiers/host.py": "from actstore.tiers.page import size",
        package / "tiers/page.py": "",
        package / "tiers/other.py": "",
        tests / "tiers/test_moves.py": "from actstore.tiers.host import Host",
    }
    for path, source in sources.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    moves = [tests / "tiers/test_moves.py"]
    assert places(package, tests) == {
        "actstore.tiers.host": moves,
        "actstore.tiers.other": [],
        "actstore.tiers.page": moves,
    }

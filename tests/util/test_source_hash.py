"""Hashes of users' code: they change with what takes part, and with nothing else."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pbfl_flwr.errors import PbflError
from pbfl_flwr.util.source_hash import check_unedited, code_hashes, source_hash
from pbfl_flwr.util.user_code import import_function, own_code

FILES = {
    "lab/__init__.py": "",
    "lab/method.py": "from .parts import loss\nimport lab_tools, math, torch, pbfl_flwr\ndef build(s): import lab.late",
    "lab/parts/__init__.py": "from lab.parts.loss import weight as loss",
    "lab/parts/loss.py": "weight = 1",
    "lab/late.py": "from . import method\nfrom .. import beyond",  # a ring, and nothing that is there
    "lab/unused.py": "weight = 1",
    "lab_tools.py": "weight = 1\nfrom elsewhere import *",
    "elsewhere.py": "weight = 1",
    "site-packages/vendor.py": "weight = 1\nimport vendored",
    "site-packages/vendored.py": "weight = 1",
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "edited", "counts"),
    [
        ("lab.method", "lab/method.py", True),
        ("lab.method", "lab/__init__.py", True),
        ("lab.method", "lab/parts/__init__.py", True),
        ("lab.method", "lab/parts/loss.py", True),
        ("lab.method", "lab/late.py", True),
        ("lab.method", "lab_tools.py", True),
        ("lab.method", "elsewhere.py", True),
        ("lab.method", "lab/unused.py", False),
        ("lab.parts.loss", "lab/method.py", False),
        ("vendor", "site-packages/vendor.py", True),
        ("vendor", "site-packages/vendored.py", False),
    ],
)
def test_what_is_imported_counts_also_from_other_files(
    lab: Path, module: str, edited: str, counts: bool
) -> None:
    before = source_hash(module)
    assert len(before) == 16
    file = lab / edited
    file.write_text(f"# a comment\n\n{file.read_text()}")
    assert source_hash(module) == before
    file.write_text(f"{file.read_text()}weight = 2\n")
    assert (source_hash(module) != before) == counts


def test_files_that_are_no_python_count_as_they_are(lab: Path) -> None:
    (lab / "lab_tools.py").write_bytes(b"(\x00\xff")
    before = source_hash("lab.method")
    (lab / "lab_tools.py").write_bytes(b"[\x00\xff")
    assert source_hash("lab.method") != before


def test_a_name_without_source_has_no_hash(lab: Path) -> None:
    assert [*code_hashes(["nowhere:build", "__main__:build", "lab.method:build", "pbfl_flwr.data:x"])] == [
        "lab.method:build"
    ]


def test_the_code_of_a_process_is_what_it_imported(lab: Path) -> None:
    name = own_code("lab_tools:print_nothing", ["lab_tools:print_nothing"])
    (lab / "lab_tools.py").write_text("def print_nothing(): pass\n")
    importlib.invalidate_caches()
    import_function("mods", name)
    before = code_hashes([name])
    check_unedited([name])
    (lab / "lab_tools.py").write_text("def print_nothing(): print()\n")
    assert code_hashes([name]) == before
    with pytest.raises(PbflError, match=r"^'lab_tools:print_nothing': its source was edited since this proc"):
        check_unedited([name])
    importlib.reload(importlib.import_module("lab_tools"))
    import_function("mods", name)
    check_unedited([name])
    assert code_hashes([name]) != before


HELPED = "import lab_numbers\ndef weight(): return lab_numbers.WEIGHT\n"


@pytest.fixture
def helped(lab: Path) -> Iterator[str]:
    """A function whose module imports another one; both are imported."""
    (lab / "lab_helped.py").write_text(HELPED)
    (lab / "lab_numbers.py").write_text("WEIGHT = 1\n")
    importlib.invalidate_caches()
    importlib.import_module("lab_helped")
    yield own_code("lab_helped:weight", ["lab_helped:weight"])
    for name in ("lab_helped", "lab_numbers"):
        del sys.modules[name]


def test_a_reload_renews_only_the_module_itself(lab: Path, helped: str) -> None:
    import_function("mods", helped)
    (lab / "lab_numbers.py").write_text("WEIGHT = 22\n")
    importlib.reload(sys.modules["lab_helped"])
    function = import_function("mods", helped)
    with pytest.raises(PbflError, match=r"reload what was edited and then what imports that$"):
        check_unedited([helped])
    assert function() == 1
    importlib.reload(sys.modules["lab_numbers"])
    importlib.reload(sys.modules["lab_helped"])
    assert import_function("mods", helped)() == 22
    check_unedited([helped])

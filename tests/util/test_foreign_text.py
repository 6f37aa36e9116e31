"""Text that came from elsewhere: what is shown, logged and handed on of it, and what a spreadsheet reads."""

import csv
import io
import unicodedata
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pbfl_flwr.errors import format_exception, printable
from pbfl_flwr.sinks import steps
from pbfl_flwr.util.csv_text import csv_text
from pbfl_flwr.util.user_code import describe_user_error
from tests.small_runs import entry, rounds_of

ANYTHING = st.text(st.characters(), max_size=60)  # with surrogates
VISIBLE_FORMAT = {*range(0x0600, 0x0606), 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, 0x110BD, 0x110CD} | {
    *range(0x13430, 0x13440),
    *range(0x1BCA0, 0x1BCA4),
    *range(0x1D173, 0x1D17B),
}  # fmt: skip, signs of scripts and music


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nERROR: forged\r\nb\x85c\u2028d\te", "a ERROR: forged b c d e"),
        ("\x1b[31mred\x1b[2J\x9b1A", "red1A"),
        ("user\u202egnp.exe", "usergnp.exe"),
        ("pay\u200bpal\u2060\ufeff\u00ad", "paypal"),
        ("half \ud800 a pair", "half  a pair"),
        ("tag\U000e0041s", "tags"),
        ("Köln 東京 القاهرة दिल्ली 😀 μ±", "Köln 東京 القاهرة दिल्ली 😀 μ±"),
    ],
)
def test_foreign_text_is_one_harmless_line(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_text_of_several_lines_keeps_them() -> None:
    assert printable("a\n\tb\r\u202ec\u2028d", lines=True) == "a\n\tbc\nd"


def test_an_error_without_a_text_is_told_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise KeyError

    with pytest.raises(Silent) as raised:
        raise Silent
    assert format_exception(raised.value).startswith(
        "Silent: its text raises KeyError (test_foreign_text.py:"
    )
    assert describe_user_error(raised.value, "my.module:f") == "Silent: its text raises KeyError"


@given(ANYTHING, st.booleans())
def test_whatever_the_text_is(text: str, lines: bool) -> None:
    shown = printable(text, lines=lines)
    assert len(shown.splitlines()) <= 1 or lines
    assert printable(shown, lines=lines) == shown
    for character in shown:
        assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or (
            (lines and character in "\n\t") or ord(character) in VISIBLE_FORMAT
        )
    shown.encode()


@pytest.mark.parametrize(
    "name",
    ["=1+1", "+A1", "-2+3+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", " =1", "=1,\n2", "\n=1", "＝1", "-1+2"],
)
def test_a_spreadsheet_evaluates_no_name(name: str) -> None:
    ((read,),) = csv.reader(io.StringIO(csv_text([[name]])))
    assert read == f"'{name}"
    ((read,),) = csv.reader(io.StringIO(csv_text([[f"\r\u200b{name}"]])))
    assert read == f"'{name}"


@pytest.mark.parametrize(
    "cell", ["-0.5", "+3", "-1e-05", "-1.2 ± 0.3", "-4.06 to -3.64", "-0.3 %", "-", "-1,234", "site-a", "a=b"]
)
def test_numbers_stay_numbers(cell: str) -> None:
    assert csv_text([[cell, -1.5, None, 3]]).rstrip("\n") in (f"{cell},-1.5,,3", f'"{cell}",-1.5,,3')


@given(st.lists(ANYTHING, min_size=1))
def test_no_cell_begins_a_formula(cells: list[str]) -> None:
    (row,) = csv.reader(io.StringIO(csv_text([cells]), newline=""))
    for cell in row:
        assert not cell.strip().startswith(("=", "@"))


@given(st.dictionaries(ANYTHING, st.floats(), max_size=4))
def test_every_sink_takes_the_name_of_every_metric(metrics: dict[str, float]) -> None:
    """The rules are those of MLflow's file store, which makes files of names."""
    (record,) = rounds_of(entry(1, 0.5, None, client_metrics={}))
    ((_, figures),) = steps(record.model_copy(update={"client_metrics": metrics}))
    for name in figures:
        kind, *rest = name.split("/")
        if kind == "clients":
            assert len(rest) == 1
            assert rest[0].strip(".")
            assert all(character.isalnum() or character in "_. -" for character in rest[0])


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60), lambda: bytearray(2**60)])
def test_too_little_memory_is_said_to_be_of_this_machine(allocate: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    said = format_exception(caught.value)
    assert said.endswith("; this machine has too little memory, or this process a limit on memory or threads")

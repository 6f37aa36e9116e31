"""Texts in a CSV or Parquet file, as token ids of a vocabulary that all clients share.

A row is a text and its class; the text is in ``text-column``, by default ``text``. The vocabulary is a file with one
token per line, in the order of the ids: ``<pad>``, ``<cls>``, ``<unk>``, ``<eos>`` first. ``pbfl vocabulary`` makes one
from texts that may be public; every device needs a copy of the same file, since a network only knows ids and devices
with different vocabularies are incompatible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.own import tokens
from pbfl_flwr.data.own.columns import (
    SUFFIXES,
    classes_and_clients,
    column_names,
    label_column,
    read_table,
    shown,
    table_path,
)
from pbfl_flwr.errors import PbflError

TEXT, LINES = "text", ".txt"
LENGTH = 200  # tokens of an input, unless input-shape is set
MAX_WORDS = 1_000_000


def text(settings: DataSettings) -> Pool:
    """Return the texts of the CSV or Parquet file data-dir as (length,) token ids.

    Raises:
        PbflError: if the vocabulary is not set or invalid, the file cannot be read, a column is missing, or a cell is
            empty; with file, row (from 1, below the header) and column.
    """
    path = table_path(settings)
    words_file = vocabulary_file(settings)

    def decode(allocate: Allocate) -> Pool:
        names = column_names(path)
        label, name = label_column(path, names, settings), text_column(path, names, settings.text_column)
        if name == label:
            raise PbflError(
                f"{path}: column '{name}' is both text and class; set label-column to the class column"
            )
        rows = read_table(path, names, names)
        texts = list(text_cells(rows[name], name, path))
        classes, numbers, who = classes_and_clients(path, rows, label, settings)
        inputs, words, note = encoded(texts, settings, allocate)
        return Pool(inputs, numbers, classes, len(numbers), who, notes=(note,), vocabulary=words)

    return cached(settings, [path, words_file], decode)


def vocabulary_file(settings: DataSettings) -> Path:
    """Return the file ``vocabulary``.

    Raises:
        PbflError: if it is not set or no file, or input-shape has several axes.
    """
    if not settings.vocabulary:
        raise PbflError(
            "dataset = 'text' needs vocabulary: a file with one token per line, the same for all clients; pbfl "
            "vocabulary makes one"
        )
    if len(settings.shape) > 1:
        raise PbflError(
            f"input-shape = '{settings.input_shape}': allowed with texts is one number, the tokens per input"
        )
    file = Path(settings.vocabulary)
    if not file.is_file():
        raise PbflError(f"vocabulary = '{file}' is not a file")
    return file


def encoded(
    texts: list[str], settings: DataSettings, allocate: Allocate
) -> tuple[NDArray[np.int32], tuple[str, ...], str]:
    """Return token ids (N, length), the vocabulary, and a note on the share of unknown tokens.

    Raises:
        PbflError: as :func:`text`, on vocabulary and input-shape.
    """
    words = read_vocabulary(vocabulary_file(settings))
    inputs = allocate((len(texts), settings.shape[0] if settings.shape else LENGTH), np.int32)
    tokens.encode(texts, words, inputs)
    unknown = float((inputs == tokens.UNK).sum()) / max(1, int((inputs > tokens.CLS).sum()))
    return inputs, words, f"{unknown:.1%} of the tokens are not in the vocabulary"


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """Return the tokens of a vocabulary file.

    Raises:
        PbflError: if it cannot be read, is too long, does not begin with the special tokens, or has a line that is
            empty, repeated or with surrounding spaces.
    """
    try:
        words = tuple(path.read_text(encoding="utf-8").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise PbflError(f"vocabulary {path} is not readable text in UTF-8: {error}") from error
    words = words[:-1] if words[-1] == "" else words
    specials = tokens.SPECIALS
    if words[: len(specials)] != specials:
        raise PbflError(
            f"vocabulary {path}: its first lines must be {', '.join(specials)}; pbfl vocabulary makes such a file"
        )
    if len(words) > MAX_WORDS:
        raise PbflError(f"vocabulary {path} has {len(words)} lines; must be at most {MAX_WORDS}")
    earlier_words: set[str] = set()
    for line, word in enumerate(words, start=1):
        if not word or word != word.strip() or word in earlier_words:
            problem = (
                "is empty"
                if not word.strip()
                else f"repeats '{word[:40]}'"
                if word in earlier_words
                else "has spaces"
            )
            raise PbflError(
                f"vocabulary {path}, line {line} {problem}; must be one token per line, each once"
            )
        earlier_words.add(word)
    return words


def texts_of(path: Path, text_column_name: str = "") -> Iterator[str]:
    """Yield the texts of a file: the column of a table, or the lines of a .txt file.

    Raises:
        PbflError: if it is neither or cannot be read.
    """
    if path.suffix.lower() in SUFFIXES:
        names = column_names(path)
        name = text_column(path, names, text_column_name)
        yield from text_cells(read_table(path, names, names)[name], name, path)
    elif path.suffix.lower() == LINES:
        try:
            with path.open(encoding="utf-8-sig") as file:
                yield from file
        except (OSError, UnicodeDecodeError) as error:
            raise PbflError(f"{path} is not readable text in UTF-8: {error}") from error
    else:
        raise PbflError(f"{path}: must be one of {', '.join((*SUFFIXES, LINES))}")


def text_column(path: Path | str, names: Sequence[str], wanted: str) -> str:
    """Return the name of the column with texts.

    Raises:
        PbflError: if there is no such column.
    """
    name = wanted or TEXT
    if name not in names:
        raise PbflError(
            f"{path} has no column '{name}' with texts; it has {shown(names)}; set text-column to one of them"
        )
    return name


def text_cells(column: Iterable[object], name: str, path: Path | str) -> Iterator[str]:
    """Yield the texts of a column.

    Raises:
        PbflError: if a cell is empty.
    """
    for row, cell in enumerate(column, start=1):
        if not isinstance(cell, str) or not cell.strip():
            raise PbflError(f"{path}, row {row}, column '{name}': the cell is empty; a text is expected")
        yield cell

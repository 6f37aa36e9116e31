"""AG News: 120,000 + 7,600 short news articles in 4 classes, as (200,) token ids.

Reads ``train.csv`` and ``test.csv`` as released by Zhang et al. (2015) and downloaded by torchtext: class 1 to 4,
title, description; a header line is skipped. Title and description form one text.

The vocabulary is PFLlib's: the special tokens and the most frequent tokens of both files, 32,000 in all. Two
differences: a text starts with ``<cls>``, while PFLlib lists that token as ``cls``, does not find it, and starts texts
with ``<unk>``; and the word "cls" is an ordinary token.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.cache import Allocate, cached
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.sources import tokens
from pbfl_flwr.data.sources.files import check_memory, data_root, missing
from pbfl_flwr.errors import PbflError

FILES = ("train.csv", "test.csv")
LABELS = ("World", "Sports", "Business", "Sci/Tech")
LENGTH = 200
MAX_TOKENS = 32_000


def ag_news(settings: DataSettings) -> Pool:
    """Return both parts; searches data-dir, data-dir/ag_news_csv and data-dir/AG_NEWS.

    Raises:
        PbflError: if a file is missing, or a row is not (class, title, description).
    """
    root = data_root(settings)
    places = (root, root / "ag_news_csv", root / "AG_NEWS")
    base = next((place for place in places if (place / FILES[0]).is_file()), None)
    if base is None:
        raise missing(settings, [place / FILES[0] for place in places], None)
    paths = [base / name for name in FILES]
    if not paths[1].is_file():
        raise missing(settings, paths[1:], None)

    def decode(allocate: Allocate) -> Pool:
        parts = [_read(path) for path in paths]
        texts = [text for part in parts for text, _ in part]
        labels = np.array([label for part in parts for _, label in part], dtype=np.int64)
        words = tokens.vocabulary(texts, MAX_TOKENS)
        inputs = allocate((len(texts), LENGTH), np.int32)
        tokens.encode(texts, words, inputs)
        return Pool(inputs, labels, LABELS, num_train=len(parts[0]), vocabulary_size=len(words))

    return cached(settings, paths, decode)


def _read(path: Path) -> list[tuple[str, int]]:
    """Return (text, label 0..3) of every row."""
    check_memory(4 * path.stat().st_size, path)
    allowed = {str(number): number - 1 for number in range(1, len(LABELS) + 1)}
    articles: list[tuple[str, int]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            for row in reader:
                if not row or (reader.line_num == 1 and not row[0].strip().isdigit()):
                    continue
                if len(row) != 3 or row[0].strip() not in allowed:
                    raise PbflError(
                        f"{path}, line {reader.line_num}: {','.join(row)[:60]!r}; expected are a class 1 to 4, "
                        "title and description"
                    )
                articles.append((f"{row[1]} {row[2]}", allowed[row[0].strip()]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PbflError(f"{path} is not a readable CSV file in UTF-8: {error}") from error
    if not articles:
        raise PbflError(f"{path} has no rows; expected are a class from 1 to 4, a title and a description")
    return articles

"""Text as token ids: the rules of torchtext's ``basic_english``, and a vocabulary by frequency.

torchtext is no longer released, and of it only these rules are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

SPECIALS = (
    "<pad>",
    "<cls>",
    "<unk>",
    "<eos>",
)  # ids 0 to 3; no text holds the last, words count from 4 as in PFLlib
PAD, CLS, UNK = range(3)
_MARKS = str.maketrans({**{mark: f" {mark} " for mark in "'.,()!?"}, ";": " ", ":": " ", '"': None})


def split(text: str) -> list[str]:
    """Return the tokens of a text: lower case, the marks ' . , ( ) ! ? alone, without " ; : and <br />."""
    return text.lower().replace("<br />", " ").translate(_MARKS).split()


def vocabulary(texts: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the special tokens, then the most frequent ones, equal counts in the order of their text.

    Args:
        texts: all that are counted.
        most: tokens in the vocabulary, the special ones among them.
    """
    counts = Counter(chain.from_iterable(map(split, texts)))
    ranked = sorted(counts.keys() - set(SPECIALS), key=lambda token: (-counts[token], token))
    return (*SPECIALS, *ranked[: most - len(SPECIALS)])


def encode(texts: Sequence[str], words: Sequence[str], into: NDArray[np.int32]) -> None:
    """Write the ids of texts.

    Args:
        texts: N of them.
        words: the vocabulary; a token that is not in it is ``<unk>``.
        into: (N, length) int32. A row is ``<cls>`` and the text's tokens, cut to the length or filled with ``<pad>``.
    """
    number = {word: index for index, word in enumerate(words)}
    into[:] = PAD
    for row, text in zip(into, texts, strict=True):
        ids = list(_ids(text, number))[: len(row)]
        row[: len(ids)] = ids


def _ids(text: str, number: dict[str, int]) -> Iterator[int]:
    yield CLS
    for token in split(text):
        yield number.get(token, UNK)

"""Text as token ids: the rules of torchtext's ``basic_english``, and a vocabulary by frequency.

torchtext is no longer released, and of it only these rules are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

# Ids 0 to 3; encode() adds no <eos>, it is there so that words start at id 4 as in PFLlib.
SPECIALS = ("<pad>", "<cls>", "<unk>", "<eos>")
PAD, CLS, UNK = range(3)
_MARKS = str.maketrans({**{mark: f" {mark} " for mark in "'.,()!?"}, ";": " ", ":": " ", '"': None})


def split(text: str) -> list[str]:
    """Return the tokens of a text: lower case, the marks ' . , ( ) ! ? as tokens, without " ; : and <br />."""
    return text.lower().replace("<br />", " ").translate(_MARKS).split()


def vocabulary(texts: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the special tokens, then the most frequent ones; ties in the order of their text.

    Args:
        texts: the texts to count.
        most: size of the vocabulary, special tokens included.
    """
    counts = Counter(chain.from_iterable(map(split, texts)))
    ranked = sorted(counts.keys() - set(SPECIALS), key=lambda token: (-counts[token], token))
    return (*SPECIALS, *ranked[: most - len(SPECIALS)])


def encode(texts: Sequence[str], words: Sequence[str], into: NDArray[np.int32]) -> None:
    """Write the token ids of texts.

    A special token that a text spells out becomes ``<unk>``; torchtext gives it the special id, so that a literal
    ``<pad>`` counts as padding. All other texts get torchtext's ids.

    Args:
        texts: N of them.
        words: the vocabulary; other tokens become ``<unk>``.
        into: (N, length) int32. A row is ``<cls>`` and the text's tokens, truncated or padded with ``<pad>``.
    """
    number = {word: index for index, word in enumerate(words) if word not in SPECIALS}
    into[:] = PAD
    for row, text in zip(into, texts, strict=True):
        ids = list(_ids(text, number))[: len(row)]
        row[: len(ids)] = ids


def _ids(text: str, number: dict[str, int]) -> Iterator[int]:
    yield CLS
    for token in split(text):
        yield number.get(token, UNK)

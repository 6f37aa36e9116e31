"""Finds uploads whose numbers are finite but implausibly large, by comparing the uploads of a round.

Without this, one client could replace every average by its own numbers. Magnitudes are root mean squares, so they do
not depend on widths. The comparison is with medians: it finds what fewer than half of the clients send. What is within
the limits is left to the robust rules (``aggregation=median``, ``trimmed-mean``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from pbfl_flwr.payloads.contract import Magnitudes

COMPARABLE = 3  # sizes; of fewer, a median cannot tell which one is wrong
LEAST = (
    0.1  # smaller medians count as this: if the features of most clients vanish, the others are not at fault
)
LARGEST = 1e6  # size where too few clients can be compared
BY_SAMPLES = 10  # factor on the ratio for what grows with a client's number of samples


@dataclass(frozen=True)
class Plausibility:
    """The limits of a run.

    Attributes:
        ratio: largest multiple of a median that is plausible; 0 accepts everything.
        scaled: whether rows are multiplied by the number of samples. Then a client's sum over all classes is compared,
            because true numbers of samples of one class may differ by any factor.
    """

    ratio: float = 0.0
    scaled: bool = False

    def implausible(self, sizes: Mapping[int, Magnitudes], reported: Mapping[int, int]) -> dict[int, str]:
        """Return client -> reason for the uploads that are implausible.

        Args:
            sizes: client -> sizes of its upload.
            reported: client -> number of training samples in its report.
        """
        if not self.ratio:
            return {}
        reasons: dict[int, str] = {}
        for client, of_upload in sizes.items():
            if of_upload.once and of_upload.samples > reported[client]:
                reasons[client] = f"it counts {of_upload.samples} samples, its report {reported[client]}"
        for name, by_client, limit in self._limits(sizes):
            for client, size in by_client.items():
                if size > limit:
                    fault = f"{name} has the size {size:.3g}, it must be at most {limit:.3g} (max-size-ratio)"
                    reasons.setdefault(client, fault)
        return reasons

    def _limits(self, sizes: Mapping[int, Magnitudes]) -> Iterator[tuple[str, dict[int, float], float]]:
        """Yield what is compared: its name, its size by client, and the largest plausible size."""
        samples = {client: float(size.samples) for client, size in sizes.items()}
        if median := _median(samples.values()):
            yield "its number of samples", samples, self.ratio * BY_SAMPLES * median
        if self.scaled:
            sums = {client: sum(size.rows.values()) for client, size in sizes.items()}
            yield "the sum of its rows", sums, BY_SAMPLES * self._limit(_median(sums.values()))
        else:
            present = [_positive(size.rows.values()) for size in sizes.values()]
            of_all = _median(median_low(rows) for rows in present if rows)
            for label in sorted({label for size in sizes.values() for label in size.rows}):
                of_class = {client: size.rows.get(label, 0.0) for client, size in sizes.items()}
                limit = self._limit(max(of_all, _median(of_class.values())))
                yield f"its row of class {label}", of_class, limit
        for name in sorted({name for size in sizes.values() for name in size.tensors}):
            tensors = {client: size.tensors.get(name, 0.0) for client, size in sizes.items()}
            yield f"its '{name}'", tensors, self._limit(_median(tensors.values()))

    def _limit(self, median: float) -> float:
        return self.ratio * max(LEAST, median) if median else LARGEST


def _positive(sizes: Iterable[float]) -> list[float]:
    return [size for size in sizes if size > 0]


def _median(sizes: Iterable[float]) -> float:
    """Return the (lower) median of the positive sizes; 0 if there are too few of them."""
    positive = _positive(sizes)
    return median_low(positive) if len(positive) >= COMPARABLE else 0.0

"""Six interleaved spiral arms in the plane: the toy problem of the ProtoNorm paper (Fig. 1-2).

Arm k, point i = 1..n: radius r = 1 + 9 (i-1)/(n-1), angle ω = kπ/3 + (i-1)π/(3(n-1)) + 0.5 u with u ~ U(0,
1), x = r sin ω, y = r cos ω. The paper prints the slope with a further factor k and noise N(0, 1) in radians;
with these, classes k and k + 3 coincide at the outer end and no classifier exceeds 39 %. This form is that of
FedNH's ``Spiral``, the code from which the figure derives, with the paper's radius: arms do not overlap.
"""

import numpy as np

from pbfl_flwr.config import DataSettings
from pbfl_flwr.data.contract import Pool
from pbfl_flwr.data.sources.files import check_no_path

NUM_CLASSES = 6
POINTS_PER_CLASS = 5000
SEED = 0


def spiral(settings: DataSettings) -> Pool:
    """Return 30,000 points, float32 (2,), 6 classes; independent of the partition's seed.

    Raises:
        PbflError: if data-dir is set.
    """
    check_no_path(settings)
    rng = np.random.default_rng(SEED)
    step = np.linspace(0.0, 1.0, POINTS_PER_CLASS)  # (i-1)/(n-1)
    arm = np.arange(NUM_CLASSES)[:, None]
    angle = (arm + step) * np.pi / 3 + 0.5 * rng.random((NUM_CLASSES, POINTS_PER_CLASS))
    radius = 1 + 9 * step
    points = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)  # (6, n, 2)
    labels = np.repeat(np.arange(NUM_CLASSES, dtype=np.int64), POINTS_PER_CLASS)
    names = tuple(f"arm {k}" for k in range(NUM_CLASSES))
    return Pool(points.reshape(-1, 2).astype(np.float32), labels, names, num_train=len(labels))

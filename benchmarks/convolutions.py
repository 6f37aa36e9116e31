"""Forward and backward pass of single convolutions: torch's layers against those of models/cpu_convolutions.py.

    python benchmarks/convolutions.py [--batch 32] [--out convolutions.json]

The shapes are those of MobileNetV2, EfficientNet-B0, ShuffleNetV2, ResNet-8 and ResNet-18 on 32x32 images. One thread,
channels-last, CPU seconds, median of nine. The threshold FEW_PIXELS is where the ratios fall below one: of depthwise
convolutions by the number of input pixels, of dense ones by that of output pixels.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from machine import introduce, write
from torch import Tensor, nn

from pbfl_flwr.models import cpu_convolutions
from pbfl_flwr.models.cpu_convolutions import optimize_layout
from pbfl_flwr.training.allocator import keep_freed_memory

DEPTHWISE = (  # channels, side, kernel, stride
    (1152, 1, 5, 1),
    (960, 1, 3, 1),
    (672, 2, 5, 1),
    (672, 2, 5, 2),
    (480, 2, 3, 1),
    (384, 2, 3, 1),
    (232, 2, 3, 1),
    (240, 3, 3, 1),
    (240, 4, 5, 1),
    (192, 4, 3, 1),
    (144, 8, 3, 1),
)
DENSE = (  # channels in, channels out, side, kernel, stride
    (512, 512, 1, 3, 1),
    (256, 512, 2, 3, 2),
    (256, 256, 2, 3, 1),
    (512, 512, 2, 3, 1),
    (128, 256, 4, 3, 2),
    (128, 128, 3, 3, 1),
    (128, 128, 4, 3, 1),
    (64, 128, 8, 3, 2),
    (64, 64, 8, 3, 1),
)
POINTWISE = (  # channels in, channels out, side
    (192, 1152, 1),
    (1152, 192, 1),
    (112, 672, 2),
    (672, 112, 2),
    (232, 232, 2),
    (116, 116, 4),
    (144, 24, 8),
    (16, 96, 16),
)


def milliseconds(layer: nn.Module, inputs: Tensor) -> float:
    times = []
    for _ in range(12):
        begin = time.process_time()
        outputs = layer(inputs)
        outputs.backward(torch.ones_like(outputs))
        times.append(time.process_time() - begin)
    return 1000 * median(times[3:])


def compare(conv: nn.Conv2d, side: int, batch: int) -> tuple[float, float]:
    """Return milliseconds of torch's layer and of ours, with the threshold disabled."""
    inputs = torch.randn(batch, conv.in_channels, side, side).contiguous(memory_format=torch.channels_last)
    inputs.requires_grad_()
    plain = milliseconds(conv.to(memory_format=torch.channels_last), inputs)
    with patch.object(cpu_convolutions, "FEW_PIXELS", side * side):  # every map is below the threshold
        return plain, milliseconds(optimize_layout(nn.Sequential(conv), "channels-last"), inputs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    cases = [
        (f"depthwise {c}, {k}x{k}/{s}", side, nn.Conv2d(c, c, k, s, k // 2, groups=c, bias=False))
        for c, side, k, s in DEPTHWISE
    ]
    cases += [
        (f"dense {a} to {b}, {k}x{k}/{s}", side, nn.Conv2d(a, b, k, s, k // 2, bias=False))
        for a, b, side, k, s in DENSE
    ]
    cases += [(f"pointwise {a} to {b}", side, nn.Conv2d(a, b, 1, bias=False)) for a, b, side in POINTWISE]
    introduce(1)
    print(f"{'convolution':<26}{'map':>8}{'library, ms':>14}{'optimised, ms':>14}{'ratio':>8}")
    found = []
    for name, side, conv in cases:
        plain, ours = compare(conv, side, chosen.batch)
        found.append({"convolution": name, "side": side, "library": plain, "optimised": ours})
        print(f"{name:<26}{f'{side}x{side}':>8}{plain:>14.2f}{ours:>14.2f}{plain / ours:>8.1f}", flush=True)
    write(chosen.out, 1, batch=chosen.batch, rows=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

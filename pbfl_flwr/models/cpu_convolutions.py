"""Memory layout of networks on a CPU, and replacements for convolutions at which libraries are slow.

Parameters, their names and the function stay the same; only the order of floating-point sums differs. On maps of a few
pixels a convolution's backward pass takes far longer on a CPU than its arithmetic needs, up to ninety times for
depthwise and ten times for other convolutions (benchmarks/convolutions.py). Such maps make up the deeper half of
MobileNet and EfficientNet at 32x32 and the last stages of ResNets.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pbfl_flwr.models.isolation import is_altered

ModuleT = TypeVar("ModuleT", bound=nn.Module)
FEW_PIXELS = 4  # pixels of a map up to which the replacements are faster


def optimize_layout(model: ModuleT, layout: str) -> ModuleT:
    """Arrange a network in place and return it.

    Args:
        model: any network; layers of other types are left unchanged.
        layout: ``channels-last`` stores images as (B, h, w, C) and replaces convolutions: pointwise ones, and dense
            ones with few output pixels, by matrix products, depthwise ones over few pixels by sums; ``contiguous``
            leaves the network as built.
    """
    if layout == "contiguous":
        return model
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Conv2d and (replacement := _replacement(child)) is not None:
                setattr(parent, name, replacement)
    return model.to(memory_format=torch.channels_last)


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution as a matrix product; in channels-last layout this copies nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, C_out, h, w) for (B, C_in, h, w)."""
        if not _is_ours(input):
            return super().forward(input)
        product = nn.functional.linear(input.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
        return product.permute(0, 3, 1, 2)


class FewPixelsConv2d(nn.Conv2d):
    """A convolution as one matrix product where it has at most FEW_PIXELS output and 4·FEW_PIXELS input pixels.

    The rows of the product are the patches of all output pixels, zero-padded. They are extracted by another product,
    with a small 0/1 table, since a gather has a slower backward pass. Kernel elements that only ever meet the padding
    are left out: over one pixel, all but the middle.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._seen: dict[tuple[int, int], tuple[Tensor, slice, slice]] = {}  # by the size of the map

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, C_out, h', w') for (B, C_in, h, w)."""
        height, width = input.shape[-2:]
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        rows, columns = _sides(height, width, kernel, stride, int(self.padding[0]))
        few = 0 < rows * columns <= FEW_PIXELS and height * width <= 4 * FEW_PIXELS
        if not few or not _is_ours(input):
            return super().forward(input)
        batch, channels = input.shape[:2]
        if (height, width) not in self._seen:
            self._seen[height, width] = _seen(height, width, kernel, stride, int(self.padding[0]))
        seen, down, across = self._seen[height, width]
        pixels = input.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        patches = (seen.to(input.dtype) @ pixels).view(batch * rows * columns, -1)
        weights = self.weight.permute(0, 2, 3, 1)[:, down, across].flatten(1)
        product = nn.functional.linear(patches, weights, self.bias)
        return product.view(batch, rows, columns, self.out_channels).permute(0, 3, 1, 2)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution as a direct sum where the map has at most FEW_PIXELS pixels.

    With p over input pixels and q over output pixels, out[b, q, c] = Σ_p in[b, p, c]·w[c, p - q]: the kernel element
    between p and q is the same for all channels, so that one small table holds it.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._taps: dict[tuple[int, int], tuple[Tensor, int, int]] = {}  # by the size of the map

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, C, h', w') for (B, C, h, w)."""
        height, width = input.shape[-2:]
        if height * width > FEW_PIXELS or not _is_ours(input):
            return super().forward(input)
        batch, channels = input.shape[:2]
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if (height, width) not in self._taps:
            self._taps[height, width] = _taps(height, width, kernel, stride, int(self.padding[0]))
        table, rows, columns = self._taps[height, width]
        table = table.to(input.dtype)
        weights = (table @ self.weight.flatten(1).t()).view(height * width, rows * columns, channels)
        pixels = input.permute(0, 2, 3, 1).reshape(batch, height * width, 1, channels)
        total = (pixels * weights).sum(dim=1)  # (B, h'w', C)
        if self.bias is not None:
            total = total + self.bias
        return total.view(batch, rows, columns, channels).permute(0, 3, 1, 2)


def _is_ours(maps: Tensor) -> bool:
    """Whether this is a batch of maps on a CPU; the library handles all else, e.g. a map without batch axis."""
    return maps.device.type == "cpu" and maps.dim() == 4 and len(maps) > 0


def _replacement(conv: nn.Conv2d) -> nn.Conv2d | None:
    """Return an equivalent layer of this module with the same parameters, None if none applies."""
    padding = conv.padding
    tensors = {name for name, _ in (*conv.named_parameters(), *conv.named_buffers())}
    if is_altered(conv) or tensors - {"weight", "bias"} or any(conv.children()):
        return None  # hooks know this layer; torch's weight_norm also keeps its weight by one
    if isinstance(padding, str) or conv.padding_mode != "zeros" or {*conv.dilation} != {1}:
        return None
    if not len({*conv.kernel_size}) == len({*conv.stride}) == len({*padding}) == 1:
        return None
    kind: type[nn.Conv2d]
    if conv.kernel_size == conv.stride == (1, 1) and padding[0] == 0 and conv.groups == 1:
        kind = PointwiseConv2d
    elif conv.groups == conv.in_channels == conv.out_channels:
        kind = DepthwiseConv2d
    elif conv.groups == 1 and conv.kernel_size[0] > 1:
        kind = FewPixelsConv2d
    else:
        return None
    replacement = kind(
        conv.in_channels,
        conv.out_channels,
        (conv.kernel_size[0], conv.kernel_size[1]),
        (conv.stride[0], conv.stride[1]),
        padding[0],
        groups=conv.groups,
        bias=conv.bias is not None,
        device="meta",  # no initialisation: the parameters are replaced below
    )
    replacement.weight, replacement.bias = conv.weight, conv.bias
    return replacement.train(conv.training)


def _sides(height: int, width: int, kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Return the output size (h', w') of a convolution."""
    return (height + 2 * padding - kernel) // stride + 1, (width + 2 * padding - kernel) // stride + 1


def _seen(height: int, width: int, kernel: int, stride: int, padding: int) -> tuple[Tensor, slice, slice]:
    """Return the table of input pixels that each output pixel meets at each kernel element, and those elements.

    Returns:
        (h'·w'·i·j, h·w), one where an output pixel meets an input pixel, for the i x j kernel elements that lie on the
        map for some output pixel; the rows and the columns of these elements.
    """
    taps, rows, columns = _taps(height, width, kernel, stride, padding)
    across = _on_the_map(width, columns, kernel, stride, padding)
    down = _on_the_map(height, rows, kernel, stride, padding)
    table = taps.view(height * width, rows * columns, kernel, kernel).permute(1, 2, 3, 0)
    with torch.inference_mode(False):
        return table[:, down, across].reshape(-1, height * width).clone(), down, across


def _on_the_map(side: int, outputs: int, kernel: int, stride: int, padding: int) -> slice:
    """Return the kernel elements along one axis that lie on the map for some output, all if none does."""
    used = [i for i in range(kernel) if any(0 <= out * stride + i - padding < side for out in range(outputs))]
    return slice(used[0], used[-1] + 1) if used else slice(0, kernel)


def _taps(height: int, width: int, kernel: int, stride: int, padding: int) -> tuple[Tensor, int, int]:
    """Return (h·w·h'·w', kernel²), one where a kernel element connects an input and an output pixel; h', w'."""
    rows, columns = _sides(height, width, kernel, stride, padding)
    with torch.inference_mode(False):  # the table may be made during evaluation and used in training
        pixels = torch.eye(height * width).view(height * width, 1, height, width)
        met = nn.functional.unfold(pixels, kernel, padding=padding, stride=stride)  # (h·w, kernel², h'·w')
        return met.transpose(1, 2).reshape(-1, kernel * kernel).contiguous(), rows, columns

"""Attention over feature maps and their fusion across layers, for FedCPD's distillation.

Works on the output of any model's ``feature_maps``: (B, C, H, W), or (B, C, length), which is treated as an image of
height 1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pbfl_flwr import seeds
from pbfl_flwr.errors import PbflError
from pbfl_flwr.models.contract import SplitModel, random_inputs
from pbfl_flwr.task import Task

REDUCTION = 16  # r of CBAM's channel gate


class CBAM(nn.Module):
    """Convolutional block attention module (Woo et al. 2018): a channel gate, then a spatial gate.

    Channel gate σ(MLP(mean over positions) + MLP(maximum over positions)), with one shared MLP C -> C/r -> C; then
    spatial gate σ(7x7 convolution of [mean over channels; maximum over channels]). The reduction r and the kernel are
    CBAM's own defaults; the hidden layer has max(1, C // r) units.

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // REDUCTION)
        self.channel_gate = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels))
        self.spatial_gate = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Return A = CBAM(F), in the shape of F, (B, C, H, W)."""
        summaries = self.channel_gate(maps.mean((2, 3))) + self.channel_gate(maps.amax((2, 3)))  # (B, C)
        gated = maps * summaries.sigmoid()[:, :, None, None]
        places = torch.stack([gated.mean(1), gated.amax(1)], dim=1)  # (B, 2, H, W)
        attended: Tensor = gated * self.spatial_gate(places).sigmoid()
        return attended


class CrossLayerFusion(nn.Module):
    """X^{l,*} = Cv2^l(up(Cv1^{l+1}(X^{l+1})) + Cv1^l(X^l) + Cv3^l(X^l)); the last level has no upsampled term.

    Source: FedCPD, section 3.3. Cv1 is 1x1 and Cv3 3x3, from C_l channels to the common width; Cv2 is 3x3, back to C_l;
    ``up`` is bilinear.

    Args:
        channels: C_1 to C_L.
        width: the common number of channels.
    """

    def __init__(self, channels: Sequence[int], width: int = 64) -> None:
        super().__init__()
        self.unify = nn.ModuleList(nn.Conv2d(c, width, 1) for c in channels)  # Cv1
        self.smooth = nn.ModuleList(nn.Conv2d(width, c, 3, padding=1) for c in channels)  # Cv2
        self.enhance = nn.ModuleList(nn.Conv2d(c, width, 3, padding=1) for c in channels)  # Cv3

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the fused maps, each in the shape of its own level."""
        unified = [convolution(x) for convolution, x in zip(self.unify, maps, strict=True)]
        fused = []
        for level, (narrow, x) in enumerate(zip(unified, maps, strict=True)):
            mixed = narrow + self.enhance[level](x)
            if level + 1 < len(unified):
                mixed = mixed + F.interpolate(
                    unified[level + 1], size=x.shape[2:], mode="bilinear", align_corners=False
                )
            fused.append(self.smooth[level](mixed))
        return fused


class MapDistillation(nn.Module):
    """FedCPD's L_fd = Σ_l ‖A_s^{l,*} - A_t^l‖² + ‖F_s^{l,*} - F_t^l‖², with all its trainable modules.

    The student's maps are fused across layers, the teacher's are not. Attention and fusion are separate from the
    network and do not alter its features.

    Args:
        channels: C_1 to C_L of the network's maps.
        width: of the fusion.
        seed: of the initial weights; torch's global random state is left unchanged.
    """

    def __init__(self, channels: Sequence[int], *, width: int = 64, seed: int = 0) -> None:
        super().__init__()
        with seeds.seeded(seed):
            self.attention = nn.ModuleList(CBAM(c) for c in channels)
            self.fuse_attention = CrossLayerFusion(channels, width)
            self.fuse_maps = CrossLayerFusion(channels, width)

    def forward(
        self,
        student: Sequence[Tensor],
        teacher: Sequence[Tensor],
        attended: Sequence[Tensor],
        summed: bool = False,
    ) -> Tensor:
        """Return L_fd.

        Args:
            student: F_s^l, with gradients.
            teacher: F_t^l.
            attended: A_t^l, from the teacher's frozen attention.
            summed: take the squared norm per sample, averaged over the batch; by default the mean over all elements,
                which does not depend on the size of maps.
        """
        student, teacher, attended = as_images(student), as_images(teacher), as_images(attended)
        pairs = [
            *zip(self.fuse_attention(attend(self.attention, student)), attended, strict=True),
            *zip(self.fuse_maps(student), teacher, strict=True),
        ]
        errors = [(fused - target.detach()).square() for fused, target in pairs]
        return torch.stack([e.sum() / len(e) if summed else e.mean() for e in errors]).sum()


def attend(attention: nn.ModuleList, maps: Sequence[Tensor]) -> list[Tensor]:
    """Return A^l = CBAM^l(F^l) for every level."""
    return [gate(x) for gate, x in zip(attention, maps, strict=True)]


class MapMemory:
    """The teacher of :class:`MapDistillation`: frozen copies of a network's earlier stages and of their attention.

    Args:
        stages: of the network; copied.
        state: their earlier state.
        attention: of a :class:`MapDistillation`; copied.
    """

    def __init__(self, stages: nn.ModuleList, state: Mapping[str, Tensor], attention: nn.ModuleList) -> None:
        self.stages, self.attention = copy.deepcopy(stages), copy.deepcopy(attention)
        self.stages.load_state_dict(dict(state))
        for module in (self.stages, self.attention):
            module.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return F_t^l and A_t^l of all levels."""
        maps = []
        for stage in self.stages:
            inputs = stage(inputs)
            maps.append(inputs)
        levels = convolutional(maps)
        return levels, attend(self.attention, levels)


def map_channels(model: nn.Module, task: Task) -> list[int]:
    """Return the channels of the maps with spatial axes, C_1 to C_L; empty for a model without stages.

    The model's mode and buffers are left unchanged.
    """
    if not isinstance(model, SplitModel):
        return []
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        maps = convolutional(model.feature_maps(random_inputs(task, 1).to(device)))
    model.train(was_training)
    return [x.shape[1] for x in maps]


def check_maps(name: str, model: SplitModel, task: Task) -> None:
    """Check that the network's maps and features are what its stages and its neck compute, since the teacher is these.

    Args:
        name: of the network, for the error.
        model: put into evaluation mode.
        task: with the shape of inputs.

    Raises:
        PbflError: if the network computes its maps or its features otherwise.
    """
    inputs = random_inputs(task, 2).to(next(model.parameters()).device)
    with torch.no_grad():
        maps, features = model.eval().maps_and_features(inputs)
        found, expected = [*maps, features, model.features(inputs)], list[Tensor]()
        for stage in model.stages:
            inputs = stage(inputs)
            expected.append(inputs)
        expected += [model.neck(inputs)] * 2
    same = len(found) == len(expected) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
        for one, other in zip(found, expected, strict=True)
    )
    if not same:
        raise PbflError(
            f"method 'fedcpd' distils the feature maps of a network's stages, and model '{name}' computes its maps or "
            "features otherwise than by its stages and its neck; must do it there, or fedcpd.distill-weight = 0"
        )


def convolutional(maps: Sequence[Tensor]) -> list[Tensor]:
    """Return the maps with spatial axes beside channels, as images (B, C, H, W)."""
    return as_images([x for x in maps if x.dim() in (3, 4)])


def as_images(maps: Sequence[Tensor]) -> list[Tensor]:
    """Return maps (B, C, length) as (B, C, 1, length), images unchanged."""
    return [x.unsqueeze(2) if x.dim() == 3 else x for x in maps]

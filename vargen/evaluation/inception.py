"""The Inception network that defines FID, loaded from a local weight file.

It is TensorFlow's Inception-v3 of 2015-12-05 with 1008 classes, which differs from torchvision's: images are resized without
half-pixel centers, average pooling excludes padding, and the last block uses max pooling. Parameters have the names in the
file published by pytorch-fid and torch-fidelity, so that this file can be loaded.

Shape suffixes: N images, C channels, Y/X pixels.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from vargen.files import expand_user
from vargen.weight_files import check_shapes, load_pickle_safely, read_header

SIDE, DIMENSIONS, CLASSES = 299, 2048, 1008
HOW = (
    "fetch weights-inception-2015-12-05-6726825d.pth of torch-fidelity's releases (95 MB), or the same weights as safetensors, "
    "and give weights=FILE"
)
# A unit is "name:channels:kernel[/stride]"; "avg" and "max" are pooling. Units of a branch are applied in sequence, those of a
# tuple in parallel. Convolutions preserve the size; those with a stride have no padding.
_Branch = list["str | tuple[str, ...]"]


def _block_a(pool: int) -> list[_Branch]:
    return [
        ["branch1x1:64:1"],
        ["branch5x5_1:48:1", "branch5x5_2:64:5"],
        ["branch3x3dbl_1:64:1", "branch3x3dbl_2:96:3", "branch3x3dbl_3:96:3"],
        ["avg", f"branch_pool:{pool}:1"],
    ]


def _block_c(width: int) -> list[_Branch]:
    one, other = f"branch7x7_2:{width}:1x7", "branch7x7_3:192:7x1"
    double = [f"branch7x7dbl_{n}:{width if n < 5 else 192}:{'1x7' if n % 2 else '7x1'}" for n in range(2, 6)]
    return [
        ["branch1x1:192:1"],
        [f"branch7x7_1:{width}:1", one, other],
        [f"branch7x7dbl_1:{width}:1", *double],
        ["avg", "branch_pool:192:1"],
    ]


def _block_e(pool: str) -> list[_Branch]:
    return [
        ["branch1x1:320:1"],
        ["branch3x3_1:384:1", ("branch3x3_2a:384:1x3", "branch3x3_2b:384:3x1")],
        ["branch3x3dbl_1:448:1", "branch3x3dbl_2:384:3", ("branch3x3dbl_3a:384:1x3", "branch3x3dbl_3b:384:3x1")],
        [pool, "branch_pool:192:1"],
    ]


_BLOCK_B: list[_Branch] = [
    ["branch3x3:384:3/2"],
    ["branch3x3dbl_1:64:1", "branch3x3dbl_2:96:3", "branch3x3dbl_3:96:3/2"],
    ["max/2"],
]
_BLOCK_D: list[_Branch] = [
    ["branch3x3_1:192:1", "branch3x3_2:320:3/2"],
    ["branch7x7x3_1:192:1", "branch7x7x3_2:192:1x7", "branch7x7x3_3:192:7x1", "branch7x7x3_4:192:3/2"],
    ["max/2"],
]
# name, branches, input channels
_BLOCKS: list[tuple[str, list[_Branch], int]] = [
    ("Mixed_5b", _block_a(32), 192),
    ("Mixed_5c", _block_a(64), 256),
    ("Mixed_5d", _block_a(64), 288),
    ("Mixed_6a", _BLOCK_B, 288),
    ("Mixed_6b", _block_c(128), 768),
    ("Mixed_6c", _block_c(160), 768),
    ("Mixed_6d", _block_c(160), 768),
    ("Mixed_6e", _block_c(192), 768),
    ("Mixed_7a", _BLOCK_D, 768),
    ("Mixed_7b", _block_e("avg"), 1280),
    ("Mixed_7c", _block_e("max"), 2048),
]


class Unit(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: tuple[int, int], stride: int = 1, same: bool = True):
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else 0
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def _pool(kind: str, x: Tensor) -> Tensor:
    if kind == "max/2":
        return F.max_pool2d(x, 3, 2)
    if kind == "max":
        return F.max_pool2d(x, 3, 1, 1)
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


class Mixed(nn.Module):
    """Parallel branches whose channels are concatenated."""

    def __init__(self, branches: list[_Branch], channels: int):
        super().__init__()
        self.paths: list[list[tuple[str, ...]]] = []
        for branch in branches:
            width, path = channels, []
            for part in branch:
                names = (part,) if isinstance(part, str) else part
                made = [self._add(name, width) for name in names]
                width = sum(out for _, out in made)
                path.append(tuple(name for name, _ in made))
            self.paths.append(path)

    def _add(self, part: str, channels: int) -> tuple[str, int]:
        """Return name and channels of a pooling step, or of a unit, which is added to this block."""
        if ":" not in part:
            return part, channels
        name, out, kernel = part.split(":")
        kernel, _, stride = kernel.partition("/")
        rows, _, columns = kernel.partition("x")
        size = int(rows), int(columns or rows)
        self.add_module(name, Unit(channels, int(out), size, int(stride or 1), same=not stride))
        return name, int(out)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for path in self.paths:
            y = x
            for names in path:
                parts = [self.get_submodule(name)(y) if name in self._modules else _pool(name, y) for name in names]
                y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            found.append(y)
        return torch.cat(found, 1)


class FIDInception(nn.Module):
    """Maps images to pooled features and class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Unit(3, 32, (3, 3), 2, same=False)
        self.Conv2d_2a_3x3 = Unit(32, 32, (3, 3), same=False)
        self.Conv2d_2b_3x3 = Unit(32, 64, (3, 3))
        self.Conv2d_3b_1x1 = Unit(64, 80, (1, 1))
        self.Conv2d_4a_3x3 = Unit(80, 192, (3, 3), same=False)
        for name, branches, channels in _BLOCKS:
            self.add_module(name, Mixed(branches, channels))
        self.fc = nn.Linear(DIMENSIONS, CLASSES)

    def forward(self, pixels_NCYX: Tensor) -> tuple[Tensor, Tensor]:
        """Return features `[N, 2048]` and class scores `[N, 1008]` without bias for uint8 images `[N, 3, Y, X]`."""
        x = (resized_as_tensorflow(pixels_NCYX.to(self.fc.weight.dtype), SIDE) - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        for name, _, _ in _BLOCKS:
            x = self.get_submodule(name)(x)
        pooled = x.mean((2, 3))
        return pooled, pooled @ self.fc.weight.T  # the reference Inception Score omits the bias

    @classmethod
    def from_file(cls, path: str | Path | None) -> FIDInception:
        """Load the network from a `.safetensors` file, or from a `.pth` file, which is read as data only.

        Raises:
            FileNotFoundError: there is no file; the message says how to get it.
            ValueError: the file is damaged, or belongs to another network.
        """
        file = None if path is None else expand_user(path, "weights")
        if file is None or not file.is_file():
            named = "weights are not given" if file is None else f"weights {str(path)!r} do not exist"
            raise FileNotFoundError(f"{named}, and FID's Inception needs them: {HOW}")
        if file.suffix == ".safetensors":
            read_header(file)
            state = load_file(file)
        else:
            state = load_pickle_safely(file, if_damaged=HOW)
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{file} must hold a state dict, names and tensors; {HOW}")
        with torch.device("meta"):
            network = cls()
        counters = {name for name in network.state_dict() if name.endswith("num_batches_tracked")}  # missing in older files
        expected = {name: tuple(value.shape) for name, value in network.state_dict().items() if name not in counters}
        check_shapes({name: tuple(value.shape) for name, value in state.items()}, expected, str(file), ignore=counters)
        network = network.to_empty(device="cpu")
        network.load_state_dict({name: value for name, value in state.items() if name not in counters}, strict=False)
        for name in counters:
            network.get_buffer(name).zero_()
        return network.float().eval().requires_grad_(False)


def resized_as_tensorflow(pixels_NCYX: Tensor, side: int) -> Tensor:
    """Resize bilinearly to a square of `side` pixels as TensorFlow 1 does: pixel i is at i * (size / side), no antialiasing."""
    for axis in (2, 3):
        size = pixels_NCYX.shape[axis]
        if size == side:
            continue
        at = torch.arange(side, dtype=pixels_NCYX.dtype, device=pixels_NCYX.device) * (size / side)
        low = at.floor().long().clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        share = (at - low).view((-1, 1) if axis == 2 else (-1,))
        below, above = pixels_NCYX.index_select(axis, low), pixels_NCYX.index_select(axis, high)
        pixels_NCYX = below + (above - below) * share
    return pixels_NCYX

"""Published checkpoints with Wan2.1's layout, by the names of their files: what the tensors do not say.

Distilled models of one layout differ in the frames of a block, the noise levels, and the attention window, none of which can be
read from the weights. Some have the layout, but run another algorithm; they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Files of a published model.

    Attributes:
        name: of the model.
        files: patterns of file names, with as many parent folders as are needed to recognize them.
        license: as its authors state it; None if it was not found.
        settings: arguments of `convert_causal_video` that differ from those of Self-Forcing.
        refused: why the files cannot be converted; None if they can.
    """

    name: str
    files: tuple[str, ...]
    license: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None


_FRAMEWISE = {"block_frames": 1, "image": True}
CHECKPOINTS = (
    PublishedCheckpoint("Self-Forcing", ("self_forcing_dmd.pt", "self_forcing_sid*.pt"), "Apache-2.0"),
    PublishedCheckpoint("Causal-Forcing, chunk-wise", ("chunkwise/causal_forcing.pt",), "Apache-2.0"),
    PublishedCheckpoint("Causal-Forcing, frame-wise", ("framewise/causal_forcing.pt",), "Apache-2.0", _FRAMEWISE),
    PublishedCheckpoint(
        "Causal-Forcing++, two steps", ("framewise-2step.pt",), "Apache-2.0", {**_FRAMEWISE, "steps": "1000,500"}
    ),
    PublishedCheckpoint("Causal-Forcing++, one step", ("framewise-1step.pt",), "Apache-2.0", {**_FRAMEWISE, "steps": "1000"}),
    PublishedCheckpoint(
        "CausVid", ("autoregressive_checkpoint/model.pt",), "CC-BY-NC-SA-4.0", {"steps": "1000,757,522", "no_warp": True}
    ),
    PublishedCheckpoint("LongLive, without its LoRA", ("longlive_base.pt",), "Apache-2.0", {"window": 12, "sinks": 3}),
    PublishedCheckpoint("LightX2V 14B", ("self_forcing_dmd_14b.safetensors",), None, {"steps": "1000,821,642,321"}),
    PublishedCheckpoint(
        "Rolling Forcing",
        ("rolling_forcing_dmd.pt", "chunkwise/longvideo.pt"),
        "Tencent",
        refused="it denoises several blocks at different noise levels together, and vargen one block at a time",
    ),
    PublishedCheckpoint(
        "Krea Realtime 14B",
        ("krea-realtime-video*.safetensors", "krea-realtime-video/transformer/*.safetensors"),
        "CC-BY-NC-SA-4.0",
        refused="it computes its cache again from the latest frames before each block, and vargen's would drift",
    ),
    PublishedCheckpoint(
        "StreamDiffusionV2",
        ("wan_causal_dmd_v2v*/model.pt",),
        "Apache-2.0 (code)",
        refused="it restyles a given video, and vargen generates one from noise",
    ),
    PublishedCheckpoint(
        "Reward Forcing",
        ("rewardforcing.pt",),
        None,
        refused="its sinks are a running mean of earlier frames, and vargen's are the first frames",
    ),
)


def find_published(file: Path) -> PublishedCheckpoint | None:
    """Return the published model that a file is of, by its name; None for other files."""
    path = "/".join(file.absolute().parts[-3:]).lower()
    for checkpoint in CHECKPOINTS:
        if any(fnmatch(path, pattern) or fnmatch(path, f"*/{pattern}") for pattern in checkpoint.files):
            return checkpoint
    return None


def validate_checkpoint_file(file: Path) -> None:
    """Raise ValueError if a file is of a published model that runs another algorithm."""
    found = find_published(file)
    if found is not None and found.refused is not None:
        raise ValueError(f"{file} is {found.name}: {found.refused}")

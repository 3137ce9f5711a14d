"""The node that generates a video."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.decoding import VideoMethod
from vargen.kernels.host import normal_tensors

from .model_inputs import MODEL_DEFAULT, check_model, describe_inputs, open_model

PARADIGMS = (VideoMethod.paradigm,)


class VargenVideo:
    """Generates the frames of a video from a prompt."""

    CATEGORY = "vargen"
    DESCRIPTION = __doc__
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "STRING", "FLOAT")
    RETURN_NAMES = ("frames", "statistics", "fps")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        blocks = ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "Length in blocks; 0: the model's."})
        return {"required": {**describe_inputs("emoji-video", "winking face", PARADIGMS), "num_blocks": blocks}}

    @classmethod
    def VALIDATE_INPUTS(cls, model: str | None = None, method: str | None = None) -> bool | str:
        return check_model(model, method, PARADIGMS)

    @normal_tensors()  # as in `VargenImage`
    def generate(self, model: str, prompt: str, seed: int, method: str, num_blocks: int) -> tuple[Tensor, str, float]:
        """Return the frames, float32 `[F, H, W, 3]` in [0, 1], a line of statistics, and frames per second.

        Raises:
            ValueError: for an input that is not valid, in one sentence.
        """
        pipe = open_model(model, PARADIGMS)
        result = pipe(
            prompt,
            num_blocks=num_blocks or None,
            accelerator=None if method == MODEL_DEFAULT else method,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        )
        stats = result.stats
        passes = ", ".join(f"{count} passes of {name}" for name, count in stats.passes.items())
        statistics = f"{stats.accelerator}: {len(stats.blocks)} blocks, {passes}, {stats.seconds:.2f} s, seed {seed}"
        return torch.from_numpy(result.frames[0]), statistics, float(result.fps)

"""The node that generates an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Accelerator, ScaleSchedule
from vargen.kernels.host import normal_tensors

from .model_inputs import MODEL_DEFAULT, check_model, describe_inputs, open_model

PARADIGMS = (Accelerator.paradigm, ScaleSchedule.paradigm)


class VargenImage:
    """Generates an image from a prompt, or from the name or number of a class."""

    CATEGORY = "vargen"
    DESCRIPTION = __doc__
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("image", "statistics")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": describe_inputs("emoji", "a red apple", PARADIGMS)}

    @classmethod
    def VALIDATE_INPUTS(cls, model: str | None = None, method: str | None = None) -> bool | str:
        return check_model(model, method, PARADIGMS)

    @normal_tensors()  # ComfyUI runs nodes in inference mode, whose tensors other modes cannot write to
    def generate(self, model: str, prompt: str, seed: int, method: str) -> tuple[Tensor, str]:
        """Return the image, float32 `[1, H, W, 3]` in [0, 1], and a line of statistics.

        Raises:
            ValueError: for an input that is not valid, in one sentence.
        """
        pipe = open_model(model, PARADIGMS)
        label: int | str = int(prompt) if prompt.isdecimal() else prompt
        subject = {"class_labels": label} if pipe.is_class_conditional else {"prompt": prompt}
        accelerator = {} if method == MODEL_DEFAULT else {"accelerator": method}
        result = pipe(**subject, **accelerator, generator=torch.Generator().manual_seed(seed), output_type="np")
        stats = result.stats
        statistics = (
            f"{stats.accelerator}: {stats.passes} passes, {stats.tokens_per_pass:.2f} tokens per pass, {stats.seconds:.2f} s, "
            f"seed {seed}"
        )
        return torch.from_numpy(result.images), statistics

"""The command that generates what the page shows."""

from __future__ import annotations

import shlex

from vargen.demo.image_service import ImageService
from vargen.demo.request import PageRequest
from vargen.scoring.registry import DEFAULT_SCORER


def command_line(service: ImageService, request: PageRequest) -> str:
    """Return the command that generates the same images."""
    prompt = ["--class-label", request.prompt] if service.by_class else [request.prompt]
    parts = ["vargen", "generate", *prompt, "--seed", str(request.seed), "--accelerator", request.method]
    parts += ["--guidance-scale", f"{request.guidance_scale:g}", "--temperature", f"{request.temperature:g}"]
    parts += ["--top-k", str(request.top_k or service.vocab), "--top-p", f"{request.top_p:g}"]
    parts += ["--negative-prompt", request.negative_prompt] if request.negative_prompt else []
    parts += ["-n", str(request.num_images)] if request.num_images > 1 else []
    if request.best_of > 1:
        parts += ["--best-of", str(request.best_of)]
        parts += ["--scorer", service.scorer_name] if service.scorer_name != DEFAULT_SCORER else []
    parts += ["--model", service.name] if service.name != "emoji" else []
    return shlex.join(parts)

"""Where a model is: packaged, in a folder, or on the hub by any name that people copy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vargen.assets import packaged_model_path, packaged_models
from vargen.files import expand_user
from vargen.values import short_repr, suggest_names

FETCHING = ("cache_dir", "force_download", "local_files_only", "token", "revision")  # options of the hub
_MAX_ID = 96  # characters of a model id on the Hub
# Files to fetch: none that could be executed.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md", "*.jinja", "*.tiktoken", "*.bpe"]
_URL = re.compile(r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)")
_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?:/(?:tree|blob|resolve)/([^/]+).*|@([^/@]+))?/?")
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")

_CONVERT = "holds official files, which have to be converted: vargen convert "
# By name in lower case, what to type instead.
_OFFICIAL = {
    **{
        f"deepseek-ai/janus-pro-{size}": "has its original layout; open "
        f"'deepseek-community/Janus-Pro-{size.upper()}', the same weights for transformers"
        for size in ("1b", "7b")
    },
    "baai/emu3-gen": "comes with its own code; open 'BAAI/Emu3-Gen-hf', the same weights for transformers",
    "baai/emu3.5-image": "needs emu3.tiktoken and emu3_vision_tokens.txt from src/tokenizer_emu3_ibq of its code; download it, "
    "copy them into the folder, and open that folder",
    "zai-org/glm-image": "is a pipeline of diffusers; download it, copy its processor/ files into its vision_language_encoder/ "
    "folder, and open that folder",
    "foundationvision/llamagen": _CONVERT + "llamagen --transformer c2i_B_256.pt --vq vq_ds16_c2i.pt -o DIR",
    "csuhan/ta-tok": _CONVERT + "llamagen --transformer ar_dtok_lp_512px.pth --vq vq_ds16_t2i.pt --ta-tok ta_tok.pth -o DIR",
    "foundationvision/var": _CONVERT + "var --transformer var_d16.pth --vae vae_ch160v4096z32.pth -o DIR",
    "gdhe17/self-forcing": _CONVERT + "causal-video --transformer checkpoints/self_forcing_dmd.pt "
    "--wan Wan2.1-T2V-1.3B-Diffusers -o DIR",
}


def locate_folder(name: Any, options: Mapping[str, Any]) -> Path:
    """Return the folder of a packaged, local or Hub model.

    Args:
        name: a packaged model, a folder, or on the hub `owner/name`, `owner/name@revision`, `hf://owner/name` or a page's
            address.
        options: `FETCHING`, as of huggingface_hub; other options are ignored.
    """
    text = str(name)
    if text in packaged_models():
        return packaged_model_path(text)
    path = expand_user(name, "model")
    if os.path.isdir(path):  # Path.is_dir would raise if the name is too long for a file name
        return path
    if path.suffix.lower() in (*_PICKLES, ".safetensors"):
        raise ValueError(
            f"model must be a folder, got {short_repr(text)}; vargen convert llamagen, var, infinity or causal-video makes one"
        )
    match = _ID.fullmatch(_URL.sub("", text)) if len(text) <= 4 * _MAX_ID else None
    if match is None or text.startswith((".", "/", "~")) or len(match[1]) > _MAX_ID:
        allowed = "a packaged one, a folder with a model_index.json, or a hub id 'owner/name'"
        raise ValueError(f"unknown model {short_repr(text)}: give {allowed}; {suggest_names(text, packaged_models())}")
    if (advice := _OFFICIAL.get(match[1].lower())) is not None:
        raise ValueError(f"{match[1]} {advice}")
    given = {key: options[key] for key in FETCHING if key in options}
    if revision := match[2] or match[3]:
        if given.get("revision") not in (None, revision):
            raise ValueError(f"revision must be {revision!r}, as in {text!r}, or left out, got {given['revision']!r}")
        given["revision"] = revision
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(match[1], allow_patterns=_HUB_PATTERNS, **given))
    except Exception as error:
        raise ValueError(f"no local folder {text!r} exists, and fetching the hub model of that name failed: {error}") from error

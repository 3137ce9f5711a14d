"""The packages that people use vargen with work together, in one process, beside the torch at hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from vargen.compat import installed_version

IMPORTS = """
import sys
from vargen.compat import ensure_torchvision
ensure_torchvision()
sys.path.insert(0, {support!r})
from image_reward_package import restore_moved_functions
restore_moved_functions()
from diffusers import AutoPipelineForText2Image
import diffusers, gradio, open_clip, PIL, torch, torchvision, transformers, triton
{reward}
import vargen
vargen.LlamaGenPipeline
print("together")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(installed_version, ("gradio", "open-clip-torch", "triton"))), reason="not all extras are installed"
)
def test_they_import_together() -> None:
    """With the official ImageReward where it is installed: on the reference set, not on the latest one."""
    support = str(Path(__file__).parent / "support")
    reward = "import ImageReward" if installed_version("image-reward") else ""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(reward=reward, support=support)], capture_output=True, text=True
    )
    assert done.stdout == "together\n", done.stderr

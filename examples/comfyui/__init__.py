"""vargen in ComfyUI: copy this folder to `custom_nodes/vargen`, install vargen into ComfyUI's environment, and restart.

The nodes are in the category vargen.
"""

from .enable_node import VargenEnable
from .image_node import VargenImage
from .video_node import VargenVideo

NODE_CLASS_MAPPINGS = {"VargenEnable": VargenEnable, "VargenImage": VargenImage, "VargenVideo": VargenVideo}
NODE_DISPLAY_NAME_MAPPINGS = {
    "VargenEnable": "vargen enable",
    "VargenImage": "vargen image",
    "VargenVideo": "vargen video",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

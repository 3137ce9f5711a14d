"""vargen in ComfyUI: copy this folder to `custom_nodes/vargen`, install vargen into ComfyUI's environment, and restart.

The nodes are in the category vargen.
"""

from .image_node import VargenImage
from .video_node import VargenVideo

NODE_CLASS_MAPPINGS = {"VargenImage": VargenImage, "VargenVideo": VargenVideo}
NODE_DISPLAY_NAME_MAPPINGS = {"VargenImage": "vargen image", "VargenVideo": "vargen video"}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

"""The official ImageReward of 2023, an oracle for ours, with today's transformers."""


def restore_moved_functions() -> None:
    """Restore functions of transformers to where image-reward 1.5 imports them from; transformers 4.56 moved them."""
    from transformers import modeling_utils, pytorch_utils

    for name in ("apply_chunking_to_forward", "find_pruneable_heads_and_indices", "prune_linear_layer"):
        if not hasattr(modeling_utils, name) and hasattr(pytorch_utils, name):
            setattr(modeling_utils, name, getattr(pytorch_utils, name))

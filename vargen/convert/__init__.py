"""Official checkpoints to diffusers-style folders."""

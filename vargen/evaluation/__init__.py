"""Measuring quality and speed: FID, CLIP, rewards, sweeps, reports."""

"""Proof that a method is exact, by summing over all drafts and outcomes, with negative controls."""

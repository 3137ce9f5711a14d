"""Block-wise video models: a policy says which model generates each block, from the scores of drafts."""

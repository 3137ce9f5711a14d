"""How the packaged models were made. Not in the wheel: `python -m recipes NAME` from a checkout."""

"""Prove that a function which verifies drafts is exact: every draft and every outcome of its uniforms is summed.

python examples/check_function.py
"""

import numpy as np

from vargen.evaluation.function_check import sum_function


def verify(p, q, drafts, uniforms):
    """Speculative sampling (Leviathan et al. 2023) for one image."""
    for slot, token in enumerate(drafts):
        if uniforms[slot] * q[slot, token] >= p[slot, token]:  # rejected
            residual = np.maximum(p[slot] - q[slot], 0)
            return [*drafts[:slot], np.searchsorted(np.cumsum(residual / residual.sum()), uniforms[-1])]
    return [*drafts, np.searchsorted(np.cumsum(p[-1]), uniforms[-1])]


if __name__ == "__main__":
    print(f"total variation distance to the target: {sum_function(verify):.1e}")

"""Triton kernels, their torch references, and the dispatch between them. Imported as `vargen.kernels`."""

if __name__ == "kernels":  # found bare through sys.path: this name may belong to another distribution
    from vargen.compat import hand_over

    hand_over(__name__, __path__[0])

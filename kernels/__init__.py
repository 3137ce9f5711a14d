"""Triton kernels and fast CPU paths, with the torch references that they are tested against. Imported as `vargen.kernels`."""

if __name__ == "kernels":  # found bare through sys.path: this name may belong to another distribution
    from vargen.compat import defer_to_installed_package

    defer_to_installed_package(__name__, __path__[0])

"""The parts that need to be fast, each beside what it is tested against in torch. Imported as `vargen.kernels`."""

if __name__ == "kernels":  # found bare through sys.path: this name may belong to another distribution
    from vargen.compat import defer_to_installed_package

    defer_to_installed_package(__name__, __path__[0])

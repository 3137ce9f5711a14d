"""Pipelines, one file per model family. Imported as `vargen.pipelines`."""

if __name__ == "pipelines":  # found bare through sys.path: this name may belong to another distribution
    from vargen.compat import defer_to_installed_package

    defer_to_installed_package(__name__, __path__[0])

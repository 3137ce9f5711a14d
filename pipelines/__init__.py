"""Pipelines, one file per model family. Imported as `vargen.pipelines`."""

if __name__ == "pipelines":  # found bare through sys.path: this name may belong to another distribution
    from vargen.compat import hand_over

    hand_over(__name__, __path__[0])

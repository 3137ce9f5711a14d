"""The `vargen` command, a file per verb. Results go to stdout, everything else to stderr."""

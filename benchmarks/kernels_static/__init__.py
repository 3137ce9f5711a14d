"""What the kernels cost as far as it can be known without a GPU: run `python -m benchmarks.kernels_static.costs`."""

"""Seconds until the compiled CPU code of an int8 model is built with an empty cache folder, and loaded.

    python benchmarks/compiling.py {next-token,next-scale}

It is built by the processes that a first image starts. Importing torch is not counted.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time

from vargen.kernels.cpu import cpu_instructions
from vargen.kernels.cpu_code import SCALE_PASS, TOKEN_PASS, TOKEN_STEPS

CODE = {"next-token": (TOKEN_PASS, TOKEN_STEPS), "next-scale": (SCALE_PASS, TOKEN_STEPS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=CODE)
    codes = CODE[parser.parse_args().kind]
    logging.getLogger("vargen").setLevel(logging.ERROR)
    cpu_instructions()  # imports torch
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        start = time.perf_counter()
        for code in codes:
            code.load(wait=False)
        while not all(code.is_built() for code in codes) and time.perf_counter() < start + 60:
            time.sleep(0.01)
        built = time.perf_counter() - start
        for code in codes:
            if code.load(wait=True) is None:
                raise RuntimeError(f"{code.name}: {code.failure}")
        loaded = time.perf_counter() - start
    print(f"built in {built:.2f} s, loaded after {loaded:.2f}")


if __name__ == "__main__":
    main()

"""The demo: `python app.py`, then open the address that it prints. `python app.py --help` lists the options."""

import sys

from vargen.cli.main import main

if __name__ == "__main__":
    main("demo", *sys.argv[1:])

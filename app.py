"""The demo: `python app.py`, then open the address that it prints. `python app.py --help` lists the options."""

from vargen.demo.launch import main

if __name__ == "__main__":
    main()

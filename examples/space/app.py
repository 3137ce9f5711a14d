"""The demo as a Hugging Face Space, which expects a page on port 7860 of all its addresses."""

from vargen.cli.main import main

if __name__ == "__main__":
    main("demo", "--host", "0.0.0.0", "--port", "7860")

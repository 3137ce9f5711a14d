"""The Gradio demo that `app.py` starts: type a prompt, and see the same picture drawn by different methods."""

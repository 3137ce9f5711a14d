"""The look of the page: system fonts, one accent color, and no requests to other servers."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

CSS = Path(__file__).with_name("style.css")
FAVICON = Path(__file__).with_name("favicon.svg")
TOGGLE = "() => { document.body.classList.toggle('dark'); }"


def theme() -> gr.themes.Base:
    """Return the theme, light and dark."""
    return gr.themes.Soft(
        primary_hue="indigo",
        secondary_hue="indigo",
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "Consolas", "monospace"],
    ).set(
        body_background_fill="*neutral_100",
        body_background_fill_dark="*neutral_950",
        block_border_width="1px",
        block_border_width_dark="1px",
        block_title_background_fill="none",
        block_title_background_fill_dark="none",
        block_title_padding="0",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        block_label_background_fill="none",
        block_label_background_fill_dark="none",
        block_label_text_color="*neutral_700",
        block_label_text_color_dark="*neutral_200",
        block_label_text_size="*text_sm",
    )

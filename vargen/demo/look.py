"""The look of the page: theme, style sheet, icon and a script."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

CSS = Path(__file__).with_name("style.css")
STREAMS = Path(__file__).with_name("streams.js")
FAVICON = Path(__file__).with_name("favicon.svg")


def build_theme() -> gr.themes.Base:
    """Return the theme, light and dark: system fonts, one accent color, and no requests to other servers."""
    colors = {
        "block_title_background_fill": "none",
        "block_title_text_color": "*neutral_700",
        "block_label_background_fill": "none",
        "block_label_text_color": "*neutral_700",
        "block_border_width": "1px",
    }
    contrast = {  # at least 4.5 to 1 on every background that they are used on
        "body_text_color_subdued": "*neutral_600",
        "block_info_text_color": "*neutral_600",
        "input_placeholder_color": "*neutral_500",
        "button_primary_background_fill": "*primary_600",
        "button_primary_background_fill_hover": "*primary_700",
        "checkbox_label_background_fill_selected": "*primary_600",
        "checkbox_border_color": "*neutral_400",
    }
    dark_contrast = {
        "body_text_color_subdued_dark": "*neutral_300",
        "block_info_text_color_dark": "*neutral_300",
        "input_placeholder_color_dark": "*neutral_400",
        "button_primary_background_fill_dark": "*primary_600",
        "button_primary_background_fill_hover_dark": "*primary_700",
        "checkbox_label_background_fill_selected_dark": "*primary_600",
        "checkbox_border_color_dark": "*neutral_400",
    }
    dark = {**colors, "block_title_text_color": "*neutral_200", "block_label_text_color": "*neutral_200"}
    return gr.themes.Soft(
        primary_hue="indigo",
        secondary_hue="indigo",
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "Consolas", "monospace"],
    ).set(
        body_background_fill="*neutral_100",
        body_background_fill_dark="*neutral_950",
        block_title_padding="0",
        block_label_text_size="*text_sm",
        **colors,
        **contrast,
        **dark_contrast,
        **{f"{name}_dark": value for name, value in dark.items()},
    )

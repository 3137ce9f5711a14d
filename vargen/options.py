"""The sampling options, defined once: validation, command line, demo page and documentation read them from here; and the names
of the methods.

Does not import torch, so that `vargen --help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from vargen.values import NumberRange


@dataclass(frozen=True)
class Option:
    """A sampling option: its allowed values and its description.

    Attributes:
        name: of the argument.
        help: short description for users.
        off_value: the value that has no effect.
        range: allowed values.
        slider: minimum, maximum and step of a page control; a control that cannot express None uses 0 for it.
    """

    name: str
    help: str
    off_value: float | None
    range: NumberRange
    slider: tuple[float, float, float]

    @property
    def label(self) -> str:
        """The display name: "Top-k" for `top_k`."""
        return self.name.removesuffix("_scale").replace("_", "-").capitalize()


# All sampling options of a call, by name.
OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "guidance_scale",
            help="how closely to follow the prompt; 1 turns guidance off",
            off_value=1.0,
            range=NumberRange(0.0, 1000.0),  # far beyond any use; float32 logits still hold it, unlike 1e38
            slider=(0, 20, 0.1),
        ),
        Option(
            "temperature",
            help="randomness of sampling; 0 always takes the most probable token",
            off_value=1.0,
            range=NumberRange(0.0),
            slider=(0, 2, 0.05),
        ),
        Option(
            "top_k",
            help="number of most probable tokens kept; 0 keeps all",
            off_value=None,
            range=NumberRange(0, is_integer=True, optional=True),
            slider=(0, 2**20, 1),
        ),
        Option(
            "top_p",
            help="total probability of the most probable tokens kept; 1 keeps all",
            off_value=1.0,
            range=NumberRange(0.0, 1.0, open_below=True),
            slider=(0.01, 1, 0.01),
        ),
    )
}

# The names of the presets of `vargen.decoding`, so that a wrong one is reported without importing torch.
METHODS = (
    "auto", "ar", "sjd", "scd", "gumbel", "gsd", "mulo-exact", "mulo", "speculative", "eagle", "lantern", "medusa",
    "lantern-jacobi", "wavefront", "pac", "gumbel-tree", "speculative-tree", "layer-skip", "lookup", "recycle", "eagle-gumbel",
    "eagle-2", "plain", "code", "economy", "target", "sdvg", "sdvg-learned", "stride", "early-exit",
)  # fmt: skip

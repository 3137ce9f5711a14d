"""Checks, from configurations alone, that the components, sampling defaults and class names of a model match each other.

They run before a folder's weights are loaded, and in the constructor of a pipeline, for components that were created elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from vargen.options import OPTIONS
from vargen.pipelines import validation as checks
from vargen.pipelines.components import Family
from vargen.values import short_repr


def check_parts(
    family: Family, configs: Mapping[str, Any], id2label: Any = None, defaults: Any = None, prompt_styles: Any = None
) -> None:
    """Check that the components' configurations match, and validate the values stored with them.

    Args:
        configs: configuration by component, None for a missing one.
        id2label, defaults, prompt_styles: arguments of the pipeline.

    Raises:
        ValueError: if the tokens of the vqvae, the tokens or conditions of a drafter, or the width of the text encoder's
            features do not match the transformer; see also `check_defaults` and `check_id2label`.
    """
    transformer = configs.get("transformer") or {}
    if family.check is not None:
        import_module(family.check).check_parts(configs, defaults)
        return
    check_defaults(defaults, transformer.get("vocab_size"))
    check_id2label(id2label, transformer.get("num_classes") if transformer.get("condition") == "class" else None)
    styles = [] if prompt_styles is None else prompt_styles
    if not isinstance(styles, list | tuple) or not all(isinstance(style, str) and style.strip() for style in styles):
        raise ValueError(f"prompt_styles must be a list of words, or None, got {short_repr(prompt_styles)}")
    if transformer:
        _check_networks(family, transformer, configs)


def _check_networks(family: Family, transformer: Any, configs: Mapping[str, Any]) -> None:
    vqvae: Any = configs.get("vqvae")
    draft_transformer: Any = configs.get("draft_transformer")
    text_encoder: Any = configs.get("text_encoder")
    if vqvae is not None and vqvae["codebook_size"] != transformer["vocab_size"]:
        raise ValueError(
            f"transformer and vqvae do not belong together: the transformer draws from {transformer['vocab_size']} tokens "
            f"(vocab_size), the vqvae has {vqvae['codebook_size']} codes (codebook_size)"
        )
    if vqvae is not None and "scales" in transformer:
        for name, other in (("scales", "scales"), ("code_dim", "codebook_embed_dim")):
            own, its = transformer[name], vqvae[other]
            if own != its and not (isinstance(own, list | tuple) and list(own) == list(its)):
                raise ValueError(
                    f"transformer and vqvae do not belong together: {name} of the transformer is {own!r}, {other} of the vqvae "
                    f"is {its!r}"
                )
    condition = transformer["condition"]
    for name in family.shared[condition] if draft_transformer is not None else ():
        draft, target = draft_transformer[name], transformer[name]
        if draft != target:
            raise ValueError(
                f"draft_transformer and transformer do not belong together: {name} of the draft model is {draft!r}, and must "
                f"be that of the transformer, {target!r}"
            )
    for name in family.drafters:
        _check_drafter(name, configs.get(name), transformer)
    _check_low_res(configs.get("low_res"), configs.get("upsampler"), transformer, family.shared[condition])
    width = next((_of(text_encoder, name) for name in ("d_model", "hidden_size") if _of(text_encoder, name)), None)
    if condition == "text" and isinstance(width, int) and width != transformer["caption_dim"]:
        raise ValueError(
            f"text_encoder and transformer do not belong together: the encoder's features are {width} wide, the transformer "
            f"takes {transformer['caption_dim']} (caption_dim)"
        )


def _check_drafter(name: str, drafter: Any, transformer: Any) -> None:
    for key in ("dim", "vocab_size", "grid_size") if drafter is not None else ():
        if drafter[key] != transformer[key]:
            raise ValueError(
                f"{name} and transformer do not belong together: {key} of the drafter is {drafter[key]!r}, and must be that of "
                f"the transformer whose features it extends, {transformer[key]!r}"
            )


def _check_low_res(low: Any, upsampler: Any, transformer: Any, shared: tuple[str, ...]) -> None:
    if low is None:
        if upsampler is not None:
            raise ValueError("an upsampler needs the low_res transformer whose pictures it makes larger")
        return
    for name in shared:
        if name != "grid_size" and low[name] != transformer[name]:
            raise ValueError(
                f"low_res and transformer do not belong together: {name} of the low-resolution model is {low[name]!r}, and "
                f"must be that of the transformer, {transformer[name]!r}"
            )
    small, large = low["grid_size"], transformer["grid_size"]
    if small >= large or large % small:
        raise ValueError(
            f"low_res and transformer do not belong together: grid_size {small} must divide, and be less than, {large}"
        )
    given = (("vocab_size", transformer["vocab_size"]), ("grid_size", large), ("low_grid", small))
    for name, right in given if upsampler is not None else ():
        if upsampler[name] != right:
            raise ValueError(
                f"upsampler and transformers do not belong together: {name} of the upsampler is {upsampler[name]!r}, and must "
                f"be {right!r}"
            )


def _of(config: Any, name: str) -> Any:
    """Return a value of a configuration: a mapping (from a file or diffusers) or an object (of transformers)."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def check_defaults(defaults: Any, vocab_size: int | None = None) -> None:
    """Raise ValueError unless it is None or a dict of valid sampling settings (None where unset).

    Args:
        vocab_size: maximum of `top_k`, if known.
    """
    if defaults is None:
        return
    if not isinstance(defaults, dict):
        raise ValueError(f"defaults must be a dict of {', '.join(OPTIONS)}, or None, got {defaults!r}")
    for name in defaults:
        if name not in OPTIONS:
            raise ValueError(f"defaults has an unknown setting {name!r}; it may have {', '.join(OPTIONS)}")
    try:
        _, sampling = checks.check_sampling({name: value for name, value in defaults.items() if value is not None})
        if vocab_size is not None:
            sampling.validate_top_k(vocab_size)
    except (ValueError, TypeError) as error:
        raise ValueError(f"defaults: {error}") from error


def check_id2label(id2label: Any, num_classes: int | None = None) -> None:
    """Raise ValueError unless it is None or a mapping from class numbers (also as strings, as in JSON) to names.

    Args:
        num_classes: number of classes, if known.
    """
    if id2label is None:
        return
    allowed = "a mapping of class numbers to names, such as {0: 'tench, Tinca tinca'}, or None"
    if not isinstance(id2label, Mapping):
        raise ValueError(f"id2label must be {allowed}, got {id2label!r:.200}")
    for key, name in id2label.items():
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10 else key
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(name, str):
            raise ValueError(f"id2label must be {allowed}, got {key!r}: {name!r:.200}")
        if number < 0 or (num_classes is not None and number >= num_classes):
            most = "" if num_classes is None else f" to {num_classes - 1}"
            raise ValueError(f"id2label names class {number}; the classes are 0{most}")

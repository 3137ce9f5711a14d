"""Registration of model families: the components of their folders, and which settings must match."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vargen.folders.networks import NetworkFolder, config_value, require_equal
from vargen.folders.tokenizers import TokenizerFolder
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.text_encoder import TEXT_ENCODERS, MiniLMTextEncoder
from vargen.pipelines.validation import validate_sampling
from vargen.values import OPTIONS, parse_int, short_repr

StoredComponent = NetworkFolder | StoredNetwork | TokenizerFolder

STORED_VALUES = ("id2label", "defaults", "prompt_styles")  # entries of an index that are not components


@dataclass(frozen=True)
class Component:
    """A component that the folders of a family may have.

    Attributes:
        classes: allowed classes; those of transformers by their names.
        follows_dtype: whether it is opened in the caller's dtype, or the names of the classes that are; others in float32.
        matches: by setting of this component, the setting of the transformer that must equal it; a tuple for equal names.
        adapter: of a trained drafter: makes the draft head for decoding, from the network and the target's token model.
        drafter: of a trained drafter: the class in `vargen.decoding` that drafts with the head.
        run_folder: of a network that users train for their model: its subfolder in the folder of the training run.
    """

    classes: tuple[Any, ...]
    required: bool = False
    follows_dtype: bool | tuple[str, ...] = False
    matches: Mapping[str, str] | tuple[str, ...] = ()
    adapter: Any = None
    drafter: Any = None
    run_folder: str | None = None

    @property
    def named_classes(self) -> dict[str, Any]:
        """The allowed classes, by name as in an index."""
        return {each if isinstance(each, str) else each.__name__: each for each in self.classes}

    @property
    def network_class(self) -> Any:
        """The first of the allowed classes, which converters and trainings write."""
        return self.classes[0]

    def follows(self, class_name: str) -> bool:
        """Whether the component of this class is opened in the caller's dtype."""
        return self.follows_dtype if isinstance(self.follows_dtype, bool) else class_name in self.follows_dtype

    def read(self, folder: Path, class_name: str, variant: str | None = None) -> StoredComponent:
        """Check the files of a component of this class; no weight is read."""
        found = self.named_classes[class_name]
        if not isinstance(found, str):
            return NetworkFolder(folder, found, variant)
        if class_name in TEXT_ENCODERS:
            return StoredNetwork(folder, TEXT_ENCODERS[class_name], variant=variant)
        return TokenizerFolder(folder, class_name)


# The last two are the class names in transformers 4 and 5 of a tokenizer that has only a tokenizer.json.
_TOKENIZERS = (
    "BertTokenizer", "BertTokenizerFast", "T5Tokenizer", "T5TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
)  # fmt: skip
TEXT_COMPONENTS = {
    "text_encoder": Component((MiniLMTextEncoder, *TEXT_ENCODERS), follows_dtype=tuple(TEXT_ENCODERS)),
    "tokenizer": Component(_TOKENIZERS),
}


def validate_sampling_defaults(defaults: Any, transformer: Mapping[str, Any]) -> None:
    """Raise ValueError unless `defaults` is None or a dict of valid sampling settings (None where unset)."""
    if not isinstance(defaults, dict | None) or any(name not in OPTIONS for name in defaults or ()):
        raise ValueError(f"defaults must be a dict of {', '.join(OPTIONS)}, or None, got {short_repr(defaults)}")
    try:
        _, sampling = validate_sampling({name: value for name, value in (defaults or {}).items() if value is not None})
        if transformer:
            sampling.validate_top_k(transformer["vocab_size"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"defaults: {error}") from error


@dataclass(frozen=True)
class ModelFamily:
    """Registration of a model family.

    Attributes:
        name: of its converter: `vargen convert NAME`.
        components: all that its folders may have, in the order of a constructor.
        condition_settings: by kind of condition, settings that a smaller transformer must share with the transformer.
        text_width: setting of the transformer that is the width of the text encoder's features.
        check_compatible: raises ValueError unless the configurations match in what `matches` cannot express.
        check_defaults: validates the `defaults` of a folder, given the transformer's configuration; raises ValueError.
        convert: converts official files to a folder. Its arguments are the options of `vargen convert NAME`.
        official_sizes: by name, such as "var-d16", configurations of the components; benchmarks run them with random weights.
    """

    name: str
    pipeline: Any
    components: Mapping[str, Component]
    condition_settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text_width: str = "caption_dim"
    check_compatible: Callable[[Mapping[str, Any]], None] | None = None
    check_defaults: Callable[[Any, Mapping[str, Any]], object] = validate_sampling_defaults
    convert: Callable[..., Path] | None = None
    official_sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def drafters(self) -> dict[str, Component]:
        """The drafters that are trained on the transformer's features."""
        return {name: component for name, component in self.components.items() if component.adapter is not None}

    @property
    def trainable(self) -> dict[str, Component]:
        """The networks that users train to draft for their own transformer, which `load_drafter` loads."""
        return {name: component for name, component in self.components.items() if component.run_folder is not None}

    def read_index(self, index: Mapping[str, Any], file: Path, given: Container[str] = ()) -> dict[str, str]:
        """Return the class of each component that an index names; ValueError for wrong and missing ones."""
        found = {}
        for name, entry in index.items():
            known = self.components[name].named_classes if name in self.components else {}
            if name in STORED_VALUES or entry == [None, None] or (not known and not isinstance(entry, list)):
                continue
            if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str) or entry[1] not in known:
                allowed = f"its class must be {' or '.join(known)}" if known else f"components are {', '.join(self.components)}"
                raise ValueError(f"{file} has {name!r}: {short_repr(entry)}; {allowed}")
            found[name] = entry[1]
        for name, component in self.components.items():
            if component.required and name not in found and name not in given:
                advice = f"download or convert the folder again, or pass {name} when opening it"
                raise ValueError(f"{file} names no {name!r}; {advice}")
        return found

    def check(self, configs: Mapping[str, Any], id2label: Any = None, defaults: Any = None, prompt_styles: Any = None) -> None:
        """Check that configurations by component match, and the values stored with them."""
        transformer = configs.get("transformer") or {}
        condition = transformer.get("condition", "")
        self.check_defaults(defaults, transformer)
        _check_labels(id2label, transformer["num_classes"] if condition == "class" else None)
        if prompt_styles is not None and not (
            isinstance(prompt_styles, list | tuple) and all(isinstance(each, str) and each.strip() for each in prompt_styles)
        ):
            raise ValueError(f"prompt_styles must be a list of words, or None, got {short_repr(prompt_styles)}")
        if not transformer:
            return
        for name, component in self.components.items():
            for own in component.matches:
                other = component.matches[own] if isinstance(component.matches, Mapping) else own
                require_equal(configs, name, own, "transformer", other)
            if component.classes == self.components["transformer"].classes:
                for setting in self.condition_settings.get(condition, ()):
                    require_equal(configs, name, setting, "transformer", setting)
        if condition != "class":
            width = "d_model" if config_value(configs.get("text_encoder"), "d_model") is not None else "hidden_size"
            require_equal(configs, "text_encoder", width, "transformer", self.text_width)
        if self.check_compatible is not None:
            self.check_compatible(configs)


def _check_labels(id2label: Any, num_classes: int | None) -> None:
    """Raise ValueError unless class numbers, also as strings, map to names."""
    most = None if num_classes is None else num_classes - 1
    for key, name in id2label.items() if isinstance(id2label, Mapping) else [] if id2label is None else [(id2label, None)]:
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10 else key
        if parse_int(number, 0, most) is None or not isinstance(name, str):
            limit = "" if most is None else f" from 0 to {most}"
            raise ValueError(f"id2label must map class numbers{limit} to names, got {short_repr(key)}: {short_repr(name)}")


FAMILIES: dict[str, ModelFamily] = {}  # by name of the pipeline class, as in model_index.json; `loading` imports all


def register_family(family: ModelFamily) -> ModelFamily:
    """Register a family, and derive what diffusers needs of its pipeline class; returns the family."""
    pipeline, components = family.pipeline, family.components
    offloaded = (*pipeline.model_cpu_offload_seq.split("->"), "tokenizer")
    pipeline.family = family
    pipeline._optional_components = [name for name, component in components.items() if not component.required]
    # Small networks that are used in turn with the transformer would be moved back and forth.
    pipeline._exclude_from_cpu_offload = [name for name in components if name not in offloaded]
    FAMILIES[pipeline.__name__] = family
    return family

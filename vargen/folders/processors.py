"""Processors of image language models from the data files of a folder: no class, path or program of the folder is used.

A chat template is a small program, and can ask for any amount of memory. It is run once, on a short text, and only if it
consists of loops, conditions and output; what it puts before and after a text becomes a template of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vargen.compat import report_panics
from vargen.folders.json_files import BOOL, TEXT, Allowed, Kind, expect, pick_values, read_config, read_data, whole
from vargen.folders.tokenizers import choose_class, load_tokenizer
from vargen.values import one_line, parse_float

_IMAGE_SETTINGS = (
    "do_resize size resample do_rescale rescale_factor do_normalize image_mean image_std do_convert_rgb do_pad min_size "
    "background_color min_pixels max_pixels spatial_factor do_center_crop crop_size patch_size temporal_patch_size merge_size"
).split()
_SETTINGS: dict[str, Allowed] = {
    "image_seq_length": whole(0, 2**16),
    "use_default_system_prompt": BOOL,
}  # beside parts and templates
_MAX_SETTING = 2**31

_MAX_TEMPLATE = 2**16  # characters
_MARK, _ROOM = "%prompt%", "\t"
_NODES = frozenset(
    "Template Output TemplateData Const Name Getattr Getitem Slice For If CondExpr Compare Operand And Or Not Test Filter "
    "Assign NSRef Keyword List Tuple Call Concat Add Sub Neg".split()
)
_FILTERS = frozenset("d default first last length lower safe string trim upper".split())
_METHODS = frozenset("endswith get items keys lstrip rstrip startswith strip values".split())
_FUNCTIONS = frozenset({"namespace", "raise_exception"})
_MAX_LOOPS = 3  # nested
_MAX_CONSTANT = 200  # characters of a text within an expression, which a loop may visit one by one


class ProcessorClasses(Protocol):
    """Names of the classes of a model and of the parts of its processor, and whether prompts pass through its chat template."""

    class_name: str
    processor_name: str
    tokenizer_names: tuple[str, ...]
    image_processor_name: str
    uses_template: bool


def load_processor(folder: Path, model: ProcessorClasses) -> Any:
    """Load the processor of a folder, of the classes that its model's description names."""
    try:
        return _build_processor(folder, model)
    except ValueError as error:
        raise ValueError(f"{folder} holds no processor of a {model.class_name}: {error}") from error


def _build_processor(folder: Path, model: ProcessorClasses) -> Any:
    import transformers

    tokenizer = load_tokenizer(folder, choose_class(folder, *model.tokenizer_names))
    if not model.image_processor_name:  # it reads prompts alone
        return tokenizer
    file = folder / "processor_config.json"
    settings = read_config(file) if file.is_file() else {}
    _refuse_other_processor(settings, file, model)
    values = pick_values(settings, _SETTINGS, file)
    more = {}
    if model.uses_template:  # these models need transformers 5, which saves templates in this file
        place = folder / "chat_template.jinja"
        text = read_data(place, 4 * _MAX_TEMPLATE).decode("utf-8", "replace")
        more = {"chat_template": reduce_template(text, place, tokenizer.special_tokens_map)}
    with report_panics(f"{folder} holds no processor that can be used", Exception):
        images = getattr(transformers, model.image_processor_name)(**_read_image_settings(folder, settings, model))
        processor_class: Any = getattr(transformers, model.processor_name)
        return processor_class(images, tokenizer, **values, **more)


def _read_image_settings(folder: Path, settings: Mapping[str, Any], model: ProcessorClasses) -> dict[str, Any]:
    """Return the listed settings of the image processor: those of its own file or, of later releases, of the processor's."""
    file = folder / "preprocessor_config.json"
    values = read_config(file) if file.is_file() else settings.get("image_processor")
    if not isinstance(values, dict):
        return {}
    _refuse_other_processor(values, file, model)
    return pick_values(values, dict.fromkeys(_IMAGE_SETTINGS, Kind(_holds_numbers, "numbers of usual size")), file)


def _refuse_other_processor(values: Mapping[str, Any], file: Path, model: ProcessorClasses) -> None:
    """Raise ValueError for a file of another model's processor."""
    named = values.get("processor_class")
    expect(named in (None, model.processor_name), "processor_class", named, file, repr(model.processor_name))


def _holds_numbers(value: Any) -> bool:
    """Whether it is a number, a truth value, or a list or mapping of at most 16 of them."""
    each: list[Any] = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
    numbers = [parse_float(number) for number in each if not isinstance(number, bool)]
    return len(each) <= 16 and all(number is not None and abs(number) <= _MAX_SETTING for number in numbers)


# -- chat templates -------------------------------------------------------------------------------------------------------


def reduce_template(text: str, file: Path, tokens: Mapping[str, Any]) -> str:
    """Return a chat template of our own for messages of one user: what a template puts around a text, around each text.

    The file names the template in messages; it may use special tokens, by name.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(text) > _MAX_TEMPLATE:
        raise ValueError(f"{file} must have at most {_MAX_TEMPLATE:,} characters")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    message = {"role": "user", "content": [{"type": "text", "text": f"{_ROOM}{_MARK}{_ROOM}"}]}
    try:
        _refuse_growth(environment.parse(text))
        shown = _render(environment.from_string(text), messages=[message], **tokens)
    except Exception as error:  # a template can raise anything
        raise ValueError(f"{file} is not a chat template that can be used: {one_line(error)}") from error
    if shown.count(_MARK) != 1:
        raise ValueError(f"{file} must show the text of a message once")
    before, _, after = shown.partition(_MARK)
    trims = not (before.endswith(_ROOM) and after.startswith(_ROOM))
    parts = before.removesuffix(_ROOM), after.removeprefix(_ROOM)
    for part in parts:
        expect(TEXT.fits(part), "text beside a prompt", part, file, TEXT.allowed)
    shown_text = "part['text'] | trim" if trims else "part['text']"
    loops = "{% for message in messages %}{% for part in message['content'] %}"
    return f"{loops}{{{{ {parts[0]!a} }}}}{{{{ {shown_text} }}}}{{{{ {parts[1]!a} }}}}{{% endfor %}}{{% endfor %}}"


def _render(template: Any, **values: Any) -> str:
    """Return what a template shows, of bounded length."""
    shown = ""
    for piece in template.generate(**values):
        shown += piece
        if len(shown) > _MAX_TEMPLATE:
            raise ValueError(f"it shows more than {_MAX_TEMPLATE:,} characters")
    return shown


def _refuse_growth(node: Any, loops: int = 0, assigned: bool = False) -> None:
    """Raise ValueError for a part of a template that could make its output much larger than itself."""
    kind = type(node).__name__
    if kind not in _NODES:
        raise ValueError(f"it has the part {kind}")
    if kind == "Filter" and node.name not in _FILTERS:
        raise ValueError(f"it has the filter {node.name!r}")
    if kind in ("Concat", "Add", "List", "Tuple") and assigned:
        raise ValueError("it has a variable that grows")
    if kind == "Const" and isinstance(node.value, str) and len(node.value) > _MAX_CONSTANT:
        raise ValueError(f"it has a text of {len(node.value)} characters in an expression")
    if kind == "Call":
        function = node.node
        known = getattr(function, "attr", None) in _METHODS or getattr(function, "name", None) in _FUNCTIONS
        if not known or node.dyn_args or node.dyn_kwargs:
            raise ValueError("it has the call of a function")
    loops += kind == "For"
    if loops > _MAX_LOOPS or (kind == "For" and node.recursive):
        raise ValueError(f"it has more than {_MAX_LOOPS} nested loops")
    for child in node.iter_child_nodes():
        _refuse_growth(child, loops, assigned or kind == "Assign")

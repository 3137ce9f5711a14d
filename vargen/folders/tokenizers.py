"""Opening a tokenizer's folder: its data is checked, and transformers reads a private copy that holds nothing else.

The library `tokenizers` trusts its files: it allocates what an id asks for, expands text as often as rules say, and aborts or
panics where they are damaged. So parts of unknown types, ids beyond any vocabulary and rules that multiply text are refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vargen.compat import installed_version, is_panic
from vargen.folders.json_files import (
    INCOMPLETE,
    one_line,
    pick_values,
    private_folder,
    read_config,
    read_object,
    validate_string,
)
from vargen.reading import open_regular
from vargen.values import parse_int, short_repr

# Files with the vocabulary of a tokenizer, any one of which suffices; the others by class name.
_TOKENIZER_FILE = "tokenizer.json"
_VOCABULARY_FILES = {
    "BertTokenizer": ("vocab.txt",), "T5Tokenizer": ("spiece.model",), "LlamaTokenizer": ("tokenizer.model",),
    "CLIPTokenizer": ("vocab.json",),
}  # fmt: skip
_MORE_FILES = {"vocab.json": ("merges.txt",)}
_MAX_BYTES = 2**26  # of a file

# Types of the parts of a tokenizer.json.
_PARTS = {
    "normalizer": (
        "Sequence BertNormalizer NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents Prepend Replace Precompiled ByteLevel"
    ),
    "pre_tokenizer": (
        "Sequence BertPreTokenizer ByteLevel CharDelimiterSplit Digits Metaspace Punctuation Split UnicodeScripts Whitespace "
        "WhitespaceSplit"
    ),
    "post_processor": "Sequence BertProcessing ByteLevel RobertaProcessing TemplateProcessing",
    "decoder": "Sequence BPEDecoder ByteFallback ByteLevel Fuse Metaspace Replace Strip WordPiece",
    "model": "BPE Unigram WordLevel WordPiece",
}
_MAX_ID = 2**21  # vocabularies have at most a few hundred thousand tokens
_MAX_ADDED, _MAX_ADDED_TEXT = 2**16, 1000  # added tokens, and characters of one
_MAX_GROWTH = 64  # characters of the normalized text per character of the prompt, and tokens that a template adds
_MAX_PATTERN = 10_000  # characters of a regular expression
_MAX_EXTRA_IDS = 1000

_MODEL_TOKENS = "image_token boi_token eoi_token image_wrapper_token eof_token grid_bos_token grid_eos_token".split()
_TOKENS = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split() + _MODEL_TOKENS
_FLAGS = (
    "add_bos_token add_eos_token add_prefix_space clean_up_tokenization_spaces do_lower_case legacy split_special_tokens "
    "strip_accents tokenize_chinese_chars"
).split()
_SIDES = ("padding_side", "truncation_side")


class TokenizerFolder:
    """A tokenizer of transformers in a folder, whose data was checked; the folder's own choice of a class is not followed.

    Args:
        folder: its folder.
        class_name: name of a class of transformers, such as `"BertTokenizerFast"`.
    """

    def __init__(self, folder: Path, class_name: str):
        self.folder, self.class_name = folder, class_name
        self._files, self._settings = validate_tokenizer_files(folder, class_name)

    def load(self) -> Any:
        """Load the tokenizer. ImportError if the package that reads its vocabulary is not installed."""
        import transformers

        needs_model = _TOKENIZER_FILE not in self._files and any(name.endswith(".model") for name in self._files)
        if needs_model and find_spec("sentencepiece") is None:
            raise ImportError(f"{self.folder} has no {_TOKENIZER_FILE}: pip install sentencepiece, to read its vocabulary")
        tokenizer_class: Any = getattr(transformers, self.class_name)
        # Without it, transformers guesses a class from the path, and warns: T5's where a temporary folder's name contains "t5".
        own = {"tokenizer_config.json": {"tokenizer_class": self.class_name}}
        with private_folder({**self._files, **own}) as copy, report_panics(self.folder):
            return tokenizer_class.from_pretrained(copy, local_files_only=True, trust_remote_code=False, **self._settings)


def load_tokenizer(folder: Path, class_name: str) -> Any:
    """Check and load a tokenizer; arguments as of `TokenizerFolder`."""
    return TokenizerFolder(folder, class_name).load()


def choose_class(folder: Path, *allowed: str) -> str:
    """Return which of the allowed classes a tokenizer's folder names; the first one if it names none of them.

    Names with and without `Fast`, and the new name of `PreTrainedTokenizerFast`, mean the same class. The classes of
    transformers 5 build a tokenizer of their own kind, whatever its tokenizer.json says; the general class follows the file.
    """
    if int((installed_version("transformers") or "0").split(".")[0]) >= 5 and (folder / _TOKENIZER_FILE).is_file():
        return "PreTrainedTokenizerFast"
    file = folder / "tokenizer_config.json"
    given = str(read_config(file).get("tokenizer_class")) if file.is_file() else ""
    given = {"TokenizersBackend": "PreTrainedTokenizerFast"}.get(given, given)
    return next((each for each in allowed if given.removesuffix("Fast") == each.removesuffix("Fast")), allowed[0])


def validate_tokenizer_files(folder: Path, class_name: str) -> tuple[dict[str, Path | dict[str, Any]], dict[str, Any]]:
    """Validate the files of a tokenizer; return those with its vocabulary by name, JSON as it was read, and the settings."""
    names = (_TOKENIZER_FILE, *_VOCABULARY_FILES.get(class_name.removesuffix("Fast"), ()))
    if not any((folder / name).is_file() for name in names):
        others = "".join(f", and so is {name}" for name in names[1:])
        raise ValueError(f"{folder / names[0]} is missing{others}; {INCOMPLETE}")
    found: dict[str, Path | dict[str, Any]] = {}
    for name in names:
        if (folder / name).is_file():
            for each in (name, *_MORE_FILES.get(name, ())):
                _validate_vocabulary(folder / each)
                found[each] = read_object(folder / each) if each.endswith(".json") else folder / each
    if (content := found.get(_TOKENIZER_FILE)) is not None:
        _validate_parts(content, folder / _TOKENIZER_FILE)
    return found, _read_settings(folder)


@contextmanager
def report_panics(folder: Any) -> Iterator[None]:
    """Report what the Rust code of a tokenizer raises, panics included, as a ValueError that names the folder."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ValueError(f"{folder} holds no tokenizer that can be used: {one_line(error)}") from error


def _validate_vocabulary(file: Path) -> None:
    try:
        with open_regular(file) as opened:
            head = opened.read(1024)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}; {INCOMPLETE}") from error
    if not head.strip():
        raise ValueError(f"{file} is empty and must hold a vocabulary; {INCOMPLETE}")
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{file} must have at most {_MAX_BYTES:,} bytes, and has {file.stat().st_size:,}")


# -- tokenizer.json -------------------------------------------------------------------------------------------------------


def _validate_parts(content: Any, file: Path) -> None:
    """Raise ValueError for a `tokenizer.json` with parts, ids or rules that are not allowed, or that cannot be parsed."""
    from tokenizers import Tokenizer

    growth, added = 1.0, 0
    for kind, allowed in _PARTS.items():
        for part in _walk_parts(content.get(kind), file, kind):
            if part.get("type") not in allowed.split():
                if kind == "model" and "type" not in part:  # files of early versions, whose parser finds the type itself
                    continue
                raise ValueError(f"{file} has a {kind} of type {short_repr(part.get('type'))}, which vargen does not load")
            growth *= _text_growth(part, file)
            added += _count_template_tokens(part, file)
    if growth > _MAX_GROWTH:
        raise ValueError(f"{file} has normalizers that can make a text {growth:g} times as long; {_MAX_GROWTH} is allowed")
    if added > _MAX_GROWTH:
        raise ValueError(f"{file} has templates that add {added} tokens to a text; {_MAX_GROWTH} is allowed")
    _validate_ids(content, file)
    _validate_padding(content, file)
    with report_panics(file):
        Tokenizer.from_str(json.dumps(content))


def _walk_parts(part: Any, file: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer, and the parts of a sequence."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ValueError(f"{file} is damaged: it must hold an object for {kind}, and holds {short_repr(part)}")
        yield part
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            parts = part.get(name) if part.get("type") == "Sequence" else None
            waiting += parts if isinstance(parts, list) else []


def _text_growth(part: Mapping[str, Any], file: Path) -> float:
    """Return how many times as long a text can become by a normalizer, for the longest allowed prompts."""
    kind, content = part.get("type"), part.get("content")
    pattern = part.get("pattern")
    text = next(iter(pattern.values()), "") if isinstance(pattern, dict) else ""
    if isinstance(text, str) and len(text) > _MAX_PATTERN:
        raise ValueError(f"{file} has a pattern of {len(text):,} characters; {_MAX_PATTERN:,} are allowed")
    if kind == "Replace":
        length = len(content) if isinstance(content, str) else 0
        if isinstance(pattern, dict) and "String" in pattern:
            return max(1.0, length / max(1, len(str(text))))
        return 1.0 + length  # a regular expression may match between any two characters
    if kind == "Prepend":
        return max(1.0, len(str(part.get("prepend"))) / 4)
    if kind == "Metaspace":
        return max(1.0, len(str(part.get("replacement"))))
    if kind == "Precompiled":
        return _longest_replacement(part, file) / 8  # the tables of T5 hold up to 54 bytes
    return 1.0


def _longest_replacement(part: Mapping[str, Any], file: Path) -> float:
    """Return the number of bytes of the longest text in a table of replacements, which follows a search tree of given size."""
    try:
        table = base64.b64decode(part["precompiled_charsmap"], validate=True)
        texts = table[4 + int.from_bytes(table[:4], "little") :]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has a damaged precompiled_charsmap: {one_line(error)}") from error
    return float(max(8, *(len(text) for text in texts.split(b"\0"))))


def _count_template_tokens(part: Mapping[str, Any], file: Path) -> int:
    """Return how many tokens a post-processor adds to a text."""
    if part.get("type") != "TemplateProcessing":
        return 0
    single, special = part.get("single"), part.get("special_tokens")
    if not isinstance(single, list) or not isinstance(special, dict):
        raise ValueError(f"{file} has a TemplateProcessing without a template and its tokens")
    ids = {name: len(each.get("ids") or ()) for name, each in special.items() if isinstance(each, dict)}
    named = [each.get("SpecialToken") for each in single if isinstance(each, dict)]
    sequences = sum("Sequence" in each for each in single if isinstance(each, dict))
    return sum(ids.get(each.get("id"), 1) for each in named if isinstance(each, dict)) + 64 * max(0, sequences - 1)


def _validate_ids(content: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for an id that no vocabulary has; the library would allocate a table up to it, or abort."""
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise ValueError(f"{file} is damaged: it must hold a model with a vocabulary, and holds {short_repr(model)}")
    if not isinstance(added, list) or len(added) > _MAX_ADDED:
        raise ValueError(f"{file} must hold a list of at most {_MAX_ADDED:,} added_tokens")
    if any(len(str(each.get("content"))) > _MAX_ADDED_TEXT for each in added if isinstance(each, dict)):
        raise ValueError(f"{file} has added_tokens of more than {_MAX_ADDED_TEXT:,} characters")
    if model.get("dropout"):
        raise ValueError(f"{file} has dropout: {short_repr(model['dropout'])}, which reads a prompt differently each time")
    vocab = model["vocab"]
    ids: list[Any] = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab)]
    ids += [each.get("id") if isinstance(each, dict) else None for each in added]
    for part in _walk_parts(content.get("post_processor"), file, "post_processor"):
        special = part.get("special_tokens")
        for each in special.values() if isinstance(special, dict) else ():
            found = each.get("ids") if isinstance(each, dict) else None
            ids += found if isinstance(found, list) else [None]
        ids += [part[name][1] for name in ("sep", "cls") if isinstance(part.get(name), list) and len(part[name]) == 2]
    for number in ids:
        if parse_int(number, 0, _MAX_ID) is None:
            raise ValueError(f"{file} has the token id {short_repr(number)}; ids are from 0 to {_MAX_ID}")


def _validate_padding(content: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for a stored padding that would make each text huge."""
    padding = content.get("padding")
    if padding is None:
        return
    strategy = padding.get("strategy") if isinstance(padding, dict) else None
    fixed = strategy.get("Fixed") if isinstance(strategy, dict) else 0
    multiple = padding.get("pad_to_multiple_of") if isinstance(padding, dict) else None
    for number in (fixed, multiple or 0):
        if parse_int(number, 0, 2**16) is None:
            raise ValueError(f"{file} has a padding of {short_repr(number)} tokens; {2**16} are allowed")


# -- settings -------------------------------------------------------------------------------------------------------------


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the listed settings of `special_tokens_map.json` and `tokenizer_config.json`; all others are left out."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            found |= _read_listed_settings(read_config(file), file)
    return found


def _read_listed_settings(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    for name in _TOKENS:
        if values.get(name) is not None:
            _validate_token(values[name], file, name)
    found: dict[str, Any] = {name: _make_tokens(values[name]) for name in _TOKENS if values.get(name) is not None}
    found |= pick_values(values, {name: bool for name in _FLAGS}, file)
    for name in _SIDES:
        if name in values:
            if values[name] not in ("left", "right"):
                raise ValueError(f"{file} has {name}: {short_repr(values[name])}, expected 'left' or 'right'")
            found[name] = values[name]
    for name, limit in (("model_max_length", None), ("extra_ids", _MAX_EXTRA_IDS)):
        if values.get(name) is not None:
            number = values[name]
            number = int(number) if isinstance(number, float) and number.is_integer() else number  # written as 1e+30
            if parse_int(number, 0, limit) is None:
                most = "" if limit is None else f" to {limit}"
                raise ValueError(f"{file} has {name}: {short_repr(values[name])}, expected a whole number from 0{most}")
            found[name] = number
    return found | _read_more_tokens(values, file)


def _read_more_tokens(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the lists and mappings of tokens among settings, in the form of the installed transformers."""
    found: dict[str, Any] = {}
    for name in ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"):
        given, is_decoder = values.get(name), name == "added_tokens_decoder"
        if given is None:
            continue
        if not isinstance(given, list | dict) or len(given) > _MAX_ADDED or (isinstance(given, list) and is_decoder):
            raise ValueError(f"{file} must hold tokens in {name}, and holds {short_repr(given)}")
        for each in given if isinstance(given, list) else given.values():
            _validate_token(each, file, name)
        for key in given if isinstance(given, dict) else ():
            fits = key.isascii() and key.isdecimal() and int(key[:10]) <= _MAX_ID if is_decoder else key.isidentifier()
            if not fits:
                raise ValueError(f"{file} has {short_repr(key)} in {name}, which names no token")
        found[name] = _make_tokens(given)
    # transformers 4 has names of further tokens in a mapping, and 5 beside the usual ones, with a list of those without a name.
    extra = found.pop("extra_special_tokens", {})
    unnamed = extra if isinstance(extra, list) else []
    named = {name: values[name] for name in _MODEL_TOKENS if isinstance(values.get(name), str)}
    named |= extra if isinstance(extra, dict) else {}
    if unnamed:
        found["additional_special_tokens"] = [*found.get("additional_special_tokens", []), *unnamed]
    if named:
        found["extra_special_tokens"] = named
    return found


def _make_tokens(value: Any) -> Any:
    """Return a validated token, or a list or mapping of them, as transformers takes them."""
    from tokenizers import AddedToken

    if isinstance(value, list):
        return [_make_tokens(each) for each in value]
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return AddedToken(**{name: each for name, each in value.items() if name != "__type"})
    if isinstance(value, dict):
        return {int(name) if name.isdecimal() else name: _make_tokens(each) for name, each in value.items()}
    return value


def _validate_token(value: Any, file: Path, name: str) -> None:
    """Raise ValueError unless it is a special token: text, or an object of text and flags."""
    if isinstance(value, dict):
        flags: Sequence[str] = ("single_word", "lstrip", "rstrip", "normalized", "special")
        text = value.get("content")
        known = {*value} <= {"content", "__type", *flags} and value.get("__type", "AddedToken") == "AddedToken"
        if known and all(isinstance(value.get(each, False), bool) for each in flags):
            validate_string(text, file, name)
            return
        raise ValueError(f"{file} has {name}: {short_repr(value)}, expected a token")
    validate_string(value, file, name)

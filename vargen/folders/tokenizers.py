"""Opening a tokenizer's folder: its data is checked, and transformers reads a private copy that holds nothing else.

The library `tokenizers` trusts its files: it allocates what an id asks for, expands text as often as rules say, and aborts or
panics where they are damaged. So parts of unknown types, ids beyond any vocabulary and rules that multiply text are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vargen.compat import installed_version, report_panics
from vargen.folders.json_files import (
    BOOL,
    INCOMPLETE,
    TEXT,
    Allowed,
    Kind,
    choice,
    expect,
    fill_folder,
    pick_values,
    read_config,
    read_data,
    read_object,
    whole,
)
from vargen.folders.tiktoken_files import find_tiktoken, read_tiktoken
from vargen.values import NumberRange, one_line, short_repr

# Files with the vocabulary of a tokenizer, any one of which suffices; the others by class name.
_TOKENIZER_FILE = "tokenizer.json"
_VOCABULARY_FILES = {
    "BertTokenizer": ("vocab.txt",), "T5Tokenizer": ("spiece.model",), "LlamaTokenizer": ("tokenizer.model",),
    "CLIPTokenizer": ("vocab.json",),
}  # fmt: skip
_MORE_FILES = {"vocab.json": ("merges.txt",)}
_MAX_BYTES = 2**26  # of a file
_UNUSABLE = "holds no tokenizer that can be used"

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
_ID = whole(0, 2**21)  # vocabularies have at most a few hundred thousand tokens
_MAX_ADDED, _MAX_ADDED_TEXT = 2**18, 1000  # added tokens, and characters of one
_MAX_GROWTH = 64  # characters of the normalized text per character of the prompt, and tokens that a template adds
_MAX_PATTERN = 10_000  # characters of a regular expression
_PADDING = whole(0, 2**16)  # tokens

_MODEL_TOKENS = "image_token boi_token eoi_token image_wrapper_token eof_token grid_bos_token grid_eos_token".split()
_TOKENS = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split() + _MODEL_TOKENS


def _is_token(value: Any) -> bool:
    """Whether it is a special token: text, or an object of text and flags."""
    if not isinstance(value, dict):
        return TEXT.fits(value)
    flags = "single_word lstrip rstrip normalized special".split()
    known = {*value} <= {"content", "__type", *flags} and value.get("__type", "AddedToken") == "AddedToken"
    return known and all(isinstance(value.get(each, False), bool) for each in flags) and TEXT.fits(value.get("content"))


_TOKEN = Kind(_is_token, "a token, which is text, or an object of text and flags")
_FLAGS = (
    "add_bos_token add_eos_token add_prefix_space clean_up_tokenization_spaces do_lower_case legacy split_special_tokens "
    "strip_accents tokenize_chinese_chars"
).split()
_SETTINGS: dict[str, Allowed] = {
    **dict.fromkeys(_TOKENS, _TOKEN),
    **dict.fromkeys(_FLAGS, BOOL),
    **dict.fromkeys(("padding_side", "truncation_side"), choice("left", "right")),
    "model_max_length": NumberRange(0, 2**100),
    "extra_ids": whole(0, 1000),
}


class TokenizerFolder:
    """A tokenizer of transformers in a folder, whose data was checked; the folder's own choice of a class is not followed.

    Args:
        folder: its folder.
        class_name: name of a class of transformers, such as `"BertTokenizerFast"`.
    """

    def __init__(self, folder: Path, class_name: str):
        self.folder, self.class_name = folder, class_name
        names = (_TOKENIZER_FILE, *_VOCABULARY_FILES.get(class_name.removesuffix("Fast"), ()))
        self._files: dict[str, Path | dict[str, Any]] = {}  # with the vocabulary, JSON as it was read
        parts = folder / _TOKENIZER_FILE  # or what stands in for it
        if class_name == "PreTrainedTokenizerFast" and not parts.is_file() and (tiktoken := find_tiktoken(folder)) is not None:
            self._files[_TOKENIZER_FILE], names, parts = read_tiktoken(tiktoken), (), tiktoken
        elif not any((folder / name).is_file() for name in names):
            others = "".join(f", and so is {name}" for name in names[1:])
            raise ValueError(f"{folder / names[0]} is missing{others}; {INCOMPLETE}")
        for name in [name for name in names if (folder / name).is_file()]:
            for file in (folder / each for each in (name, *_MORE_FILES.get(name, ()))):
                self._files[file.name] = read_object(file) if file.suffix == ".json" else file
                if file.suffix != ".json" and not read_data(file, _MAX_BYTES).strip():
                    raise ValueError(f"{file} is empty and must hold a vocabulary; {INCOMPLETE}")
        if (content := self._files.get(_TOKENIZER_FILE)) is not None:
            _validate_parts(content, parts)
        self._settings = _read_settings(folder)

    def load(self) -> Any:
        """Load the tokenizer. ImportError if the package that reads its vocabulary is not installed."""
        import transformers

        needs_model = _TOKENIZER_FILE not in self._files and any(name.endswith(".model") for name in self._files)
        if needs_model and find_spec("sentencepiece") is None:
            raise ImportError(f"{self.folder} has no {_TOKENIZER_FILE}: pip install sentencepiece, to read its vocabulary")
        tokenizer_class: Any = getattr(transformers, self.class_name)
        # Without it, transformers guesses a class from the path, and warns: T5's where a temporary folder's name contains "t5".
        own = {"tokenizer_config.json": {"tokenizer_class": self.class_name}}
        with tempfile.TemporaryDirectory(prefix="vargen-") as copy, report_panics(f"{self.folder} {_UNUSABLE}", Exception):
            fill_folder(Path(copy), {**self._files, **own})
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


# -- tokenizer.json -------------------------------------------------------------------------------------------------------


def _validate_parts(content: Any, file: Path) -> None:
    """Raise ValueError for a `tokenizer.json` with parts, ids or rules that are not allowed, or that cannot be parsed."""
    from tokenizers import Tokenizer

    growth, added = 1.0, 0
    try:
        for kind, allowed in _PARTS.items():
            for part in _walk_parts(content.get(kind)):
                # Files of early versions have models without a type, which the parser finds itself.
                fits = part.get("type") in allowed.split() or (kind == "model" and "type" not in part)
                expect(fits, f"a {kind} of type", part.get("type"), file, f"one of {allowed}")
                for pattern in (part.get("pattern") or {}).values():
                    expect(len(pattern) <= _MAX_PATTERN, "a pattern", pattern, file, f"{_MAX_PATTERN:,} characters at most")
                growth *= _text_growth(part)
                added += _count_template_tokens(part)
        _validate_ids(content, file)
        padding = content.get("padding") or {}
        fixed = padding["strategy"]["Fixed"] if isinstance(padding.get("strategy"), dict) else 0
    except (AttributeError, TypeError, LookupError, binascii.Error) as error:
        raise ValueError(f"{file} is damaged: {one_line(error)}") from error
    for tokens in (fixed, padding.get("pad_to_multiple_of") or 0):
        expect(_PADDING.fits(tokens), "padding", tokens, file, _PADDING.allowed)
    if growth > _MAX_GROWTH:
        raise ValueError(f"{file} has normalizers that can make a text {growth:g} times as long; {_MAX_GROWTH} is allowed")
    if added > _MAX_GROWTH:
        raise ValueError(f"{file} has templates that add {added} tokens to a text; {_MAX_GROWTH} is allowed")
    with report_panics(f"{file} {_UNUSABLE}", Exception):
        Tokenizer.from_str(json.dumps(content))


def _walk_parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer, and the parts of a sequence."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        yield part
        if part.get("type") == "Sequence":
            names = ("normalizers", "pretokenizers", "processors", "decoders")
            waiting += [each for name in names for each in part.get(name) or ()]


def _text_growth(part: Mapping[str, Any]) -> float:
    """Return how many times as long a text can become by a normalizer, for the longest allowed prompts."""
    kind = part.get("type")
    if kind == "Replace":
        length = len(part["content"])
        text = part["pattern"].get("String")
        # A regular expression may match between any two characters.
        return 1.0 + length if text is None else max(1.0, length / max(1, len(text)))
    if kind == "Prepend":
        return max(1.0, len(part["prepend"]) / 4)
    if kind == "Metaspace":
        return max(1.0, len(part["replacement"]))
    if kind == "Precompiled":  # a search tree of given size, then texts; the tables of T5 hold up to 54 bytes
        table = base64.b64decode(part["precompiled_charsmap"], validate=True)
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        return max(8, *(len(text) for text in texts.split(b"\0"))) / 8
    return 1.0


def _count_template_tokens(part: Mapping[str, Any]) -> int:
    """Return how many tokens a post-processor adds to a text."""
    if part.get("type") != "TemplateProcessing":
        return 0
    named = [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
    sequences = sum("Sequence" in piece for piece in part["single"])
    return sum(len(part["special_tokens"][name]["ids"]) for name in named) + 64 * max(0, sequences - 1)


def _validate_ids(content: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for an id that no vocabulary has; the library would allocate a table up to it, or abort."""
    model = content["model"]
    added = content.get("added_tokens") or []
    expect(len(added) <= _MAX_ADDED, "added_tokens", added, file, f"a list of at most {_MAX_ADDED:,}")
    fits = all(len(each["content"]) <= _MAX_ADDED_TEXT for each in added)
    expect(fits, "added_tokens", added, file, f"texts of at most {_MAX_ADDED_TEXT:,} characters")
    if model.get("dropout"):
        raise ValueError(f"{file} has dropout: {short_repr(model['dropout'])}, which reads a prompt differently each time")
    ids = list(model["vocab"].values()) if isinstance(model["vocab"], dict) else [len(model["vocab"])]
    ids += [each["id"] for each in added]
    for part in _walk_parts(content.get("post_processor")):
        ids += [number for each in (part.get("special_tokens") or {}).values() for number in each["ids"]]
        ids += [part[name][1] for name in ("sep", "cls") if part.get(name)]
    for each in ids:
        expect(_ID.fits(each), "the token id", each, file, _ID.allowed)


# -- settings -------------------------------------------------------------------------------------------------------------


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the listed settings of `special_tokens_map.json` and `tokenizer_config.json`; all others are left out."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        values = read_config(file) if file.is_file() else {}
        listed = pick_values(values, _SETTINGS, file)
        listed = {name: _make_tokens(value) if name in _TOKENS else value for name, value in listed.items()}
        if "model_max_length" in listed:
            listed["model_max_length"] = int(listed["model_max_length"])  # written as 1e+30
        found |= listed | _read_more_tokens(values, file)
    return found


def _read_more_tokens(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the lists and mappings of tokens among settings, in the form of the installed transformers."""
    found: dict[str, Any] = {}
    for name in ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"):
        given, is_decoder = values.get(name), name == "added_tokens_decoder"
        if given is None:
            continue
        fits = isinstance(given, dict) or (isinstance(given, list) and not is_decoder)
        expect(fits and len(given) <= _MAX_ADDED, name, given, file, f"at most {_MAX_ADDED} tokens")
        for each in given if isinstance(given, list) else given.values():
            expect(_is_token(each), name, each, file, _TOKEN.allowed)
        for key in given if isinstance(given, dict) else ():
            fits = key.isascii() and key.isdecimal() and _ID.fits(int(key[:10])) if is_decoder else key.isidentifier()
            expect(fits, name, key, file, "an id of a token" if is_decoder else "a name of a token")
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

"""Characters that stand for names, where a model was trained to know them; and words that a text encoder cannot read."""

import json
import logging

import pytest
import torch
from PIL import Image
from tiny_models import text_pipeline

from vargen import LlamaGenPipeline
from vargen.assets import packaged_model_path
from vargen.pipelines.prompts import PROMPT_NAMES_FILE, PromptNames, describe_unread_text

TABLE = PromptNames.load(packaged_model_path("emoji"))


def read(text: str) -> str:
    assert TABLE is not None
    return TABLE.apply(text).text


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("😺", "grinning cat"),
        ("🍎, 3d style", "red apple, 3d style"),
        ("a 😺 with a 🎩", "a grinning cat with a top hat"),
        ("😺🎩", "grinning cat, top hat"),
        ("😺  🎩", "grinning cat, top hat"),
        ("(😺)", "(grinning cat)"),
        ("3😺4", "3 grinning cat 4"),
        ("I ❤️ cats", "I red heart cats"),
        ("❤", "red heart"),
        ("❤\ufe0e", "red heart"),
        ("❤️\u200d🔥", "heart on fire"),  # joined
        ("👨\u200d👩\u200d👧", "family of man, woman, girl"),
        ("😺\u200d🍎", "grinning cat, red apple"),  # joined to nothing that is known
        ("👋🏾", "waving hand, medium-dark skin tone"),
        ("👩🏻\u200d🤝\u200d👨🏿 on a hill", "woman and man holding hands, light and dark skin tones on a hill"),
        ("👩🏽\u200d🤝\u200d👨🏽", "woman and man holding hands, medium skin tone"),
        ("🏿", "dark skin tone"),
        ("🇫🇷", "flag of france"),
        ("🇫🇷🇯🇵", "flag of france, flag of japan"),
        ("🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "flag of england"),
        ("1️⃣", "keycap 1"),
        ("1\u20e3 of 2", "keycap 1 of 2"),
        ("©️", "copyright"),
    ],
)
def test_emoji_are_read_as_the_captions_name_them(typed, expected):
    assert read(typed) == expected


@pytest.mark.parametrize("text", ["a cat", "café © 2 ™ #1 *", "1\ufe0f2", "собака", "a\u200db", "", " x ", "\u200d\ufe0f"])
def test_other_text_stays_as_it_was(text):
    assert read(text) == text


def test_what_was_read_is_reported_in_order():
    assert TABLE.apply("🎩 on 😺\u200d🍎 and 🎩").names == {"🎩": "top hat", "😺": "grinning cat", "🍎": "red apple"}


def test_names_survive_saving_and_are_the_models_own(tmp_path):
    pipe = text_pipeline()
    plain = pipe.encode_prompt("😺")[0]
    named = LlamaGenPipeline(**pipe.components, prompt_names={"😺": "grinning cat"})
    expected = pipe.encode_prompt("grinning cat")[0]
    assert torch.equal(named.encode_prompt("😺")[0], expected) and not torch.equal(plain, expected)
    assert LlamaGenPipeline.from_pipe(named).prompt_names.names == {"😺": "grinning cat"}
    named.save_pretrained(tmp_path / "model")
    again = LlamaGenPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float32)
    assert again.prompt_names.names == {"😺": "grinning cat"}
    assert torch.equal(again.encode_prompt("😺")[0], expected)
    assert LlamaGenPipeline.from_pretrained(tmp_path / "model", prompt_names=None).prompt_names is None
    pipe.save_pretrained(tmp_path / "model")  # over it, and without a table
    assert not (tmp_path / "model" / PROMPT_NAMES_FILE).exists()
    assert LlamaGenPipeline.from_pretrained(tmp_path / "model").prompt_names is None


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"😺": 1}', '{"😺": " "}', '{"cat": "dog"}', '{"": "x"}', "[" * 10**5, "\xff"],
    ids=lambda text: text[:12],
)
def test_a_damaged_table_is_named(tmp_path, text):
    (tmp_path / PROMPT_NAMES_FILE).write_text(text, encoding="latin-1" if text == "\xff" else "utf-8")
    with pytest.raises(ValueError, match="prompt_names"):
        PromptNames.load(tmp_path)


# -- scripts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "lost"),
    [
        ("a красная собака", "9 of the 12"), ("東京 tower", "2 of the 3"), ("a cat 😺", "1 of the 3"), ("a red apple", None),
        ("café, naïve señor; łódź – “über” cờ… ½ → 5€ α-helix π", None),
    ],
)  # fmt: skip
def test_tokens_of_other_scripts_are_counted(text_pipe, prompt, lost, caplog):
    with caplog.at_level(logging.WARNING, logger="vargen"):
        text_pipe.encode_prompt(prompt)
    if lost is None:
        assert not [record for record in caplog.records if "cannot read" in record.getMessage()]
    else:
        assert f"the text encoder cannot read {lost} tokens of the prompt: English" in caplog.text


def test_a_tokenizer_that_knows_a_script_gets_no_hint():
    class Knowing:
        unk_token_id = 0

        def __call__(self, word, **_):
            return {"input_ids": [1, 2]}

        def convert_ids_to_tokens(self, ids):
            return ["\u2581соба", "ка"]

        def num_special_tokens_to_add(self):
            return 0

    assert not describe_unread_text(Knowing(), "собака", 2)


def test_names_are_read_before_words_are_verified(text_pipe, caplog):
    named = LlamaGenPipeline(**text_pipe.components, prompt_names=TABLE)
    with caplog.at_level(logging.WARNING, logger="vargen"):
        named.encode_prompt("a 😺 and a 🍎")
    assert not caplog.records


def test_the_command_says_what_it_read_and_the_image_keeps_what_was_typed(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from vargen.cli.main import app

    pipe = text_pipeline()
    pipe.prompt_names = TABLE
    pipe.save_pretrained(tmp_path / "model")
    words = ["generate", "😺", "--negative-prompt", "🎩", "--seed", "1", "-o", str(tmp_path / "a.png")]
    done = CliRunner().invoke(app, [*words, "--model", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert 'read "😺" as "grinning cat", "🎩" as "top hat"' in done.stderr.splitlines()
    with Image.open(tmp_path / "a.png") as image:
        parameters = json.loads(image.info["vargen"])
    assert (parameters["prompt"], parameters["negative_prompt"]) == ("😺", "🎩")
    quiet = CliRunner().invoke(app, [*words, "--model", str(tmp_path / "model"), "--quiet"])
    assert quiet.exit_code == 0 and quiet.stderr == ""

"""What a command is to draw: prompts as arguments or in a file, or classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.cli.console import say
from vargen.files import expanded

if TYPE_CHECKING:
    from vargen.pipelines.description import Description


def say_names(pipe: Any, prompts: list[str]) -> None:
    """A line on stderr about the characters in prompts that the model reads as names, if there are any."""
    read = {typed: name for prompt in prompts for typed, name in pipe.read_prompt(prompt).names.items()}
    if read:
        say("read " + ", ".join(f'"{typed}" as "{name}"' for typed, name in read.items()))


def subjects_of(prompts: list[str] | None, prompt_file: Path | None, class_label: list[str] | None) -> list[str]:
    """Prompts, or class labels as typed."""
    from vargen.pipelines import checks

    if class_label:
        if prompts or prompt_file:
            raise ValueError("give prompts or --class-label, not both")
        return class_label
    listed = [*(prompts or []), *(read_prompts(prompt_file) if prompt_file else [])]
    if not listed:
        raise ValueError('give a prompt, for example: vargen generate "a red apple"')
    return checks.check_prompts(listed)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a UTF-8 text file, one a line.

    Raises:
        ValueError: if it is not UTF-8 or holds no prompt. FileNotFoundError, IsADirectoryError: as said.
    """
    path = expanded(path, "prompt_file")
    if not path.exists():
        raise FileNotFoundError(f"prompt_file {str(path)!r} does not exist")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt_file {str(path)!r} must be UTF-8 text: {error}") from error
    lines = [line.strip() for line in text.split("\n")]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"prompt_file {str(path)!r} holds no prompt; write one a line, without # in front")
    return found


def class_numbers(labels: list[str], model: Description) -> list[int]:
    from vargen.pipelines import checks

    # A number of thousands of digits is one that Python does not read; no class has one of more than nine.
    typed = [int(label) if label.strip().lstrip("-").isdecimal() and len(label) < 1000 else label for label in labels]
    return checks.check_class_labels(typed, model.num_classes, model.id2label)

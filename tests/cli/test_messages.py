"""What the command line says: advice that fits the error, the value as it was typed, nothing that commands a terminal."""

import errno
from pathlib import Path
from typing import Any

import pytest
import typer

from vargen.cli.console import printable
from vargen.cli.options import parse_integer
from vargen.evaluation.features import load_extractor
from vargen.evaluation.run_directory import describe_write_error


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)])
def test_room_is_advised_where_room_is_lacking(number: int, full: bool) -> None:
    assert ("make room" in str(describe_write_error("run.json", OSError(number, "reason")))) == full


@pytest.mark.parametrize("name", ["x", "inceptio", "./no-such-folder"])
def test_an_unknown_extractor_is_called_one(name: str) -> None:
    with pytest.raises(ValueError, match="extractor") as caught:
        load_extractor(name)
    assert name in str(caught.value) and "inception" in str(caught.value)


@pytest.mark.parametrize("text", ["0-7", "0_7", "1.0", "", "x", "7" * 50])
def test_a_seed_that_is_no_number_is_quoted_as_typed(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_integer(text)
    assert repr(text) in str(caught.value)


def test_seeds_are_read() -> None:
    assert [parse_integer(text) for text in ("0", "007", "-7", "+3")] == [0, 7, -7, 3]


def test_control_characters_of_a_name_reach_no_terminal() -> None:
    assert printable("a\x1b[31mred\x07.png") == "a\\x1b[31mred\\x07.png"
    assert printable("café 🍎\nnext line") == "café 🍎\nnext line"


def test_no_method_is_an_error_rather_than_the_default(run: Any) -> None:
    Path("prompts.txt").write_text("a cat\n")
    result = run("compare", "--prompt-file", "prompts.txt", "--methods", "")
    assert result.exit_code == 2 and "methods" in result.stderr

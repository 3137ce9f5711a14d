"""The command around the verbs: start-up, exit codes, logs."""

import json
import signal
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from waiting import wait_until

from vargen import __version__
from vargen.cli import generate, info
from vargen.cli.common import METHODS
from vargen.decoding import PRESETS

_RUN = "import sys; from vargen.cli.main import main\ntry:\n    main()\nfinally:\n    "


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["bench", "-h"], ["--version"], []])
def test_help_imports_no_torch(words: list[str]) -> None:
    code = _RUN + "print('torch' in sys.modules or 'rich' in sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert result.returncode == (0 if words else 2)
    assert result.stderr.split()[-1] == "False"
    assert "Usage: vargen" in result.stdout + result.stderr or result.stdout == f"vargen {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["generate"], ["generate", "x", "--top-p", "3"], ["generate", "x", "--accelerator", "gumble"]]
    + [[verb, "--model", "emojii"] for verb in ("generate x", "serve", "eval -o run", f"compare --prompt-file {__file__}")]
    + [["verify", "arr"], ["eval", "-o", "run", "--methods", "ar,gumble"], ["train", "drafter", "low-res"], ["bench", "--x"]],
    ids=" ".join,
)
def test_wrong_names_and_options_are_reported_without_torch(words: list[str]) -> None:
    words = [word for part in words for word in part.split()]
    if words[0] == "serve":
        pytest.importorskip("fastapi")
    code = _RUN + "print('torch' in sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.split()[-1] == "False" and result.stderr.startswith("error: ")


def test_the_names_of_methods_are_those_of_the_presets() -> None:
    assert sorted(METHODS) == sorted(PRESETS)


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(generate.inputs, "collect_prompts", fail)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("no   such\nthing"), 1, "error: ValueError: no such thing (VARGEN_DEBUG=1 shows the traceback)"),
        (FileNotFoundError("recipe 'x' is missing"), 2, "error: recipe 'x' is missing"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: [Errno 13] Permission denied: 'x'"),
        (OSError("disk full"), 1, "error: OSError: disk full (VARGEN_DEBUG=1 shows the traceback)"),
        (RuntimeError("NaN \x1b[2J"), 1, "error: RuntimeError: NaN \\x1b[2J (VARGEN_DEBUG=1 shows the traceback)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_line_and_a_code(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    """The ValueError here comes from this file, not from the library: a failure, not bad input."""
    raising(monkeypatch, error)
    result = run("generate", "a")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", line + "\n")


@pytest.mark.parametrize(
    "words",
    [["generate"], pytest.param(["eval", "--num-images", "999", "--batch-size", "1"], marks=pytest.mark.extended)],
    ids=["generate", "eval"],
)
def test_a_terminated_command_says_so(class_model: Path, tmp_path: Path, words: list[str]) -> None:
    """SIGTERM arrives while the first images are written; whole files remain, and it ends as by Ctrl-C."""
    output = tmp_path / "out"
    options = ["--class-label", "1", "-n", "999", "--batch-size", "1"] if words == ["generate"] else []
    words = [*words, *options, "--model", str(class_model), "-o", f"{output}/"]
    command = [sys.executable, "-c", "from vargen.cli.main import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        # Not `rglob`, which fails at a folder that vanishes while it is read.
        wait_until(lambda: glob("**/*.png", root_dir=output, recursive=True) or process.poll() is not None, 300)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.rstrip().splitlines()[-1] == "interrupted", said[-500:]
    for file in output.rglob("*.png"):
        with Image.open(file) as image:
            image.load()


def test_debug_shows_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_DEBUG", "1")
    raising(monkeypatch, RuntimeError("no"))
    result = run("generate", "a")
    assert result.exit_code == 1 and "Traceback" in result.stderr and result.stderr.endswith("error: RuntimeError: no\n")


def test_verbosity(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARGEN_VERBOSITY", "loud")
    result = run("info", "presets")
    assert result.exit_code == 2
    assert result.stderr == "error: VARGEN_VERBOSITY must be one of debug, info, warning, error, got 'loud'\n"
    monkeypatch.setenv("VARGEN_VERBOSITY", "ERROR")
    assert run("info", "presets").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize("words", [["--version"], ["info", "presets"]])
def test_what_does_not_reach_standard_output_is_no_success(words: list[str]) -> None:
    command = [sys.executable, "-c", _RUN + "pass", *words]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode != 0 and "No space left on device" in result.stderr


# -- vargen info -------------------------------------------------------------------------------------------------------


def test_info_as_json(run: Any) -> None:
    result = run("info", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    document = json.loads(result.stdout)
    parts = {"versions", "machine", "threads", "default_device", "default_dtype", "kernels", "graphs", "models", "presets"}
    parts |= {"cpu_instructions", "int8_passes"}
    assert set(document) == parts and document["kernels"].startswith(("reference: ", "triton: "))
    assert document["int8_passes"].startswith(("compiled: ", "operators: "))
    assert document["graphs"].startswith(("captured", "run one by one"))
    assert document["versions"]["vargen"] == __version__ and document["versions"]["torch"]
    assert {"cpu", "cores", "threads", "bfloat16_in_hardware", "gpus", "torch"} <= set(document["machine"])


def test_presets(run: Any) -> None:
    document = json.loads(run("info", "presets", "--json").stdout)
    assert [preset["name"] for preset in document] == list(PRESETS)
    assert all(
        set(preset) == {"name", "paradigm", "kind", "summary", "defaults", "source", "experimental"} for preset in document
    )
    core = run("info", "presets").stdout
    assert " gumbel " in core and " early-exit " not in core and "--all" in core
    printed = run("info", "presets", "--all").stdout
    assert max(map(len, printed.splitlines())) <= 100, "wider than the terminals that people have"
    words = " ".join(printed.split())
    for preset in document:
        assert f" {preset['name']} {preset['kind']} {preset['summary']} " in words and preset["source"] in words
        assert all(f"{name} " in words for name in preset["defaults"])
    assert all(f"models: {family}" in words for family in {preset["paradigm"] for preset in document})


def test_a_packaged_model_shows_its_size_and_card(
    run: Any, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import vargen.assets

    shutil.copytree(text_model, tmp_path / "assets" / "tiny")
    card = "---\nlicense: apache-2.0\n---\n# Tiny\n\n![picture](x.png)\n\nDraws noise, and\nlittle else. More.\n"
    (tmp_path / "assets" / "tiny" / "README.md").write_text(card)
    monkeypatch.setattr(vargen.assets, "_FOLDER", tmp_path / "assets")
    (model,) = json.loads(run("info", "--json").stdout)["models"]
    assert model["name"] == "tiny" and model["megabytes"] > 1 and model["summary"] == "Draws noise, and little else"
    assert "Draws noise, and little else" in run("info").stdout
    assert info.describe_folder("none", tmp_path)["summary"] == ""

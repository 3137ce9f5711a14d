"""Bad input of every command: exit code 2, one line that names the argument, no traceback, no file, no weight loaded."""

from __future__ import annotations

import io
import os
import re
import shutil
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vargen.cli import inputs
from vargen.pipelines.llamagen import LlamaGenPipeline


@pytest.fixture
def models(text_model: Path, class_model: Path, scale_model: Path, video_model: Path, tmp_path: Path) -> dict[str, str]:
    """Folders by the names that the tables use."""
    damaged = Path(shutil.copytree(text_model, tmp_path / "damaged"))
    weights = damaged / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    found = {"TEXT": text_model, "CLASS": class_model, "SCALE": scale_model, "VIDEO": video_model, "DAMAGED": damaged}
    return {name: str(folder) for name, folder in found.items()}


@pytest.fixture
def refused(run: Any, models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`refused(words, named)` runs a command in a folder of files, which it must leave as they are."""
    Path("prompts.txt").write_text("a cat\na dog\n")
    Path("none.txt").write_text("# nothing\n\n")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("prompts.json").write_text("a cat\n")
    Path("bad.toml").write_text("batch_sise = 3\n[model]\n")
    Path("text.png").write_text("no image")
    Path("taken-1.png").mkdir()
    Path("empty").mkdir()
    Path("images").mkdir()
    for name, size in (("cat.png", (8, 8)), ("large.png", (16, 8)), ("images/a.png", (16, 16))):
        Image.new("RGB", size).save(name)
    Path("link.json").symlink_to("prompts.json")
    os.mkfifo("pipe")

    def check(line: str | list[str], named: str) -> None:
        words = line.split() if isinstance(line, str) else line
        if words[0] not in ("bench", "train"):
            monkeypatch.setattr(LlamaGenPipeline, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
        before = {path: path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}
        result = run(*(models.get(word, word) for word in words))
        assert result.exit_code == 2 and result.stdout == "", result.output
        last = result.stderr.strip().splitlines()[-1]
        assert last.lower().startswith("error: ") and "Traceback" not in result.stderr, result.stderr
        assert named in last.replace("-", "_") or named in last, last
        assert len(last) < 400 and last.isprintable()
        assert not re.match(r"error: (\w*_|Invalid value)", last), "neither Python's name of an option nor pydantic's words"
        assert {path: path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")} == before

    return check


SAMPLING = [("--guidance-scale", value) for value in ("-1", "nan", "1e38")] + [("--temperature", "nan")]
SAMPLING += [("--top-k", value) for value in ("-1", "65", "ten")] + [("--top-p", "1.5")]
COMMANDS: dict[str, list[tuple[str, str]]] = {
    "generat": [("", "generat")],
    "generate a --model TEXT": [
        ("--accelerator gumbel:windw=8", "windw"), ("--accelerator gumbel:window=x", "window"), ("--seed -1", "seed"),
        (f"-n 2 --seed {2**63 - 1}", "seed"), ("-n 0", "num_images"), ("-n 5000", "1024"),
        ("--batch-size 0", "batch_size"), ("--threads 0", "threads"), ("--dtype int8", "dtype"),
        ("--device tpu", "device"), ("--class-label 1", "class_label"),
        ("--prompt-file none.txt", "prompt_file"), ("--prompt-file latin.txt", "prompt_file"),
        ("--prompt-file gone.txt", "prompt_file"), ("--prompt-file /dev/zero", "prompt_file"),
        ("--prompt-file pipe", "prompt_file"), ("-o a.gif", "output"), ("-o -", "output"),
        (f"-o {'x' * 220}.png", "output"), ("-o text.png/a.png", "output"), ("-n 2 -o taken.png", "output"),
        ("-o /proc/a.png", "output"), ("--contact-sheet a.exe", "contact_sheet"), ("-o ~nosuchuser/x.png", "output"),
        ("--seed 1 --contact-sheet a-1.png", "contact_sheet"), ("--model /no/such/folder", "model"),
        ("--model empty", "model"), ("--model DAMAGED", "damaged"), ("--image cat.png", "emoji-var"), ("--tau 1", "tau"),
        ("--num-blocks 2", "num_blocks"), ("--unknown-option", "unknown_option"), ("- -", "standard input"),
    ],
    "generate --model CLASS": [
        ("--class-label 10", "class label"), ("--class-label -1", "class label"),
        (f"--class-label {'9' * 5000}", "class name"), ("--class-label goldfisch", "goldfish"), ("a", "class_label"),
        ("--class-label 1 --negative-prompt x", "negative_prompt"), ("", "prompt"),
    ],
    "generate a --model SCALE": [
        ("--accelerator ar", "next_token"), ("--mask-image cat.png", "mask_image"), ("--strength 0.5", "strength"),
        ("--image cat.png --strength 1.5", "strength"), ("--image none.png", "image"), ("--image text.png", "image"),
        ("--image large.png", "image"), ("--image cat.png --mask-image large.png", "mask_image"),
        ("--image cat.png -o cat.png", "output"),
    ],
    "generate a --model VIDEO": [
        ("-o cat.png", "output"), ("--accelerator sjd", "next_token"), ("--tau nan", "tau"),
        ("--tau 1 --accelerator stride", "tau"), ("--num-blocks 0", "num_blocks"), ("--top-k 5", "top_k"),
        ("--contact-sheet a.png", "contact_sheet"), ("--image nowhere.png", "image"), ("--image-model nobody", "nobody"),
        ("--image-model emoji-video", "image_model"), ("--image-model emoji --image cat.png", "image_model"),
    ],
    "compare --prompt-file prompts.txt --model TEXT": [
        ("--methods sdj", "sdj"), (f"--batch-size {10**12}", "batch"),
        (f"--methods sjd --seed {2**63 - 1}", "seed"), ("-o x.txt", "output"), ("--model CLASS", "model"),
        ("--json a.txt", "json"), ("--model VIDEO --methods sjd", "next_token"),
    ],
    "compare --model TEXT --methods sjd": [
        ("--prompt-file prompts.json --json prompts.json", "json"),
        ("--prompt-file prompts.json --json link.json", "json"),
    ],
    "bench --model TEXT": [
        ("--tokens-per-pass 1,0", "tokens_per_pass"), ("--tokens-per-pass 17", "16"), ("--batch-size x", "batch_size"),
        ("--batch-size 9999", "batch_size"), ("--repeats 0", "repeats"),
    ],
    "eval -o out --model TEXT": [
        ("--shard 3/2", "shard"), (f"--num-images {10**15}", "num_images"), ("--batch-size 0", "batch_size"),
        ("--methods gsd:bugdet=2", "budget"), ("--classes 3", "classes"), ("--scorers clip:modell=x", "modell"),
        ("--extractor inception", "inception"), ("--extractor inceptio", "extractor"),
        ("--reference gone.npz", "extractor"), ("--resize 3", "resize"),
        ("--num-workers 2", "backend ray"), ("--model emojy", "emoji"),
        ("--generate-only --json a.json", "json"), ("--json out/run.json", "json"),
    ],
    "eval": [("", "output"), ("-o out --skip-unreadable", "skip_unreadable"), ("--images images --methods ar", "methods")],
    "eval --images": [
        ("gone", "gone"), ("empty", "no images"), ("images", "nothing to do"),
        ("images --export-samples s.npy", "export_samples"), ("images --scorers emoji-scorer", "prompt_file"),
        ("images --scorers none --extractor none --save-reference r.npz", "nothing to do"),
    ],
    "verify": [
        ("arr", "'ar'"), ("no_such_module:x", "method"), ("json:nothing", "method"), ("..:x", "method"),
        ("sjd:window=x", "window"), ("json:dumps", "method"),
    ],
    "check": [
        ("", "MODEL"), ("emojy", "emoji"), ("TEXT --minutes 0", "minutes"), ("TEXT -o prompts.txt", "output"),
        ("TEXT -o /proc/x", "output"), ("TEXT --prompt-file none.txt", "prompt_file"), ("DAMAGED", "damaged"),
        ("CLASS --prompt-file prompts.txt", "prompt_file"), ("TEXT --prompt-file pipe", "prompt_file"),
        ("TEXT --dtype int8", "dtype"),
    ],
    "serve --port 0": [
        ("--port 70000", "port"), ("--slots 0", "slots"), ("--max-waiting 0", "max_waiting"),
        ("--max-images 0", "max_images"), ("--timeout nan", "timeout"),
        ("--replicas 2", "replicas"),
        ("--accelerator gumbl", "accelerator"), ("--accelerator plain", "plain"),
        ("--guidance-scale -1", "guidance_scale"), ("--model emoji-video --guidance-scale 2", "guidance_scale"),
        ("--model no-such-model", "no_such_model"),
    ],
    "train drafter": [
        ("eagle --recipe nothing", "nothing"), ("eagle --recipe bad.toml", "batch_sise"),
        ("eagle", "prompts"), ("eagle --steps 0", "steps"),
        ("eagle --num-images 1", "num_images"), ("eagle --device tpu", "device"),
        ("eagle --model emoji-video", "emoji_video"), ("low-res", "data"), ("low-res --data empty", "images.npy"),
        ("upsampler --data empty --model empty", "empty"), ("upsampler --data empty --model emoji-var", "emoji_var"),
    ],
    "convert llamagen --vq text.png -o out": [
        ("--transformer a.pt", "a.pt"), ("--transformer text.png", "text.png"), ("", "transformer"),
        ("--transformer empty", "transformer"), ("--transformer text.png --id2label empty", "id2label"),
    ],
    "regenerate": [("gone.png", "gone.png"), ("cat.png", "vargen parameters")],
}  # fmt: skip
COMMANDS["generate a --model TEXT"] += [(" ".join(pair), pair[0][2:].replace("-", "_")) for pair in SAMPLING]


@pytest.mark.parametrize(
    ("words", "named"), [(f"{command} {words}", named) for command, rows in COMMANDS.items() for words, named in rows]
)  # fmt: skip
def test_bad_input_is_named(refused: Any, words: str, named: str) -> None:
    if words.startswith("serve"):
        pytest.importorskip("fastapi")
    refused(words, named)


@pytest.mark.parametrize(("words", "named"), [
    ([""], "prompt[0]"), (["a cat", " \n"], "prompt[1]"), (["\u200b"], "prompt[0]"), (["caf\udce9"], "prompt[0]"),
    ([], "prompt"), (["a", "--negative-prompt", " "], "negative_prompt"), (["a", "-o", ""], "output"),
    (["a", "-o", "a\0b.png"], "output"),
    (["a", "--contact-sheet", ""], "contact_sheet"),
])  # fmt: skip
def test_prompts_and_names_that_are_none(refused: Any, words: list[str], named: str) -> None:
    refused(["generate", "--model", "TEXT", *words], named)


@pytest.mark.parametrize(("words", "data", "named"), [
    (("-",), b"", "prompt"), (("-",), b"\xff\xfe", "UTF-8"), (("--prompt-file", "-"), b"x" * 200, "prompt_file"),
    (("a cat", "-n", "1024", "--prompt-file", "-"), b"a\n" * 50, "number of images"),
])  # fmt: skip
def test_standard_input(refused: Any, words: Any, data: bytes, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MAX_BYTES", 150)
    monkeypatch.setattr("vargen.cli.generate.MAX_IMAGES", 2000)
    monkeypatch.setattr("vargen.reading.sys", type("sys", (), {"stdin": io.TextIOWrapper(io.BytesIO(data))}))
    refused(["generate", *words, "--model", "TEXT"], named)


def test_an_output_that_is_a_file_of_the_model(refused: Any, text_model: Path) -> None:
    index = text_model / "model_index.json"
    before = index.read_bytes()
    for command in ("compare --prompt-file prompts.txt --methods sjd", "bench"):
        refused([*command.split(), "--model", "TEXT", "--json", str(index)], "json")
    assert index.read_bytes() == before


@pytest.mark.parametrize(("words", "package", "extra"), [
    (("generate", "a cat", "--model", "VIDEO", "-o", "a.mp4", "-q"), "av", "video"),
    (("eval", "--model", "TEXT", "-o", "out", "--scorers", "clip:model=ViT-B-32"), "vargen.scoring.clip", "eval"),
    (("eval", "--generate-only", "--model", "TEXT", "-o", "out", "--backend", "ray"), "vargen.eval.ray", "ray"),
])  # fmt: skip
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    words: Any, package: str, extra: str, run: Any, models: dict[str, str], repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "av":
        monkeypatch.setitem(sys.modules, package, None)
    else:
        monkeypatch.setattr(f"{package}.installed_version", lambda name: None)
    done = run(*(models.get(word, word) for word in words), "--threads", 1)
    (line,) = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and not list(Path().iterdir())
    assert line.startswith("error: ") and "ImportError" not in line and "VARGEN_DEBUG" not in line, line
    asked = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    command = re.search(r'pip install "([^"]+)"', line)
    assert command and command[1] in asked, line


def test_an_address_that_cannot_be_used_is_named(run: Any) -> None:
    pytest.importorskip("fastapi")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", port)
    assert result.exit_code == 2 and f"error: --port {port} of host '127.0.0.1' is taken" in result.stderr
    result = run("serve", "--host", "192.0.2.1", "--port", "0")  # of no machine
    assert result.exit_code == 2 and "192.0.2.1" in result.stderr and "Traceback" not in result.stderr


def test_a_key_that_no_header_can_hold_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.setenv("VARGEN_API_KEY", "two words")
    result = run("serve")
    assert result.exit_code == 2 and "VARGEN_API_KEY" in result.stderr and "two words" not in result.stderr

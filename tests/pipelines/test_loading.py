"""Opening a model by name, from the hub, in a dtype, on a device; what a pipeline says of itself; memory that runs out."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline

from vargen import LlamaGenPipeline, device, open_pipeline
from vargen.assets import packaged_model_path
from vargen.folders.tokenizers import load_tokenizer
from vargen.pipelines import loading


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    class_pipeline().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("emojy", "did you mean 'emoji'"), ("./nowhere", "unknown model"), ("/nowhere/at/all", "unknown model"),
        ("a" * 5000, "unknown model"), ("owner/" + "a" * 5000, "unknown model"), ("a/b/" * 1250, "unknown model"),
        ("x\0y", "model"), ("some-owner/some-model", "fetching"), ("some-owner/some-model@v2", "fetching"),
        ("https://huggingface.co/FoundationVision/var/tree/main", "vargen convert var --transformer var_d16.pth"),
        ("hf://deepseek-ai/Janus-Pro-7B", "deepseek-community/Janus-Pro-7B"),
        ("BAAI/Emu3.5-Image", "copy them into the folder"), ("c2i_B_256.pt", "vargen convert llamagen"),
    ],
)  # fmt: skip
def test_unknown_names(name, said):
    rejects(lambda: LlamaGenPipeline.from_pretrained(name), said, ValueError)


OPEN_TWICE = """
from vargen import LlamaGenPipeline
for options in ({}, {"local_files_only": True}):
    pipe = LlamaGenPipeline.from_pretrained("owner/name", revision="v2", **options)
    print(pipe(class_labels=3, temperature=0, output_type="latent").images.flatten().tolist(), flush=True)
    if not options:
        input()
"""


def test_a_hub_model_is_fetched_once_and_then_opens_offline(saved, tmp_path):
    """The real hub client against a server that speaks the hub's protocol; its address is read at import, hence a process."""
    hub = tmp_path / "hub"
    shutil.copytree(saved, hub)
    (hub / "transformer" / "trojan.py").write_text("raise SystemExit('ran')")
    asked: list[str] = []
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    with ThreadingHTTPServer(("127.0.0.1", 0), hub_server(hub, "v2", asked)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        process = subprocess.Popen(
            [sys.executable, "-c", OPEN_TWICE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**environment, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"},
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        first = process.stdout.readline()
        server.shutdown()
    second, complaints = process.communicate("\n", timeout=120)
    assert process.returncode == 0, complaints
    assert [path for path in asked if "transformer/diffusion_pytorch_model" in path]
    assert not [path for path in asked if "trojan" in path]
    local = LlamaGenPipeline.from_pretrained(saved)(class_labels=3, temperature=0, output_type="latent").images
    assert first == second == f"{local.flatten().tolist()}\n"


def hub_server(folder: Path, revision: str, asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """What the hub answers about the one model that it has: its files, and each of them."""
    commit = "5" * 40
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self, body: bool = True) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/owner/name/resolve/{commit}/")
            if path == f"/api/models/owner/name/revision/{revision}":
                siblings = [{"rfilename": file} for file in files]
                data = json.dumps({"id": "owner/name", "sha": commit, "siblings": siblings}).encode()
            elif path == f"/api/models/owner/name/tree/{commit}":  # what newer clients ask for
                sizes = {file: (folder / file).stat().st_size for file in files}
                tree = [{"type": "file", "path": file, "size": size, "oid": commit} for file, size in sizes.items()]
                data = json.dumps(tree).encode()
            elif name in files:
                data = (folder / name).read_bytes()
            else:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def log_message(self, *words: object) -> None:
            pass

    return Hub


def test_default_dtypes(saved, monkeypatch):
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert LlamaGenPipeline.from_pretrained(saved).transformer.dtype == torch.float32  # small: a seed is a picture
    monkeypatch.setattr(loading, "SMALL_NETWORK", 1000)
    pipe = LlamaGenPipeline.from_pretrained(saved)
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vqvae.dtype == torch.float32
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: False)
    assert LlamaGenPipeline.from_pretrained(saved).transformer.dtype == torch.float32
    assert LlamaGenPipeline.from_pretrained(saved, torch_dtype=torch.bfloat16).transformer.dtype == torch.bfloat16
    for wrong in (torch.int8, "half", {"transformer": torch.int8}):
        with pytest.raises(ValueError, match="dtype"):
            LlamaGenPipeline.from_pretrained(saved, torch_dtype=wrong)


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_a_dtype_goes_by_its_old_and_its_new_name(saved, name, monkeypatch):
    monkeypatch.setattr(loading, "preferred_dtype", lambda *_: torch.float32)
    pipe = LlamaGenPipeline.from_pretrained(saved, **{name: torch.float16})
    assert (pipe.transformer.dtype, pipe.vqvae.dtype) == (torch.float16, torch.float32)
    pipe = LlamaGenPipeline.from_pretrained(saved, **{name: {"vqvae": torch.float16}})
    assert (pipe.transformer.dtype, pipe.vqvae.dtype) == (torch.float32, torch.float16)
    pipe = LlamaGenPipeline.from_pretrained(saved, **{name: {"default": torch.bfloat16}})
    assert (pipe.transformer.dtype, pipe.vqvae.dtype) == (torch.bfloat16, torch.bfloat16)
    rejects(lambda: LlamaGenPipeline.from_pretrained(saved, dtype=torch.float16, torch_dtype=torch.float16), "torch_dtype")


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("sizes", [("20KB", "10GB"), ("10GB", "20KB"), ("10KB", "20KB")])
def test_saving_over_shards_leaves_none_after(tmp_path, sizes, variant):
    """One file beside the shards of older weights: libraries differ in which they open."""
    for number, size in enumerate(sizes):
        pipe = class_pipeline()
        torch.nn.init.constant_(pipe.transformer.output.weight, number + 1.0)
        pipe.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
        (tmp_path / "transformer" / "notes.txt").write_text("mine")
        opened = LlamaGenPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32, variant=variant)
        assert (opened.transformer.output.weight == number + 1).all()
    sharded = [bool(list((tmp_path / "transformer").glob(kind))) for kind in ("*-of-*.safetensors", "*.index*.json")]
    assert sharded == [sizes[1] != "10GB"] * 2
    assert (tmp_path / "transformer" / "notes.txt").read_text() == "mine"
    pipe.save_pretrained(tmp_path, variant="other")  # another variant stays beside this one
    opened = LlamaGenPipeline.from_pretrained(tmp_path, torch_dtype=torch.float32, variant=variant)
    assert (opened.transformer.output.weight == 2).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of text with two styles, the number of entries that a component's place in an index has, too."""
    pipe = text_pipeline()
    folder = tmp_path_factory.mktemp("saved") / "text"
    LlamaGenPipeline(**pipe.components, prompt_styles=["3d", "flat"], defaults={"top_k": 7}).save_pretrained(folder)
    return folder


def test_a_device_may_be_named_at_opening(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("cpu", torch.device("cpu"), "auto" if not torch.cuda.is_available() else "cpu"):
        pipe = open_pipeline(folder, device=place)
        assert pipe.device.type == "cpu" and pipe.transformer.dtype == torch.float32
    pipe = open_pipeline(folder, device="meta")
    assert pipe.device.type == "meta" and pipe.transformer.dtype == torch.bfloat16, "that device's fastest"
    assert open_pipeline(folder, device="meta", torch_dtype=torch.float64).transformer.dtype == torch.float64
    monkeypatch.setattr(loading, "locate_folder", None)  # nothing is looked at before
    for wrong in ("gpu", "cuda:999", 3.5):
        with pytest.raises(ValueError, match="device"):
            open_pipeline(folder, device=wrong)


@pytest.mark.parametrize("name", ["num_images", "tranformer", "eagle_drafter"])
def test_an_unknown_argument_of_opening_is_named(folder: Path, name: str) -> None:
    for name_of_model in (folder, "emoji", "nobody/nothing"):
        with pytest.raises(TypeError, match=f"^{name} is no argument"):
            open_pipeline(name_of_model, **{name: 1})
    with pytest.raises(TypeError, match=f"^{name} is no argument"):
        LlamaGenPipeline.from_pretrained(folder, **{name: 1})
    with pytest.raises(TypeError, match=r"^eagle is no argument"):  # of this family
        open_pipeline("emoji-var", eagle=None)
    rejects(lambda: LlamaGenPipeline.from_pretrained(folder, device="cpu"), "device", TypeError)


SCRIPT = """
import sys
sys.modules["accelerate"] = sys.modules["peft"] = None  # which needs it
import diffusers, transformers
import vargen.pipelines.llamagen
from vargen.pipelines.loading import open_pipeline
assert open_pipeline(sys.argv[1]).transformer is not None
print("opened", flush=True)
print("opened", file=sys.stderr, flush=True)
"""


def test_the_name_of_a_temporary_folder_chooses_no_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers guesses the class of a tokenizer from its path where its settings name none, and warns."""
    (tmp_path / "t5").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t5"))
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", lambda *words: pytest.fail(str(words)))
    tokenizer = load_tokenizer(packaged_model_path("emoji") / "tokenizer", "BertTokenizerFast")
    assert tokenizer("a red apple").input_ids


@pytest.mark.extended
def test_a_process_loads_in_silence(tmp_path: Path) -> None:
    """Also without accelerate there is no notice of a package that is not needed."""
    text_pipeline().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("opened\n", "opened\n")

"""Opening a model by name: packaged, from the hub, a variant, in a dtype, of an earlier version; saving over another."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline

from vargen import LlamaGenPipeline, device, open_pipeline
from vargen.pipelines import loading

WEIGHTS = "diffusion_pytorch_model.safetensors"


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
        ("x\0y", "model"), ("some-owner/some-model", "fetching"),
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


def test_a_variant_is_opened_by_its_name(tmp_path):
    class_pipeline().to(torch.float16).save_pretrained(tmp_path / "model", variant="fp16")
    pipe = LlamaGenPipeline.from_pretrained(tmp_path / "model", variant="fp16", torch_dtype=torch.float32)
    assert torch.equal(pipe.transformer.norm.weight, class_pipeline().transformer.norm.weight.half().float())
    rejects(lambda: LlamaGenPipeline.from_pretrained(tmp_path / "model"), f"{WEIGHTS} is missing")


def test_default_dtypes(saved, monkeypatch):
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert LlamaGenPipeline.from_pretrained(saved).transformer.dtype == torch.float32  # small: a seed is a picture
    monkeypatch.setattr(loading, "_SMALL_NETWORK", 1000)
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


def test_opening_a_model_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No bar for a second's work; in a process of its own: test_loading_memory.py."""
    class_pipeline().save_pretrained(tmp_path / "model")
    assert capfd.readouterr() is not None and open_pipeline(tmp_path / "model").transformer is not None
    assert capfd.readouterr() == ("", "")

"""Opening, saving and running pipelines with 8-bit integer products: bad input, bit-equal folders, exactness, equal images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_passes import compiled_passes
from rejects import rejects
from tiny_models import class_pipeline, class_var_pipeline, infinity_pipeline, text_pipeline
from torch import Tensor

from vargen import LlamaGenPipeline, open_pipeline
from vargen.kernels import dispatch
from vargen.kernels.int8 import load as cpu_code
from vargen.models.quantization import linear_layers, quantize_network, quantize_weights_on_gpu, validate_quantization
from vargen.pipelines.default_format import default_quantization
from vargen.pipelines.regeneration import describe_environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 pipeline whose weights are stored as int8."""
    path = tmp_path_factory.mktemp("model")
    pipe = text_pipeline(grid_size=6)
    pipe.transformer.register_to_config(weight_format="int8")
    pipe.save_pretrained(path)
    return path


def open_int8(folder: Path) -> LlamaGenPipeline:
    pipe = open_pipeline(folder, quantization="int8")
    assert isinstance(pipe, LlamaGenPipeline)
    return pipe


def test_a_quantized_folder_saved_and_loaded_again_is_bit_equal(folder: Path, tmp_path: Path) -> None:
    pipe = open_int8(folder)
    assert pipe.transformer.layers[0].attention.wqkv.weight.dtype == torch.int8
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "transformer/config.json").read_text())["quantization"] == "int8"
    for again in (open_pipeline(tmp_path), open_pipeline(tmp_path, device="cpu", quantization="int8")):
        states = pipe.transformer.state_dict(), again.transformer.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    sizes = [(place / "transformer/diffusion_pytorch_model.safetensors").stat().st_size for place in (folder, tmp_path)]
    assert sizes[1] < 1.1 * sizes[0]


def test_weights_stored_in_8_bits_compute_in_8_bits_by_default(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_passes()
    other = tmp_path / "float"
    class_pipeline().save_pretrained(other)

    def opened(place: Path = folder, **options: Any) -> Any:
        return open_pipeline(place, **options).transformer.config.quantization

    assert opened() == opened(device="cpu") == "int8"
    assert opened(other) is None
    for options in ({"quantization": None}, {"torch_dtype": torch.float32}, {"dtype": torch.bfloat16, "device": "cpu"}):
        assert opened(**options) is None, options
    with monkeypatch.context() as patch:  # it may be moved to a GPU later
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert opened() is None and opened(device="cpu") == "int8"
    monkeypatch.setenv("VARGEN_KERNELS", "reference")  # compiled passes cannot run
    assert opened() is None and default_quantization(folder) is None


def test_a_network_quantized_in_memory_is_the_one_that_is_opened_from_floats(tmp_path: Path) -> None:
    pipe = class_pipeline()
    pipe.save_pretrained(tmp_path)
    opened = open_pipeline(tmp_path, quantization="int8").transformer.state_dict()
    quantized = quantize_network(pipe.transformer).state_dict()
    assert all(torch.equal(value, opened[name]) for name, value in quantized.items())


def test_what_cannot_be_quantized_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    rejects(lambda: open_pipeline(folder, quantization="int4"), "quantization must be 'int8', 'float8' or None, got 'int4'")
    rejects(lambda: open_pipeline(folder, quantization="float8"), "runs on NVIDIA GPUs, with device='cuda', got device 'cpu'")
    rejects(lambda: validate_quantization("int8", torch.device("mps")), "runs on CPUs and NVIDIA GPUs, got device 'mps'")
    rejects(lambda: open_pipeline(folder, quantization="int8", torch_dtype=torch.bfloat16), "dtype must be float32")
    rejects(lambda: open_pipeline(folder, quantization_config=object()), "quantization_config", TypeError)
    broken = class_pipeline()
    torch.nn.init.constant_(broken.transformer.layers[1].feed_forward.w2.weight, float("nan"))
    rejects(lambda: quantize_network(broken.transformer), "layers.1.feed_forward.w2.weight holds values that are not finite")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_methods_and_batches_generate_the_same_image(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "cpu":
        compiled_passes()
    monkeypatch.setenv("VARGEN_KERNELS", backend)
    pipe, prompts = open_int8(folder), ["a cat", "a red apple", "a small blue house with a tree"]

    def tokens(method: str, rows: list[int], batch_size: int | None = None) -> Tensor:
        generators = [torch.Generator().manual_seed(row) for row in rows]
        call = {"accelerator": method, "generator": generators, "output_type": "latent", "batch_size": batch_size}
        return pipe([prompts[row] for row in rows], **call).images

    expected = torch.cat([tokens("ar", [row]) for row in range(3)])
    for method, rows in (("gumbel:window=5", [0, 1, 2]), ("gumbel:window=2", [2, 0]), ("ar", [1, 2])):
        assert torch.equal(tokens(method, rows), expected[rows]), method
    assert torch.equal(tokens("gumbel:window=5", [0, 1, 2], 2), expected), "an image joins a running batch"


def test_without_numba_operators_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_code, "find_spec", lambda name: None)
    monkeypatch.setattr(cpu_code, "cpu_instructions", lambda: ("AVX2",))
    assert cpu_code.TOKEN_PASS.load() is None
    name, reason = cpu_code.explain_int8_passes()
    assert name == "operators" and "Numba is not installed" in reason and "float32 may be faster" in reason
    monkeypatch.setattr(cpu_code, "cpu_instructions", lambda: ("AVX-512 VNNI",))
    assert cpu_code.explain_int8_passes() == ("operators", "Numba is not installed: pip install numba")
    monkeypatch.setenv("VARGEN_KERNELS", "cpu")
    with pytest.raises(ValueError, match="VARGEN_KERNELS=cpu needs compiled int8 passes: Numba is not installed"):
        cpu_code.TOKEN_PASS.load()


def test_operators_serve_while_the_compiled_passes_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_code, "find_compiled_blocker", lambda: None)
    code, finish, started = cpu_code.CompiledCode("int8 passes", "run_token_pass"), threading.Event(), []

    def fail(command: list[str], **options: object) -> Any:
        started.append(command[5:])
        finish.wait()
        return subprocess.CompletedProcess(command, 1, stderr=b"Traceback\nValueError: no code\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert code.load(wait=False) is code.load(wait=False) is code.failure is None
    finish.set()
    assert code.load() is None and started == [["run_token_pass"]], "compiled once"
    assert code.failure == "compiling them failed (ValueError: no code)"


def test_where_no_folder_can_be_written_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", __file__)
    monkeypatch.setattr(cpu_code, "find_compiled_blocker", lambda: None)
    monkeypatch.setattr(cpu_code, "load_modules", lambda names, folder: [folder is None, None])
    assert cpu_code.CompiledCode("int8 passes", "run_token_pass").load() is True


@pytest.mark.extended
def test_code_is_built_before_torch_is_there(folder: Path, tmp_path: Path) -> None:
    """`vargen generate` starts the compiler, and imports torch beside it."""
    compiled_passes()
    program = (
        "import sys; from pathlib import Path; from vargen.pipelines.default_format import start_compiling\n"
        "from vargen.kernels.int8.load import TOKEN_PASS\n"
        "start_compiling(Path(sys.argv[1])); assert TOKEN_PASS._thread and 'torch' not in sys.modules\n"
        "TOKEN_PASS._thread.join(); assert TOKEN_PASS.is_built()"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True, timeout=300)


@pytest.mark.parametrize("changed", ["cpu_instructions", "instruction_set"])
def test_another_cpu_has_code_of_its_own(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder on a network, or a machine image, meets other CPUs."""
    before = cpu_code._code_folder()
    monkeypatch.setattr(cpu_code, changed, lambda: ("AVX2",) if changed == "cpu_instructions" else "another")
    assert cpu_code._code_folder() != before


def test_a_change_of_any_source_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [shutil.copy(each, tmp_path) for each in Path(cpu_code.__file__).parent.glob("*.py")]
    monkeypatch.setattr(cpu_code, "__file__", str(tmp_path / "load.py"))
    folders = {cpu_code._code_folder()} | {Path(each).write_text("") or cpu_code._code_folder() for each in sources}
    assert len(folders) == len(sources) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_network_without_formats_says_so(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infinity_pipeline().save_pretrained(tmp_path)
    monkeypatch.setattr("vargen.pipelines.loading.select_device", torch.device)
    monkeypatch.setattr("vargen.pipelines.loading.validate_quantization", lambda *_: None)
    said = "quantization='int8' is not supported by InfinityTransformer"
    rejects(lambda: open_pipeline(tmp_path, device=device, quantization="int8"), said)


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.02), ("float8", 0.1)])
@pytest.mark.parametrize("make", [class_pipeline, class_var_pipeline])
def test_formats_of_a_gpu_store_weights_and_compile_blocks(
    make: Callable[[], Any], quantization: str, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install vargen[quantization]")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compile_module(module, backend="eager", **options)
    )
    monkeypatch.setattr(dispatch, "EAGER_CPU", False)  # takes the passes of a GPU
    pipe = make()
    network, plain = pipe.transformer, deepcopy(pipe.transformer)
    quantize_weights_on_gpu(network, quantization)
    for name, layer in linear_layers(plain).items():
        found = network.get_submodule(name).weight
        assert found.qdata.element_size() == 1, name
        assert (found.dequantize() - layer.weight).abs().max() < error * layer.weight.abs().max(), name
    generator = torch.Generator().manual_seed(1)
    result = pipe(class_labels=3, accelerator=pipe.baseline, generator=generator)
    assert result.images[0].info is not None and describe_environment(pipe)["quantization"] == quantization
    rejects(lambda: pipe.save_pretrained(tmp_path), f"weights in {quantization} on a GPU is not saved")

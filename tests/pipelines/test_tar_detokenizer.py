"""AR-DTok, which makes images of Tar's tokens: files with the official names, features, and the tokens of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding_checks import run_or_refuse
from torch import Tensor

import vargen
from vargen.convert import llamagen
from vargen.convert.llamagen import convert_llamagen
from vargen.convert.ta_tok import convert_ta_tok
from vargen.decoding import list_methods
from vargen.models.tokenizers.vq import VQModel

SIDE, ROWS = 4, 9  # of the image's grid; condition rows, a square
WIDTH, DEPTH, HEADS, CODES, DIM = 32, 3, 2, 40, 24
SEMANTIC, HIDDEN = 50, 20  # tokens of Tar; width of their codes


def random_state(**shapes: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def transformer() -> dict[str, Tensor]:
    """Tensors of an AR-DTok by their official names."""
    shapes: dict[str, Any] = {
        "clip_proj.weight": (WIDTH, DIM), "clip_proj.bias": (WIDTH,), "tok_embeddings.weight": (CODES, WIDTH),
        "norm.weight": (WIDTH,), "output.weight": (CODES, WIDTH), "abs_pe": (1, ROWS + SIDE**2 - 1, WIDTH),
    }  # fmt: skip
    for number in range(DEPTH):
        name = f"layers.{number}"
        shapes |= {f"{name}.attention.wqkv.weight": (3 * WIDTH, WIDTH), f"{name}.attention.wo.weight": (WIDTH, WIDTH)}
        shapes |= {f"{name}.feed_forward.{each}.weight": (256, WIDTH) for each in ("w1", "w3")}
        shapes |= {f"{name}.feed_forward.w2.weight": (WIDTH, 256)}
        shapes |= {f"{name}.{each}.weight": (WIDTH,) for each in ("attention_norm", "ffn_norm")}
    return random_state(**shapes)


def make_ta_tok(normalized: bool = True) -> tuple[dict[str, Any], Any]:
    """An official file of TA-Tok, and its decoder in transformers' own classes."""
    siglip2 = pytest.importorskip("transformers.models.siglip2")
    torch.manual_seed(1)
    config = siglip2.Siglip2VisionConfig()
    config.update({"patch_size": 1, "num_hidden_layers": 2, "num_channels": HIDDEN, "hidden_size": DIM})
    config.update({"intermediate_size": 48, "num_patches": 16})
    body = siglip2.Siglip2VisionModel(config).eval()
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.normal_(std=0.3)
    own = {f"decoder.vision_model.{name.removeprefix('vision_model.')}": each for name, each in body.state_dict().items()}
    quantizer = "bottleneck.regularizer"
    own |= random_state(**{
        f"{quantizer}.embedding.weight": (SEMANTIC, HIDDEN), f"{quantizer}.embedding_proj.weight": (HIDDEN, HIDDEN),
        f"{quantizer}.embedding_proj.bias": (HIDDEN,), "bottleneck.out_linear.weight": (HIDDEN, HIDDEN),
        "bottleneck.out_linear.bias": (HIDDEN,), "bottleneck.in_linear.weight": (HIDDEN, DIM), "encoder.any": (2, 2),
        "decode_task_layer.0.weight": (DIM, DIM), "decode_task_layer.0.bias": (DIM,),
        "decode_task_layer.2.weight": (DIM, DIM), "decode_task_layer.2.bias": (DIM,),
    })  # fmt: skip
    regularizer = {"name": "simvq", "args": {"codebook_size": SEMANTIC, "l2_normalized": normalized}}
    arguments = {"bottleneck": {"name": "bottleneck", "args": {"bottleneck_dim": HIDDEN, "regularizer": regularizer}}}
    return {"model": {"name": "ta_tok", "args": arguments, "sd": own}}, body


def official_features(file: dict[str, Any], body: Any, tokens: Tensor) -> Tensor:
    """Features as the official decoder computes them, with transformers' layers of SigLIP 2."""
    state, side = file["model"]["sd"], int(tokens.shape[1] ** 0.5)
    regularizer = file["model"]["args"]["bottleneck"]["args"]["regularizer"]["args"]
    linear = lambda x, name: F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])  # noqa: E731
    table = linear(state["bottleneck.regularizer.embedding.weight"], "bottleneck.regularizer.embedding_proj")
    table = F.normalize(table, dim=-1) if regularizer["l2_normalized"] else table
    z = linear(table[tokens], "bottleneck.out_linear")
    mask, shapes = torch.ones(z.shape[:2], dtype=torch.int), torch.tensor([[side, side]] * len(z))
    z = body(z, mask, shapes).last_hidden_state
    return linear(linear(z, "decode_task_layer.0").tanh(), "decode_task_layer.2")


@pytest.fixture
def files(tmp_path: Path, transformer: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Files as the authors save them."""
    monkeypatch.setattr(llamagen, "TAR_TOKENS", ROWS)
    monkeypatch.setitem(llamagen.HEADS, (WIDTH, DEPTH), HEADS)
    torch.manual_seed(2)
    vq = VQModel(codebook_size=CODES, codebook_embed_dim=4, ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1),
                 num_res_blocks=1, z_channels=32)  # fmt: skip
    contents = {
        "transformer": {"model": {"name": "llama-abs-LP", "args": {"max_seq_len": SIDE**2}, "sd": transformer}},
        "vq": {"model": vq.state_dict()},
        "ta_tok": make_ta_tok()[0],
    }
    found = {name: tmp_path / f"{name}.pth" for name in contents}
    for name, content in contents.items():
        torch.save(content, found[name])
    return found


@pytest.fixture
def pipe(files: dict[str, Path], tmp_path: Path) -> Any:
    return vargen.open_pipeline(convert_llamagen(**files, output=tmp_path / "model"), torch_dtype=torch.float32)


def official_logits(state: dict[str, Tensor], rows: Tensor, tokens: list[int]) -> Tensor:
    """Logits `[V]` after some tokens: the official network written out, over a whole sequence without a cache."""
    x = torch.cat([F.linear(rows, state["clip_proj.weight"], state["clip_proj.bias"]), state["tok_embeddings.weight"][tokens]])
    x = x + state["abs_pe"][0, : len(x)]
    norm = lambda y, name: y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * state[f"{name}.weight"]  # noqa: E731
    for number in range(DEPTH):
        name = f"layers.{number}"
        qkv = norm(x, f"{name}.attention_norm") @ state[f"{name}.attention.wqkv.weight"].T
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(0, 1) for each in qkv.chunk(3, -1))
        scores = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(~torch.ones(len(x), len(x)).tril().bool(), float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ state[f"{name}.attention.wo.weight"].T
        w1, w2, w3 = (state[f"{name}.feed_forward.{each}.weight"].T for each in ("w1", "w2", "w3"))
        y = norm(x, f"{name}.ffn_norm")
        x = x + (F.silu(y @ w1) * (y @ w3)) @ w2
    return norm(x, "norm")[-1] @ state["output.weight"].T


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("side", [3, 4, 5])
def test_features_are_those_of_siglip_2(tmp_path: Path, normalized: bool, side: int) -> None:
    """At the size of the learned positions, and resized to others."""
    content, body = make_ta_tok(normalized)
    torch.save(content, tmp_path / "ta_tok.pth")
    tokens = torch.randint(SEMANTIC, (2, side**2), generator=torch.Generator().manual_seed(3))
    found = convert_ta_tok(tmp_path / "ta_tok.pth").decode(tokens)
    torch.testing.assert_close(found, official_features(content, body, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["ar", "gumbel", "gsd"])
def test_greedy_tokens_are_those_of_the_official_loop(pipe: Any, transformer: dict[str, Tensor], method: str) -> None:
    """With guidance against features of zeros."""
    semantic = torch.randint(SEMANTIC, (2, 3, 3), generator=torch.Generator().manual_seed(4))
    embeds = pipe.encode_semantic_tokens(semantic)
    result = pipe(prompt_embeds=embeds, accelerator=method, temperature=0, output_type="latent")
    for row, found in zip(embeds, result.tokens.flatten(1).tolist(), strict=True):
        tokens: list[int] = []
        for _ in range(SIDE**2):
            with_rows, without = (official_logits(transformer, each, tokens) for each in (row, torch.zeros_like(row)))
            tokens.append(int((without + 4.0 * (with_rows - without)).argmax()))
        assert found == tokens
    assert pipe(prompt_embeds=embeds).images[0].size == (2 * SIDE, 2 * SIDE)


def test_passes_equal_whole_sequences(pipe: Any) -> None:
    """Teacher forcing, passes over chains and over a tree know the same positions."""
    network, embeds = pipe.transformer, pipe.encode_semantic_tokens(torch.arange(ROWS)[None])
    tokens = torch.randint(CODES, (1, SIDE**2), generator=torch.Generator().manual_seed(5))
    condition = pipe.encode_condition(prompt_embeds=embeds)[0]
    whole = network(tokens, condition).logits
    cache = network.new_cache(1, 3)
    logits = [network(condition=condition, cache=cache).logits]
    for first in range(0, SIDE**2 - 1, 3):
        logits.append(network(tokens[:, first : first + 3], cache=cache).logits)
        cache.commit_chain(3)
    torch.testing.assert_close(torch.cat(logits, 1)[:, : SIDE**2], whole, atol=1e-5, rtol=1e-5)
    cache.rollback(torch.tensor([6]))
    siblings = network(
        tokens[:, [6, 6]], cache=cache, positions=torch.tensor([[6, 6]]), ancestors=torch.eye(2, dtype=torch.bool)
    ).logits
    torch.testing.assert_close(siblings, whole[:, [7, 7]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [each.name for each in list_methods("next-token") if not each.experimental])
def test_every_method_runs_or_says_why_not(pipe: Any, name: str) -> None:
    model, embeds = pipe.decoding_model(3.0), pipe.encode_semantic_tokens(torch.arange(ROWS)[None])
    missing = ("mulo", "mulo-exact", "speculative", "eagle", "medusa", "lantern")
    condition = pipe.encode_condition(prompt_embeds=embeds)[0]
    run_or_refuse(model, condition, name, missing, r"resolution|draft|trained")


def test_wrong_inputs_are_named(pipe: Any, files: dict[str, Path], tmp_path: Path, transformer: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="tokens must be from 0 to 49"):
        pipe.encode_semantic_tokens(torch.full((1, ROWS), SEMANTIC))
    with pytest.raises(ValueError, match="square"):
        pipe.encode_semantic_tokens(torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="prompt_embeds must be"):
        pipe(prompt_embeds=pipe.encode_semantic_tokens(torch.zeros(1, 4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="without a text encoder"):
        pipe("a red apple")
    with pytest.raises(ValueError, match="quantization"):
        vargen.open_pipeline(pipe.folder, quantization="int8")
    with pytest.raises(ValueError, match="ta_tok goes with"):
        convert_llamagen(**{**files, "ta_tok": None}, output=tmp_path / "other")
    for name, wrong in (
        ("bottleneck.out_linear.weight", torch.ones(3, 3)),
        ("decoder.vision_model.embeddings.position_embedding.weight", torch.ones(15, DIM)),
        ("decode_task_layer.2.bias", None),
    ):
        content = make_ta_tok()[0]
        content["model"]["sd"][name] = wrong
        if wrong is None:
            del content["model"]["sd"][name]
        torch.save(content, files["ta_tok"])
        with pytest.raises(ValueError, match="is not a TA-Tok"):
            convert_llamagen(**files, output=tmp_path / "other")
    torch.save({"model": {"sd": make_ta_tok()[0]["model"]["sd"]}}, files["ta_tok"])
    with pytest.raises(ValueError, match="l2_normalized"):
        convert_llamagen(**files, output=tmp_path / "other")
    torch.save({"model": {"sd": transformer | {"abs_pe": torch.ones(1, ROWS + 2, WIDTH)}}}, files["transformer"])
    with pytest.raises(ValueError, match="abs_pe"):
        convert_llamagen(**files, output=tmp_path / "other")
    assert not (tmp_path / "other").exists()

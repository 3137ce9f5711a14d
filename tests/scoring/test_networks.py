"""The networks' scores: parity with the packages they come from, on random weights; no weight is fetched."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_reward_package import restore_moved_functions
from PIL import Image

import vargen.assets
from vargen.models.text_encoder import ImageTextModel
from vargen.scoring import open_scorer, reward_models
from vargen.scoring.image_text import ImageTextScorer, preprocess
from vargen.scoring.protocol import to_tensor

ENCODER = vargen.assets.packaged_model_path("emoji")
PROMPTS = ["a red apple", "two dogs on a bench, 3d style, with very many more words than " + "thirty-five tokens " * 12]


def shown(size: tuple[int, int] = (40, 56), count: int = 2) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(count)]


# -- ImageReward ---------------------------------------------------------------------------------------------------------

# Names, shapes and scores of the official network (package image-reward 1.5) with small transformers inside, whose weights are
# random by name. `python tests/scoring/test_networks.py` writes it again where that package imports: vargen[reward].
RECORD = Path(__file__).parents[1] / "golden" / "image_reward.json"
_VISION = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512, "patch_size": 32}
_TEXT = {
    "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 96, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 2,
    "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30524, "encoder_width": 128, "add_cross_attention": True,
}  # fmt: skip


def random_weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Return weights that depend on their names; positions, the only integers, count up."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith("position_ids"):
            found[name] = torch.arange(shape[-1]).expand(shape).clone()
        else:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            found[name] = 0.05 * noise + (len(shape) == 1 and name.endswith(".weight"))  # norms multiply by about one
    return found


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record; its weights are in `ImageReward.pt`, and our network has its sizes."""
    record = json.loads(RECORD.read_text("utf-8"))
    torch.save(random_weights(record["shapes"]), tmp_path / "ImageReward.pt")
    text = {**reward_models.TEXT, "encoder_hidden_size": 128}
    monkeypatch.setattr(reward_models, "VISION", {**reward_models.VISION, **_VISION})
    monkeypatch.setattr(reward_models, "TEXT", {name: _TEXT.get(name, value) for name, value in text.items()})
    return {**record, "weights": f"weights={tmp_path / 'ImageReward.pt'}"}


def test_image_reward_scores_as_the_package_does(official: dict[str, Any], tmp_path: Path) -> None:
    images, expected = shown(), torch.tensor(official["scores"])
    alone = [
        open_scorer(f"image-reward:{official['weights']}").score([i], [p])[0] for p, i in zip(PROMPTS, images, strict=True)
    ]
    scores = open_scorer(f"image-reward:{official['weights']}").score(images, PROMPTS)
    assert torch.allclose(torch.stack(alone), expected, atol=2e-5) and torch.allclose(scores, expected, atol=2e-5)
    assert (expected[0] - expected[1]).abs() > 1e-3, "the tolerance separates the two"
    other = random_weights(official["shapes"])
    name = next(each for each in other if each.endswith("crossattention.self.value.weight"))
    other[name] = other[name] * 1.01
    torch.save(other, tmp_path / "other.pt")
    changed = open_scorer(f"image-reward:weights={tmp_path / 'other.pt'}").score(images, PROMPTS)
    assert not torch.allclose(changed, expected, atol=2e-5), "a hundredth more of one weight is noticed"


def record_official_scores() -> None:
    """Score by the package's own network, and write the record."""
    import tempfile

    from vargen.compat import ensure_torchvision

    ensure_torchvision()
    restore_moved_functions()
    import ImageReward as package
    from ImageReward.models.BLIP import blip_pretrain
    from ImageReward.models.BLIP.vit import VisionTransformer
    from transformers import BertTokenizer

    vision = VisionTransformer(img_size=224, patch_size=32, embed_dim=128, depth=2, num_heads=2)
    blip_pretrain.create_vit = lambda *_: (vision, 128)
    blip_pretrain.init_tokenizer = lambda: BertTokenizer(str(ENCODER / "tokenizer/vocab.txt"))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "med_config.json"
        config.write_text(json.dumps(_TEXT))
        network = package.ImageReward(med_config=str(config)).eval()
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    network.load_state_dict(random_weights(shapes))
    scores = [network.score(prompt, image) for prompt, image in zip(PROMPTS, shown(), strict=True)]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    RECORD.write_text(f'{{"scores": {json.dumps(scores)},\n"shapes": {{\n{lines}\n}}}}\n', "utf-8")


def test_image_reward_opens_no_pickled_code_and_no_other_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "opened",)

    torch.save({"mlp.layers.0.weight": Hostile()}, tmp_path / "hostile.pt")
    with pytest.raises(ValueError, match="could run code"):
        open_scorer(f"image-reward:weights={tmp_path / 'hostile.pt'}")
    assert not (tmp_path / "opened").exists()
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"damaged.*fetch ImageReward"):
        open_scorer(f"image-reward:weights={tmp_path / 'cut.pt'}")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"do not fit the model. missing"):
        open_scorer(f"image-reward:weights={tmp_path / 'other.pt'}")


# -- CLIP ----------------------------------------------------------------------------------------------------------------


def test_clip_reads_a_local_checkpoint_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vargen.compat import ensure_torchvision

    ensure_torchvision()
    open_clip = pytest.importorskip("open_clip")
    sizes = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 1},
    }
    (tmp_path / "tiny-clip.json").write_text(json.dumps(sizes))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    torch.manual_seed(0)
    network, _, preprocess = open_clip.create_model_and_transforms("tiny-clip")
    torch.save(network.state_dict(), tmp_path / "tiny.pt")
    scorer = open_scorer(f"clip:model=tiny-clip,weights={tmp_path / 'tiny.pt'},prefix=a photo of", batch_size=1)
    assert "tiny-clip" in scorer.name and "tiny.pt" in scorer.name
    images = shown((32, 32), 6)
    scores = scorer.score(images, ["a dog", "an emoji of a house"] * 3)
    tokens = open_clip.get_tokenizer("tiny-clip")(["a photo of a dog", "a photo of an emoji of a house"])
    with torch.no_grad():
        text = network.eval().encode_text(tokens)
        seen = network.encode_image(torch.stack([preprocess(image) for image in images]))
    expected = 100 * torch.nn.functional.cosine_similarity(seen, text.repeat(3, 1)).clamp_min(0)
    assert torch.allclose(scores, expected, atol=1e-3) and expected.max() > 0
    (tmp_path / "cut.pt").write_bytes((tmp_path / "tiny.pt").read_bytes()[:1000])
    with pytest.raises(FileNotFoundError, match=r"could not be opened.*give weights=FILE"):
        open_scorer(f"clip:model=tiny-clip,weights={tmp_path / 'cut.pt'}")


# -- the packaged scorer -----------------------------------------------------------------------------------------------


@pytest.fixture
def scorer_run(tmp_path: Path) -> Path:
    """A run of `python -m recipes emoji-scorer` as far as its layout goes."""
    torch.manual_seed(0)
    model = ImageTextModel(widths=[16, 32], blocks=[1, 1], image_size=32).eval()
    torch.nn.init.normal_(model.image_projection.bias)
    model.save_pretrained(tmp_path / "run/scorer")
    return tmp_path / "run"


def test_the_scorer_of_a_training_run_opens_and_scores(scorer_run: Path) -> None:
    scorer = open_scorer(str(scorer_run))
    assert isinstance(scorer, ImageTextScorer)
    images = shown((48, 48))
    scores = scorer.score(images, PROMPTS)
    model = scorer.model
    with torch.inference_mode():
        cosine = (model.encode_image(preprocess(model, to_tensor(images))) * scorer.embed_captions(PROMPTS)).sum(-1)
    assert torch.allclose(scores, model.pair_scale.exp() * cosine + model.pair_bias, atol=1e-4)
    assert not torch.allclose(scores, scorer.score(images, PROMPTS[::-1])), "prompts make no difference"


def test_fixed_captions_cancel_how_well_an_image_fits_anything(scorer_run: Path) -> None:
    (scorer_run / "scorer.json").write_text(json.dumps({"captions": ["a blue car", "a green tree"]}))
    scorer = open_scorer(str(scorer_run))
    image = shown((48, 48), 1)
    first, second = (float(scorer.score(image, [text])) for text in ("a blue car", "a green tree"))
    assert first != second and abs(first + second) < 1e-4


def test_a_scorer_that_is_not_finished_damaged_or_of_another_encoder_is_refused(scorer_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="finish its training"):
        open_scorer(str(tmp_path / "empty"))
    (scorer_run / "scorer.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        open_scorer(str(scorer_run))
    (scorer_run / "scorer.json").write_text(json.dumps({"text_encoder": str(tmp_path / "empty")}))
    with pytest.raises(ValueError, match="must hold text_encoder"):
        open_scorer(str(scorer_run))
    (scorer_run / "scorer.json").unlink()
    weights = scorer_run / "scorer/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="missing, damaged or not a safetensors file"):
        open_scorer(str(scorer_run))
    ImageTextModel(widths=[16, 32], blocks=[1, 1], text_dim=24).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"gives 384 features.*takes 24"):
        open_scorer(str(tmp_path / "narrow"))


if __name__ == "__main__":
    record_official_scores()

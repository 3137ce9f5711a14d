"""PickScore of tiny random weights: the probabilities that transformers computes, and folders that are refused."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from rejects import rejects

from vargen.scoring import open_scorer
from vargen.scoring.reward_models import preprocess_images

PROMPTS = ["a red apple", "a cat", "a red cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("pick") / "model"
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = ["<pad>", "<unk>", "<start>", "a", "red", "apple", "cat", "<end>"]
    text = {**layers, "vocab_size": 8, "max_position_embeddings": 9, "eos_token_id": 7, "bos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config={**layers, "patch_size": 56}, projection_dim=8)).save_pretrained(place)
    vocabulary = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = Whitespace()
    ends = [("<start>", 2), ("<end>", 7)]
    vocabulary.post_processor = TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", unk_token="<unk>").save_pretrained(place)
    return place


def images() -> list[Image.Image]:
    generator = torch.Generator().manual_seed(0)
    return [Image.fromarray(torch.randint(0, 256, (40, 60, 3), generator=generator).byte().numpy()) for _ in PROMPTS]


def test_scores_are_the_logits_of_each_pair(folder: Path) -> None:
    scorer = open_scorer(f"pick-score:weights={folder}")
    found = scorer.score(images(), PROMPTS)
    encoded = scorer.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = scorer.network(pixel_values=preprocess_images(images()), **inputs)
    assert torch.allclose(found, logits.logits_per_image.diagonal(), atol=1e-5) and len(set(found.tolist())) == 3
    alone = torch.cat([scorer.score([image], [prompt]) for image, prompt in zip(images(), PROMPTS, strict=True)])
    assert torch.allclose(found, alone, atol=1e-4), "padding of other prompts does not count"


def test_folders_of_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="PickScore_v1"):
        open_scorer("pick-score")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    rejects(lambda: open_scorer(f"pick-score:weights={tmp_path}"), "weights")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="cannot use weights"):
        open_scorer(f"pick-score:weights={tmp_path}")
    rejects(lambda: open_scorer(f"pick-score:weights={folder},prefix=a"), "prefix")

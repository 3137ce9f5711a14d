"""Tiny random image language models of transformers, with processors of a few words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vargen.compat import ensure_torchvision, installed_version

ensure_torchvision()

RELEASES = {
    "janus": (4, 52),
    "emu3": (4, 53),
    "emu3.5": (4, 53),
    "chameleon": (4, 53),
    "x-omni": (4, 56),
    "mammoth-moda2": (4, 56),
    "glm-image": (5, 0),
}  # of transformers, that they need
WORDS = "a red blue green apple car cat dog on under the moon 0 1 2 3 4 5 6 7 8 9 * lowres , blurry".split()
SPECIAL = ["<pad>", "<s>", "</s>", "<boi>", "<eoi>", "<image>", "<wrap>", "<eof>", "<eol>"]
PAD, BOS, EOS, BOI = range(4)


def has_release(*names: str) -> bool:
    """Whether the installed transformers runs models of these names; of other models, any does."""
    installed = tuple(map(int, (installed_version("transformers") or "0").split(".")[:2]))
    return all(installed >= RELEASES.get(name, (0, 0)) for name in names)


needs_janus = pytest.mark.skipif(not has_release("janus", "emu3", "chameleon"), reason="needs a newer transformers")


def make_tokenizer(cls: Any, **special: str) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocab = {word: number for number, word in enumerate([*SPECIAL, *WORDS, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    parts = [
        pre_tokenizers.Split(Regex(r"\s+"), "removed"),
        pre_tokenizers.Digits(True),
        pre_tokenizers.Punctuation("isolated"),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return cls(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
               extra_special_tokens=special)  # fmt: skip


def randomize(model: Any, seed: int, spread: float = 0.3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model.eval()


def text_config(**changed: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 320}  # fmt: skip
    return {**sizes, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, **changed}


def make_janus(side: int = 4, codes: int = 24, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """A Janus of `side` x `side` tokens, and its processor."""
    from transformers import JanusConfig, JanusForConditionalGeneration, JanusImageProcessor, JanusProcessor, LlamaTokenizerFast

    config = text_config(**changed)
    width = config["hidden_size"]
    model = JanusForConditionalGeneration(JanusConfig(
        text_config={"model_type": "llama", **config}, tie_word_embeddings=False,
        vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8 * side,
                       "patch_size": 8, "projection_dim": width, "num_image_tokens": side**2, "mlp_ratio": 2.0},
        vq_config={"embed_dim": 4, "num_embeddings": codes, "latent_channels": 8, "base_channels": 32,
                   "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": width, "image_token_embed_dim": width,
                   "num_patches": side},
    ))  # fmt: skip
    generation = model.generation_config
    generation.bos_token_id, generation.pad_token_id, generation.eos_token_id = BOS, PAD, EOS
    generation.generation_kwargs = {"boi_token_id": BOI}
    tokenizer = make_tokenizer(LlamaTokenizerFast, image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    return randomize(model, seed), JanusProcessor(JanusImageProcessor(), tokenizer)


def make_emu3(codes: int = 24, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """An Emu3 whose image tokens are scattered over the vocabulary, and its processor."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3ImageProcessor, Emu3Processor, GPT2TokenizerFast

    first = len(SPECIAL) + len(WORDS) + 1
    names = {f"<|visual token {number:06d}|>": first + (7 * number) % codes for number in range(codes)}
    model = Emu3ForConditionalGeneration(Emu3Config(
        text_config=text_config(attention_dropout=0.0, **changed),
        vq_config={"codebook_size": codes, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
                   "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [1], "hidden_size": 32,
                   "num_attention_heads": 1,
                   "temporal_downsample_factor": 1, "in_channels": 3, "out_channels": 3},
        vocabulary_map={"<image>": 5, "<|extra_200|>": 8, **names},
    ))  # fmt: skip
    tokenizer = make_tokenizer(GPT2TokenizerFast, image_token="<image>", boi_token="<boi>", eoi_token="<eoi>",
                               image_wrapper_token="<wrap>", eof_token="<eof>")  # fmt: skip
    return randomize(model, seed), Emu3Processor(Emu3ImageProcessor(), tokenizer)


def make_chameleon(codes: int = 24, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """A Chameleon of 4 x 4 tokens, and its processor; its image tokens count backward in the vocabulary."""
    from transformers import (
        ChameleonConfig,
        ChameleonForConditionalGeneration,
        ChameleonImageProcessor,
        ChameleonProcessor,
        LlamaTokenizerFast,
    )

    last = len(SPECIAL) + len(WORDS) + codes
    names = {
        "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(number)) + "Z": last - number for number in range(codes)
    }
    model = ChameleonForConditionalGeneration(ChameleonConfig(
        **text_config(**changed),
        vq_config={"embed_dim": 4, "num_embeddings": codes, "latent_channels": 4, "base_channels": 32, "resolution": 8,
                   "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": []},
        vocabulary_map={"<image>": 5, **names},
    ))  # fmt: skip
    tokenizer = make_tokenizer(LlamaTokenizerFast, image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    return randomize(model, seed), ChameleonProcessor(ChameleonImageProcessor(), tokenizer, image_seq_length=16)


def make_glm(codes: int = 24, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """A GLM-Image (transformers 5), and its processor."""
    from transformers import (
        GlmImageConfig,
        GlmImageForConditionalGeneration,
        GlmImageImageProcessor,
        GlmImageProcessor,
        PreTrainedTokenizerFast,
    )

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    text = {**text_config(**{"vision_vocab_size": codes + 4, "rope_parameters": rope, **changed}), "eos_token_id": None}
    model = GlmImageForConditionalGeneration(GlmImageConfig(
        text_config=text, image_start_token_id=codes, image_end_token_id=codes + 1,
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 64, "patch_size": 16,
                       "intermediate_size": 32},
        vq_config={"embed_dim": 8, "num_embeddings": codes, "latent_channels": 16},
    ))  # fmt: skip
    model.generation_config.eos_token_id = None
    tokenizer = make_tokenizer(PreTrainedTokenizerFast, image_token="<image>", grid_bos_token="<boi>", grid_eos_token="<eoi>")
    template = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
    return randomize(model, seed), GlmImageProcessor(GlmImageImageProcessor(), tokenizer, chat_template=template)


CAUSAL_MARKS = {"liquid": ("<boi>", "<unconditional>"), "simplear": ("<|t2i|>", "<|soi|>"), "tar": ("<S0>", "<S1>", "<S2>"),
                "x-omni": ("<SOM>", "<IMAGE>", "<EOM>"),
                "emu3.5": ("<|extra_100|>", "<|extra_200|>", "<|extra_203|>", "<|image token|>", "<|image start|>",
                           "<|image end|>")}  # fmt: skip


def make_causal(name: str, codes: int = 24, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """A causal language model with image tokens: Liquid and others by its marks, else one of text; and its tokenizer."""
    from transformers import GemmaConfig, GemmaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(PreTrainedTokenizerFast)
    marks = [*CAUSAL_MARKS.get(name, ()), "<|im_start|>", "<|im_end|>", "<im_start>"]
    form = {"tar": "<I{}>", "x-omni": "<MM-Token-{}>", "emu3.5": "<|visual token {:06d}|>"}.get(name)
    names = [] if form is None else [form.format(number) for number in range(codes)]
    text = marks[3:] if name == "x-omni" else marks  # of which X-Omni has marks behind the image tokens
    tokenizer.add_tokens(text, special_tokens=True)
    first = len(tokenizer)
    tokenizer.add_tokens([*names, *marks[: len(marks) - len(text)]], special_tokens=True)
    vocab = len(tokenizer) + (codes if form is None else 0)
    config = text_config(**{"vocab_size": vocab, "hidden_act": "silu", "tie_word_embeddings": False, **changed})
    if name == "liquid":
        config |= {"head_dim": 8, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
        return randomize(GemmaForCausalLM(GemmaConfig(**config)), seed, 0.8), tokenizer
    if name == "x-omni":
        from vargen.models.transformers.x_omni import XOmniConfig, XOmniForCausalLM

        config |= {"vocab_size": first, "num_hidden_layers": 4, "mm_vocab_size": vocab - first, "image_vocab_size": codes}
        config |= {"num_mm_adap_layers": 1, "num_mm_head_layers": 1, **changed}
        return randomize(XOmniForCausalLM(XOmniConfig(**config)), seed, 0.8), tokenizer
    if name == "emu3.5":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config |= {
            "head_dim": 12,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            **changed,
        }  # heads together are wider than states, as published
        return randomize(Qwen3ForCausalLM(Qwen3Config(**config)), seed, 0.8), tokenizer
    return randomize(Qwen2ForCausalLM(Qwen2Config(**config)), seed, 0.8), tokenizer


def make_mammoth_moda2(codes: int = 24, seed: int = 0, **changed: Any) -> tuple[Any, Any]:
    """A MammothModa2 with a second feed-forward in its last two of four layers, and its tokenizer: text first, as official."""
    from transformers import PreTrainedTokenizerFast

    from vargen.models.transformers.mammoth_moda2 import MammothModa2Config, MammothModa2ForCausalLM

    tokenizer = make_tokenizer(PreTrainedTokenizerFast)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    first = len(tokenizer)
    marks = ["<|endofline|>", "<|image token|>", "<|image start|>", "<|image end|>"]
    tokenizer.add_tokens([*marks, *(f"<|visual token {number:05d}|>" for number in range(codes))], special_tokens=True)
    config = text_config(**{
        "vocab_size": first, "hidden_act": "silu", "tie_word_embeddings": False, "num_hidden_layers": 4,
        "gen_vocab_size": len(tokenizer) - first + 3, "gen_mlp_start": 2, "gen_mlp_stop": 4, **changed,
    })  # fmt: skip
    return randomize(MammothModa2ForCausalLM(MammothModa2Config(**config)), seed, 0.8), tokenizer


def make_vqgan(codes: int = 24, seed: int = 0, **changed: Any) -> Any:
    """The decoder of a VQGAN image tokenizer, of 2 x 2 pixels a token, with attention at its coarsest level."""
    from vargen.models.tokenizers.vqgan import VQGANDecoder

    return randomize(VQGANDecoder(codes, 8, 16, [32, 64], 1, **changed), seed, 0.1)

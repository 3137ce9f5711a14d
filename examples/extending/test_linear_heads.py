from tempfile import TemporaryDirectory

import torch
from linear_heads import LinearDrafter, LinearHeads

from vargen import LlamaGenPipeline
from vargen.decoding import Accelerator, DynamicTree, shared_noise
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel

SIZES = {"dim": 32, "vocab_size": 64, "grid_size": 4}


def test_a_linear_drafter_is_loaded_drafts_and_is_saved_with_the_model():
    transformer = LlamaGenTransformer(**SIZES, condition="class", num_classes=10, n_layer=1, n_head=2, multiple_of=32)
    tokenizer = VQModel(64, ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), num_res_blocks=1, z_channels=32)
    pipe = LlamaGenPipeline(vqvae=tokenizer, transformer=transformer)

    def tokens(method):
        result = pipe(class_labels=3, accelerator=method, generator=torch.Generator().manual_seed(0), output_type="latent")
        return result.images

    with TemporaryDirectory() as folder:
        LinearDrafter(**SIZES).save_pretrained(f"{folder}/drafter")
        assert pipe.load_drafter(folder) == "linear"
        pipe.save_pretrained(f"{folder}/model")
        again = LlamaGenPipeline.from_pretrained(f"{folder}/model")
    assert torch.equal(again.linear.linear.weight, pipe.linear.linear.weight)
    assert torch.equal(tokens(Accelerator("linear", LinearHeads(DynamicTree(2, 2, 1)), shared_noise)), tokens("ar"))

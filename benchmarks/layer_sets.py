"""Search for the layers that `layer-skip` can leave out: greedily, the layer whose removal keeps acceptance highest.

    python benchmarks/layer_sets.py [--model emoji] [--most 5]

SWIFT (Xia et al. 2024) searches for layers whose drafts match the generated tokens. Here the objective is the mean acceptance
rate, the sum of min(p, q), over the positions of images that the model generated. For n layers the search takes at most
n (n - 1) / 2 passes over whole images.
"""

import argparse

import torch
from torch import Tensor

import vargen
from vargen.decoding import Sampling, TokenModel, Tree, decode
from vargen.decoding.sampling import to_probs

PROMPTS = ("a red apple", "a cat face", "a rocket", "a green tree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji", help="packaged, a folder, or owner/name on the hub")
    parser.add_argument("--most", type=int, default=5, help="largest number of layers to skip")
    options = parser.parse_args()

    pipe = vargen.open_pipeline(options.model)
    settings = pipe.default_sampling
    sampling = Sampling(settings["temperature"], settings["top_k"], settings["top_p"])
    model, (condition, _) = pipe.decoding_model(settings["guidance_scale"]), pipe.encode_condition(list(PROMPTS))
    tokens = decode(model, condition, torch.arange(len(PROMPTS)), "ar", sampling).tokens

    @torch.inference_mode()
    def probs(each: TokenModel) -> Tensor:
        state, _ = each.prefill(condition, tokens.shape[1])
        return to_probs(each.forward(tokens, state, Tree.make_chain(tokens.shape[1] - 1, tokens.device)).logits, sampling)

    target, skipped = probs(model), ()
    for _ in range(min(options.most, model.num_layers - 1)):
        accepted = {
            layer: float(torch.minimum(target, probs(model.skip_layers((*skipped, layer)))).sum(-1).mean())
            for layer in range(model.num_layers)
            if layer not in skipped
        }
        best = max(accepted, key=lambda layer: accepted[layer])
        skipped = tuple(sorted((*skipped, best)))
        print(f"skip={'+'.join(map(str, skipped))}: acceptance {accepted[best]:.3f}")


if __name__ == "__main__":
    main()

"""Times passes of Infinity's transformer against the arithmetic of the official code, on the same weights, in turn.

Official: keys and values of the text in every pass and layer, caches that grow by `cat` with float32 keys, the last scale
cached, and unconditional rows to the end. Both use torch's fused attention. Layers of the width of 2B, random weights.
The first pass of both includes what is computed of the text.

    OMP_NUM_THREADS=1 python benchmarks/infinity_pass.py --layers 2 --scales 8 --dtype float32
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.guidance import Condition
from vargen.models.infinity.network import SIZES, InfinityTransformer, PassGuidance
from vargen.models.infinity.schedules import ScalePlan
from vargen.models.llamagen.blocks import rotary_factors, rotate_
from vargen.models.var.blocks import MOST_SHARPNESS, make_modulation, modulate, to_unit


class Official:
    """The official generation loop over the blocks of a transformer, without its head."""

    def __init__(self, model: InfinityTransformer, condition: Condition, plan: ScalePlan):
        self.model, self.plan = model, plan
        pooled, self.text = model.embed_text(condition.caption_embeds, condition.caption_mask)
        modulation = make_modulation(pooled, model.blocks, model.head_nm, model.shared_ada_lin)
        self.blocks, self.head = modulation.blocks.float(), modulation.head.float()
        self.mask = condition.caption_mask[:, None, None]
        self.start = (pooled[:, None] + model.pos_start).float()
        self.rotary, self.ends = model.new_cache(plan, 1, 1).rotary, (0, *plan.ends)
        self.caches: list[Any] = [None] * len(model.blocks)

    def run(self, scale: int, inputs: Tensor | None, strength: float) -> Tensor:
        """Guided logits of a scale; all earlier ones are in the caches."""
        model, dtype = self.model, self.model.dtype
        x = self.start if inputs is None else model.word_embed(inputs.to(dtype)).float()
        x = x + model.lvl_embed.weight[scale].float()
        rotary = rotary_factors(self.rotary[self.ends[scale] : self.ends[scale + 1]])
        for i, block in enumerate(model.blocks):
            gain1, gain2, scale1, scale2, shift1, shift2 = self.blocks[i].unbind(0)
            x = torch.addcmul(x, gain1, self.attend(i, block.sa, modulate(x, scale1, shift1).to(dtype), rotary).float())
            normed = F.layer_norm(x, x.shape[-1:], block.ca_norm.weight.float(), block.ca_norm.bias.float(), 1e-6)
            x = x + self.read_text(block.ca, normed.to(dtype)).float()
            x = torch.addcmul(x, gain2, block.ffn(modulate(x, scale2, shift2).to(dtype)).float())
        logits = model.head(modulate(x, *self.head.unbind(0)).to(dtype)).float()
        conditional, unconditional = logits.chunk(2)
        return torch.lerp(unconditional, conditional, 1 + strength)

    def attend(self, i: int, sa: Any, h: Tensor, rotary: Any) -> Tensor:
        q, k, v = sa.product(h).unbind(2)
        q, k = to_unit(q) * sa.scale_mul_1H11.float().clamp_max(MOST_SHARPNESS).exp().view(-1, 1), to_unit(k)
        for each in (q, k):
            rotate_(each, rotary)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.caches[i] is not None:
            k, v = (torch.cat([held, new], dim=2) for held, new in zip(self.caches[i], (k, v), strict=True))
        self.caches[i] = k, v
        out = F.scaled_dot_product_attention(q.transpose(1, 2).to(v.dtype), k.to(v.dtype), v, scale=1.0)
        return sa.proj(out.transpose(1, 2).flatten(2))

    def read_text(self, ca: Any, h: Tensor) -> Tensor:
        bias = torch.cat([torch.zeros_like(ca.v_bias), ca.v_bias])
        keys = F.linear(self.text, ca.mat_kv.weight, bias).unflatten(-1, (2, ca.n_head, -1)).permute(2, 0, 3, 1, 4)
        q = ca.mat_q(h).unflatten(-1, (ca.n_head, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, keys[0], keys[1], attn_mask=self.mask)
        return ca.proj(out.transpose(1, 2).flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--scales", type=int, default=8)
    parser.add_argument("--text", type=int, default=100, help="rows of the text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    given = parser.parse_args()
    torch.manual_seed(0)
    plan, depth = ScalePlan.official(given.scales), given.layers
    model = InfinityTransformer(**{**SIZES["infinity-2b"], "depth": depth}).eval().to(getattr(torch, given.dtype))
    texts = Condition(None, torch.randn(1, given.text, 2048), torch.ones(1, given.text, dtype=torch.bool))
    both = texts.cat(model.null_condition(texts))
    inputs = [None, *(torch.randn(1, rows * columns, 32).repeat(2, 1, 1) for rows, columns in plan.scales[1:])]
    last, most = given.scales - 1, 0.0
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in plan.scales] for name in ("official", "vargen", "economy")}
    for number in range(given.rounds + 1):  # the first one warms up
        official, caches = None, {}
        for name in ("vargen", "economy"):
            caches[name] = model.new_cache(plan, 2, given.text)
        for scale in range(given.scales):
            found = {}
            for name in seconds:
                begun = time.perf_counter()
                if name == "official":
                    official = official or Official(model, both, plan)
                    found[name] = official.run(scale, inputs[scale], 2.0)
                else:
                    found[name] = run_vargen(
                        model, caches[name], scale, inputs[scale], both, name == "economy" and scale == last
                    )
                if number:
                    seconds[name][scale].append(time.perf_counter() - begun)
            most = max(most, float((found["official"] - found["vargen"]).abs().max()))
    about = f"{depth} layers of 2B, {given.dtype}, {torch.get_num_threads()} thread, {given.text} text rows"
    print(f"{about}; logits differ by {most:.1e}")
    totals = dict.fromkeys(seconds, 0.0)
    for scale, (rows, columns) in enumerate(plan.scales):
        found_ms = {name: 1e3 * statistics.median(each[scale]) for name, each in seconds.items()}
        totals = {name: totals[name] + found_ms[name] for name in totals}
        print(describe(f"{rows}x{columns}", found_ms))
    print(describe("all", totals))


def run_vargen(model: Any, cache: Any, scale: int, inputs: Any, both: Condition, is_plain: bool) -> Tensor:
    if is_plain:
        cache = cache.select_rows(slice(0, 1))
        return model(inputs[:1], cache=cache).logits
    strength = torch.full((cache.ends[scale + 1] - cache.ends[scale],), 2.0)
    return model(inputs, both if scale == 0 else None, cache=cache, guidance=PassGuidance(strength)).logits


def describe(name: str, found: dict[str, float]) -> str:
    """A line: milliseconds, and ratios to the official arithmetic."""
    times = " ".join(f"{key} {value:8.1f} ms" for key, value in found.items())
    return f"{name:>6} {times}  official / vargen {found['official'] / found['vargen']:.2f}"


if __name__ == "__main__":
    with torch.inference_mode():
        main()

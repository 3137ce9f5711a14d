"""Faults of networks and kernels, of their caches, and of what shows them to the algorithms."""

from __future__ import annotations

from mutant import Mutant

_LANGUAGE_MODELS = "tests/pipelines/test_language_model_results.py"

MUTANTS = (
    Mutant(
        "rollback-one-short",
        "A rollback of the cache leaves one token too many.",
        "vargen/models/kv_cache.py",
        "        self.length.copy_(length_R)\n",
        "        self.length.copy_(torch.minimum(length_R + 1, self.length))\n",
        ("tests/models/test_cache.py::test_what_is_rolled_back_was_never_fed",),
    ),
    Mutant(
        "cache-slot-off-by-one",
        "Rows of different lengths write their keys and values one slot too far.",
        "vargen/models/kv_cache.py",
        "        return self._first_slot + (last + self._next(T, earlier))[..., None]\n",
        "        return self._first_slot + (last + self._next(T, earlier) + 1)[..., None]\n",
        ("tests/models/test_cache.py::test_a_pass_over_many_tokens_is_that_many_passes_over_one",),
    ),
    Mutant(
        "prefix-bias-kept",
        "A row that joins a running batch keeps the hidden and visible prompt slots of the image before it.",
        "vargen/models/kv_cache.py",
        '            held.index_fill_(0, rows, float("-inf"))\n',
        "",
        (f"{_LANGUAGE_MODELS}::test_a_prompt_joins_the_row_of_a_longer_one",),
    ),
    Mutant(
        "sibling-visible",
        "In the attention mask of a draft tree, a token sees its earlier siblings.",
        "vargen/models/llamagen/decoding.py",
        "tree.ancestor_bits if state.fused else self.repeat_rows(tree.ancestors, 2)\n",
        "tree.ancestor_bits if state.fused else self.repeat_rows(tree.ancestors | tree.earlier_siblings, 2)\n",
        ("tests/decoding/test_trained_drafters.py::test_coupled_drafts_generate_the_image_of_ar",),
    ),
    Mutant(
        "rotary-off-by-one",
        "Fed tokens are rotated to the position after their own.",
        "vargen/models/llamagen/blocks.py",
        "            positions = cache.positions(T, earlier)\n",
        "            positions = cache.positions(T, earlier) + 1\n",
        ("tests/models/test_llamagen.py::test_step_by_step_is_teacher_forcing_at_every_position",),
    ),
    Mutant(
        "padding-visible",
        "Tokens attend to the padding of a caption.",
        "vargen/models/llamagen/network.py",
        "device=x.device) if mask is None else mask.float()\n",
        "device=x.device) if mask is None else mask.float() * 0 + 1\n",
        ("tests/models/test_cache.py::test_the_compressed_prefix_is_the_long_one",),
    ),
    Mutant(
        "guidance-formula",
        "Classifier-free guidance is c + s (c - u) instead of u + s (c - u).",
        "vargen/models/guidance.py",
        "        return torch.addcmul(unconditional, difference, scale)\n",
        "        return torch.addcmul(conditional, difference, scale)\n",
        ("tests/models/test_step.py::test_guidance_before_the_output_product_is_guidance_after_it",),
    ),
    Mutant(
        "guidance-interval",
        "Guidance of a language model ends one token before the end of its interval.",
        "vargen/models/transformers/decoding.py",
        "(position <= self.guidance.interval + 1)[..., None]",
        "(position <= self.guidance.interval)[..., None]",
        (f"{_LANGUAGE_MODELS}::test_guidance_ends_with_the_last_step_of_its_interval",),
    ),
    Mutant(
        "preview-swapped",
        "Rows and columns of GLM-Image's preview are swapped.",
        "vargen/models/transformers/supported.py",
        "    (rows, columns), side = size, _GLM_PATCH // 2\n",
        "    (columns, rows), side = size, _GLM_PATCH // 2\n",
        (f"{_LANGUAGE_MODELS}::test_a_preview_has_the_proportions_of_its_image",),
    ),
    Mutant(
        "phi-of-the-scale-before",
        "A scale of the residual quantizer uses the convolution of the scale before it.",
        "vargen/models/tokenizers/multi_scale_vq.py",
        '        return self.quant_resi["qresi_ls"][self.phi_of_scale[k]](h_BCss)\n',
        '        return self.quant_resi["qresi_ls"][self.phi_of_scale[max(k - 1, 0)]](h_BCss)\n',
        ("tests/models/test_multi_scale_vq.py::test_tokens_become_the_official_pixels",),
    ),
    Mutant(
        "clean-frames-at-a-timestep",
        "Finished frames of a video enter the cache at timestep 1 instead of 0.",
        "vargen/models/causal_video/decoding.py",
        "        steps = torch.zeros(self.rows_per_video, latents.shape[1],",
        "        steps = torch.ones(self.rows_per_video, latents.shape[1],",
        ("tests/pipelines/test_video_results.py::test_blocks_are_those_of_a_loop_without_cache",),
    ),
    Mutant(
        "neighboring-channel-scale",
        "Each channel of an int8 matrix has the scale of its neighbor.",
        "kernels/int8/arithmetic.py",
        "    values, scale = quantize_activations(weight_NK.detach().float())\n    return values, scale[:, 0]\n",
        "    values, scale = quantize_activations(weight_NK.detach().float())\n    return values, scale[:, 0].roll(1)\n",
        ("tests/kernels/test_int8.py::test_a_quantized_product_is_that_of_its_factors_to_their_precision",),
    ),
    Mutant(
        "attention-kernel-mask",
        "In the Triton kernel of attention, a token of a chain does not see itself.",
        "kernels/triton/attention.py",
        "            visible = drafted[None, :] <= earlier + t[:, None]\n",
        "            visible = drafted[None, :] < earlier + t[:, None]\n",
        ("tests/kernels/gpu/test_tree_attention.py::test_a_chain_needs_no_words",),
    ),
)

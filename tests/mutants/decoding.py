"""Faults of the algorithms: acceptance rules, drafts, sampling, noise, and the loops of images and videos."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        "residual-sign",
        "After a rejection, the next token is sampled from (q - p)+ instead of (p - q)+.",
        "vargen/decoding/rules.py",
        "    difference = (p - q).clamp_min_(0)\n",
        "    difference = (q - p).clamp_min_(0)\n",
        ("tests/decoding/test_exactness.py::test_every_combination_is_exact",),
    ),
    Mutant(
        "q-not-normalized",
        "The q of a sibling sampled without replacement is not renormalized after its earlier siblings are removed.",
        "vargen/decoding/tree_drafters.py",
        "    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)\n",
        "    return rest\n",
        ("tests/decoding/test_invariants.py::test_p_and_q_are_distributions_after_the_filters_in_float32",),
    ),
    Mutant(
        "top-p-border",
        "Top-p excludes the token whose probability makes the sum cross p.",
        "kernels/ops.py",
        "        least = ordered.gather(-1, before.clamp(max=kept - 1))\n",
        "        least = ordered.gather(-1, (before - 1).clamp(0, kept - 1))\n",
        ("tests/decoding/test_sampling.py::test_top_p_keeps_the_crossing_token_and_always_one",),
    ),
    Mutant(
        "noise-of-two-positions",
        "The noise of an image is the same at two neighboring positions.",
        "kernels/noise_bits.py",
        "_mix_numpy_(key[:, None] + (position.numpy().astype(np.uint64) + np.uint64(1))",
        "_mix_numpy_(key[:, None] + (position.numpy().astype(np.uint64) // np.uint64(2) + np.uint64(1))",
        ("tests/decoding/test_noise.py",),
    ),
    Mutant(
        "noise-not-shared",
        "The rule of shared noise samples with the noise of the pass, so that its images are not those of sequential decoding.",
        "vargen/decoding/rules.py",
        "    return verify_shared_tokens(noise.sample(probs, Purpose.TOKEN), draft)\n",
        "    return verify_shared_tokens(noise.sample(probs, Purpose.RESAMPLE), draft)\n",
        ("tests/pipelines/test_accelerators.py::test_gumbel_generates_the_same_image_bit_for_bit",),
    ),
    Mutant(
        "second-seed",
        "The second image of a batch has the noise of another seed than the one that is reported for it.",
        "pipelines/seeds.py",
        "        noise.append(number)\n",
        "        noise.append(number + (len(noise) == 1))\n",
        ("tests/pipelines/test_contract.py::test_the_seeds_in_the_statistics_generate_the_same_again",),
    ),
    Mutant(
        "budget-not-charged",
        "A relaxed rule has its whole budget again in each pass: what earlier passes spent is not charged.",
        "vargen/decoding/relaxed_rules.py",
        "            total = torch.minimum(spent.cumsum(1), (self.budget - relaxation).clamp_min(0)[:, None])\n",
        "            total = torch.minimum(spent.cumsum(1), (self.budget - 0 * relaxation).clamp_min(0)[:, None])\n",
        ("tests/decoding/test_invariants.py::test_no_image_spends_more_than_its_budget_and_without_one_the_rule_is_exact",),
    ),
    Mutant(
        "group-of-all-members",
        "The probability of a group (GSD) counts the draft token again for each member that the filters exclude.",
        "vargen/decoding/relaxed_rules.py",
        "        group_p = gather_prob(p, tokens) + (p.gather(2, member) * joined).sum(2)\n",
        "        group_p = gather_prob(p, tokens) + p.gather(2, member).sum(2)\n",
        ("tests/decoding/test_grouped.py",),
    ),
    Mutant(
        "pooled-unverified",
        "Drafts from a low resolution that follow a rejected one (MuLo-SD) are kept without a test.",
        "vargen/decoding/relaxed_rules.py",
        "        accepted = noise.uniform(Purpose.RESAMPLE_ACCEPT)[:, :-1] < drafted.exact_accept_prob + spent\n",
        "        accepted = torch.ones_like(drafted.token, dtype=torch.bool)\n",
        ("tests/decoding/test_exactness.py::test_relaxed_rules_without_a_budget_are_exact",),
    ),
    Mutant(
        "eagle-feature-shift",
        "A head that extends features gets the feature after each committed token instead of the one that predicted it.",
        "vargen/decoding/tree_drafters.py",
        "        new = gather_nodes(require_features(result.features), result.verdict.path)\n",
        "        new = gather_nodes(require_features(result.features), result.verdict.path.roll(-1, 1))\n",
        ("tests/decoding/test_trained_drafters.py::test_a_chain_of_a_perfect_drafter_is_accepted_whole",),
    ),
    Mutant(
        "medusa-first-feature",
        "Parallel heads draft from the feature of the first token that a pass committed instead of the last.",
        "vargen/decoding/tree_drafters.py",
        "        last = gather_nodes(self.features, (self.count - 1).clamp(min=0)[:, None])\n",
        "        last = gather_nodes(self.features, torch.zeros_like(self.count)[:, None])\n",
        ("tests/decoding/test_trained_drafters.py::test_medusa_drafts_from_the_feature_that_predicted_the_root",),
    ),
    Mutant(
        "log-probs-without-temperature",
        "The log-probabilities of tokens under the sampling distribution ignore the temperature.",
        "vargen/decoding/decode.py",
        "    sampled = to_probs(whole, sampling).log()",
        "    sampled = to_probs(whole, Sampling()).log()",
        ("tests/pipelines/test_language_model_results.py::test_log_probs_are_those_of_a_teacher_forced_pass",),
    ),
    Mutant(
        "drafts-in-the-statistics",
        "Tokens per pass counts all draft tokens, also those that were not committed.",
        "vargen/decoding/stats.py",
        "        return (self.tokens - self.forced) / turns if turns else 0.0\n",
        "        drafted = sum((width - 1) * passes for width, passes in self.passes_by_width.items())\n"
        "        return (self.tokens - self.forced + self.images * drafted) / turns if turns else 0.0\n",
        ("tests/decoding/test_loop.py",),
    ),
    Mutant(
        "video-decision-late",
        "The decision about a drafted block of a video is applied to the next drafted block.",
        "vargen/decoding/video/loop.py",
        '        record.outcome = "accepted" if accepted else "rejected"\n',
        '        accepted, self._late = getattr(self, "_late", True), accepted\n'
        '        record.outcome = "accepted" if accepted else "rejected"\n',
        ("tests/decoding/test_video.py::test_each_block_is_routed_by_its_own_score",),
    ),
    Mutant(
        "first-block-drafted",
        "The first block of a video may be a draft, with early exits as with every n-th block by the target.",
        "vargen/decoding/video/loop.py",
        "        elif record.number in self.method.target_blocks:\n",
        "        elif record.number in self.method.target_blocks[1:]:\n",
        (
            "tests/decoding/test_video_early_exit.py::test_exits_need_fewer_passes_and_no_small_model",
            "tests/decoding/test_video.py::test_forced_blocks_are_the_targets",
        ),
    ),
)

"""Faults of pipelines and programs, of evaluation, scoring and training, and of files that are read and converted."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        "log-probs-of-other-candidates",
        "The log-probabilities of selected candidates are computed under the prompts of other images.",
        "pipelines/generation.py",
        "request.condition.select_rows(slice(None, None, request.num_candidates))\n",
        "request.condition.select_rows(slice(0, len(tokens)))\n",
        ("tests/pipelines/test_language_model_results.py::test_log_probs_are_those_of_a_teacher_forced_pass",),
    ),
    Mutant(
        "inpainting-inverted",
        "Inpainting keeps the tokens of the masked area and regenerates the others.",
        "pipelines/images.py",
        "        area = 1 - F.max_pool2d(",
        "        area = F.max_pool2d(",
        ("tests/pipelines/test_var.py::test_a_black_mask_keeps_all_and_a_white_one_nothing",),
    ),
    Mutant(
        "regenerated-is-the-same",
        "Another image is reported as the same as the original if it has its size.",
        "pipelines/regeneration.py",
        "    same_pixels = pixels_digest(original) == pixels_digest(image)\n",
        "    same_pixels = original.size == image.size\n",
        ("tests/cli/test_regenerate.py::test_what_differs_is_named",),
    ),
    Mutant(
        "request-field-dropped",
        "Sampling options of a request to the service are checked, and then not used.",
        "vargen/serving/image_requests.py",
        "        values[name] = body[name]\n",
        "        values.setdefault(name, body[name])\n",
        ("tests/serving/test_image_api.py::test_a_random_seed_is_returned_and_sampling_options_are_taken",),
    ),
    Mutant(
        "seed-of-another-image",
        "The PNG of each image of the page names the seed of the first one.",
        "vargen/demo/image_service.py",
        "        return {**self.parameters(result.request.single(number), result), **result.records[number], **tokens}\n",
        "        return {**result.records[number], **self.parameters(result.request.single(0), result), **tokens}\n",
        ("tests/demo/test_image_service.py::test_the_best_candidate_is_kept_and_can_be_generated_again_alone",),
    ),
    Mutant(
        "seeds-in-steps-of-two",
        "Image i of a run of `vargen generate` has another seed than the first seed + i.",
        "vargen/cli/generate.py",
        "        return [(prompt, self.first_seed + k) for k, prompt in enumerate(repeated)]\n",
        "        return [(prompt, self.first_seed + 2 * k) for k, prompt in enumerate(repeated)]\n",
        ("tests/cli/test_generate.py::test_an_image_of_a_run_can_be_generated_again_alone",),
    ),
    Mutant(
        "covariance-divisor",
        "The covariance of a Frechet distance is divided by the number of images instead of one less.",
        "vargen/evaluation/reference_statistics.py",
        "        covariance = centered.T @ centered / (len(exact) - 1)\n",
        "        covariance = centered.T @ centered / len(exact)\n",
        ("tests/evaluation/test_features.py::test_statistics_survive_their_file",),
    ),
    Mutant(
        "resumed-without-an-image",
        "A killed evaluation that resumes skips the missing images of a batch that was written in part.",
        "vargen/evaluation/generation.py",
        "                if missing:\n",
        "                if len(missing) == len(indices):\n",
        ("tests/evaluation/test_generation.py::test_a_batch_of_which_a_part_is_missing_is_generated_beside_the_same_others",),
    ),
    Mutant(
        "prompt-of-the-next-image",
        "A scorer gets each image with the prompt of the next one.",
        "vargen/scoring/protocol.py",
        "self.score_batch(images[chosen], prompts[chosen])",
        "self.score_batch(images[chosen], [*prompts[chosen][1:], prompts[chosen][0]])",
        ("tests/scoring/test_pick_score.py::test_scores_are_the_logits_of_each_pair",),
    ),
    Mutant(
        "resumed-with-other-batches",
        "A resumed training run begins again with the first batches instead of going on with the next ones.",
        "vargen/training/run.py",
        "        values = trainer.step(step)\n",
        "        values = trainer.step(step - start)\n",
        ("tests/training/test_fit.py::test_a_run_killed_at_any_step_ends_as_an_uninterrupted_one",),
    ),
    Mutant(
        "queries-and-keys-swapped",
        "A converted video transformer has its queries and keys swapped.",
        "vargen/convert/wan.py",
        r"""(r"\.to_(q|k|v)\.", r".\1."),""",
        r"""(r"\.to_q\.", ".k."), (r"\.to_k\.", ".q."), (r"\.to_v\.", ".v."),""",
        ("tests/convert/test_causal_video.py::test_a_block_without_a_cache_is_what_diffusers_computes",),
    ),
    Mutant(
        "missing-tensor-accepted",
        "Weights that lack a tensor of the network pass the check, so that it would have random values.",
        "vargen/weight_files.py",
        '    problems = [f"missing: {_names(expected.keys() - found.keys())}"] if expected.keys() - found.keys() else []\n',
        "    problems: list[str] = []\n",
        ("tests/models/test_weights.py::test_weights_of_another_network_are_refused",),
    ),
)

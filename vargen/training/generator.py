"""Train a `LlamaGenTransformer` on the tokens of captioned pictures; stop at the best held-out loss.

An over-fitted model has peaked laws, which would flatter every speculative method measured on it, hence the stop at the best
held-out loss, and the entropy that is reported beside it.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer

from vargen.device import fast_dtype
from vargen.files import whole_file, whole_files
from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.vq import VQModel
from vargen.models.weights import read_arrays, weights_digest
from vargen.pipelines.captions import align_left_padded
from vargen.training.emoji import EmojiDataset, captions, sample_caption
from vargen.training.muon import Muon
from vargen.training.recipe import GeneratorRecipe
from vargen.training.run import TrainingRun
from vargen.training.tokenizer import to_pixels

logger = logging.getLogger("vargen")

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the last weights in a mix with the best


def shifted(pictures: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """uint8 pictures `[B, Y, X, 3]` moved by (dy, dx) pixels, white coming in."""
    moved = np.full_like(pictures, 255)
    Y, X = pictures.shape[1:3]
    moved[:, max(dy, 0) : Y + min(dy, 0), max(dx, 0) : X + min(dx, 0)] = pictures[
        :, max(-dy, 0) : Y + min(-dy, 0), max(-dx, 0) : X + min(-dx, 0)
    ]
    return moved


def codes_digest(vqvae: VQModel) -> str:
    """Changes with whatever decides about tokens: encoder and codebook. The decoder has no say in them."""
    return weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)


def check_tokens(run: Path, vqvae: VQModel, tokenizer: Path) -> None:
    """Raise ValueError if a generator's `run` kept tokens, and they are of another encoder or codebook than `tokenizer`'s."""
    path = run / "tokens.npz"
    if path.is_file() and codes_digest(vqvae) not in str(read_arrays(path, "made_of")["made_of"]):
        raise ValueError(f"{run} was trained on the tokens of another tokenizer than {tokenizer}; give that one")


def check_fit(model: LlamaGenTransformer, vqvae: VQModel, side: int) -> None:
    """Raise ValueError unless the tokens of square pictures of `side` pixels are those that the model draws."""
    grid, vocabulary = model.config.grid_size, model.config.vocab_size
    if side != grid * vqvae.downsampling:
        raise ValueError(
            f"pictures of {side} pixels have {side // vqvae.downsampling} tokens a side with this tokenizer, and the recipe's "
            f"grid_size is {grid}: build the data set at {grid * vqvae.downsampling} pixels, or change grid_size"
        )
    if vocabulary != vqvae.config.codebook_size:
        raise ValueError(f"vocab_size must be the tokenizer's {vqvae.config.codebook_size} codes, got {vocabulary}")


class TokenStore:
    """Tokens of pictures, computed when first asked for and kept on disk: `[pictures, variants, N]`.

    The file says which encoder and codebook they were made with; those of others are not taken. Variant 0 is a picture itself,
    the others are copies shifted by a fixed list of offsets. A short run on a CPU never pays for the pictures that it does not
    see; a long one has all tokens after its first passes over the data.
    """

    def __init__(self, path: Path, images: np.ndarray, vqvae: VQModel, recipe: GeneratorRecipe, device: torch.device):
        self.path, self.images, self.vqvae, self.device = path, images, vqvae.eval(), device
        shape = (len(images), 1 + recipe.shift_variants, (images.shape[1] // vqvae.downsampling) ** 2)
        limit = recipe.shift_pixels
        shifts = np.random.default_rng(recipe.seed).integers(-limit, limit + 1, (recipe.shift_variants, 2))
        self.offsets = [(0, 0), *map(tuple, shifts.tolist())]
        self.variants = shape[1]
        self.made_of = f"tokenizer {codes_digest(vqvae)}, tokens {shape}, offsets {self.offsets}"
        self.tokens = np.full(shape, -1, dtype=np.int32)
        if path.is_file():
            kept = read_arrays(path, "made_of", "tokens")
            if str(kept["made_of"]) == self.made_of:
                self.tokens = kept["tokens"]
            else:
                logger.warning("%s: made of %s; now %s: tokenising again", path, kept["made_of"], self.made_of)

    @torch.no_grad()
    def __call__(self, indices: np.ndarray, variants: np.ndarray) -> Tensor:
        """int64 `[B, N]` of pictures `indices [B]` at `variants [B]`."""
        missing = self.tokens[indices, variants, 0] < 0
        wanted = list(zip(indices[missing].tolist(), variants[missing].tolist(), strict=True))
        for start in range(0, len(wanted), 32):
            part = wanted[start : start + 32]
            drawn = self.vqvae.encode(self.pictures(*zip(*part, strict=True))).flatten(1).cpu().numpy()
            for (i, v), row in zip(part, drawn, strict=True):
                self.tokens[i, v] = row
        return torch.from_numpy(self.tokens[indices, variants].astype(np.int64))

    def pictures(self, indices: Iterable[int], variants: Iterable[int]) -> Tensor:
        """Float pixels `[B, 3, Y, X]` in [-1, 1] of pictures at their variants."""
        moved = [shifted(self.images[i : i + 1], *self.offsets[v]) for i, v in zip(indices, variants, strict=True)]
        return to_pixels(np.concatenate(moved), self.device)

    def save(self) -> None:
        with whole_file(self.path) as temporary, open(temporary, "wb") as file:
            np.savez(file, tokens=self.tokens, made_of=np.array(self.made_of))


class CaptionFeatures:
    """Caption features as the pipeline makes them: `Condition` of texts."""

    def __init__(self, encoder_folder: Path, rows: int, device: torch.device):
        self.encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder").to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(encoder_folder / "tokenizer")
        self.rows, self.device = rows, device

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Condition:
        # Padding rows are masked and carry no position, so padding to the batch's longest is as good as to all rows.
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=self.rows, return_tensors="pt")
        mask = encoded.attention_mask.to(self.device)
        embeds, valid = align_left_padded(self.encoder(encoded.input_ids.to(self.device), mask), mask.bool())
        return Condition(caption_embeds=embeds, caption_mask=valid)


class Batches:
    """Of the training split, by (seed, step) alone: tokens `[B, N]`, texts, captions to drop `[B]`, pixels `[B, 3, Y, X]`."""

    def __init__(self, data: EmojiDataset, store: TokenStore, recipe: GeneratorRecipe):
        self.records, self.store, self.recipe = data.records, store, recipe
        self.indices = data.indices("train")
        weights = np.array([data.records[i]["weight"] for i in self.indices], dtype=np.float64)
        self.cumulative = np.cumsum(weights / weights.sum())

    def _choose(self, count: int, draw: np.random.Generator) -> np.ndarray:
        # Stratified: one draw from each of `count` equal parts of the data, so that a batch is never all flags.
        points = (np.arange(count) + draw.random(count)) / count
        return self.indices[np.searchsorted(self.cumulative, points, side="right").clip(max=len(self.indices) - 1)]

    def captions(self, step: int, part: int = 32) -> Iterator[tuple[list[str], Tensor]]:
        """`plan_captions` texts and their pictures `[part, 3, Y, X]`, in parts of like length: padding costs like words."""
        recipe = self.recipe
        if not recipe.plan_captions:
            return
        chosen = self._choose(recipe.plan_captions, np.random.default_rng((recipe.seed, step, 1)))
        words = random.Random(recipe.seed * 1_000_003 - step - 1)
        texts = [sample_caption(self.records[i], words) for i in chosen]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), part):
            rows = order[start : start + part]
            yield [texts[i] for i in rows], self.store.pictures(chosen[rows], [0] * len(rows))

    def __call__(self, step: int) -> tuple[Tensor, list[str], Tensor, Tensor]:
        recipe = self.recipe
        draw = np.random.default_rng((recipe.seed, step))
        chosen = self._choose(recipe.batch_size, draw)
        variants = draw.integers(0, self.store.variants, len(chosen))
        rows = self.store(chosen, variants)
        words = random.Random(recipe.seed * 1_000_003 + step)
        texts = [sample_caption(self.records[i], words) for i in chosen]
        dropped = torch.from_numpy(draw.random(len(chosen)) < recipe.caption_dropout)
        return rows, texts, dropped, self.store.pictures(chosen, variants)


def drop_captions(condition: Condition, model: LlamaGenTransformer, dropped: Tensor) -> Condition:
    """The null caption where `dropped [B]` is True, behind the row's own mask, as guidance uses it."""
    null = model.null_condition(condition)
    assert condition.caption_embeds is not None and null.caption_embeds is not None
    embeds = torch.where(dropped[:, None, None].to(model.device), null.caption_embeds, condition.caption_embeds)
    return Condition(caption_embeds=embeds, caption_mask=condition.caption_mask)


def noisy(tokens_BN: Tensor, most: float) -> Tensor:
    """Input tokens with a share, uniform from 0 to `most` for each picture, of tokens from anywhere in the batch.

    Drawn pictures hold errors that real ones lack. A model that has seen some leans less on each token and more on the caption.
    """
    share = torch.rand(len(tokens_BN), 1, device=tokens_BN.device) * most
    others = tokens_BN.flatten()[torch.randperm(tokens_BN.numel(), device=tokens_BN.device)].view_as(tokens_BN)
    return torch.where(torch.rand(tokens_BN.shape, device=tokens_BN.device) < share, others, tokens_BN)


class Plan(nn.Module):
    """A training loss that asks every position for what is still to be drawn, as a thumbnail of the whole picture.

    A caption tells about 9 of the 500 nats in a picture, most of them at its first few tokens, so next-token loss alone hardly
    asks to read it. Colours and outline of all that is to come, at every position, ask for it everywhere. One linear map of
    the model's features, which is thrown away after training.

    Args:
        dim: width of the features. grid_size: side of the token grid. side: of the thumbnail, which divides the grid's.
    """

    def __init__(self, dim: int, grid_size: int, side: int):
        super().__init__()
        self.side = side
        self.colours = nn.Linear(dim, 3 * side * side)
        last = torch.arange(side).repeat_interleave(side) + 1
        row = torch.arange(grid_size * grid_size) // grid_size  # of the token that a position predicts
        self.register_buffer("to_come", (last[None] * (grid_size // side) > row[:, None]).float(), persistent=False)

    def forward(self, features_BNC: Tensor, pixels: Tensor) -> Tensor:
        """Mean squared error of the colours at the first n positions `[B, n, dim]` of pictures `[B, 3, Y, X]` in [-1, 1].

        Cells drawn already count zero.
        """
        target = F.adaptive_avg_pool2d(pixels, self.side).flatten(2)  # [B, 3, S]
        error = (self.colours(features_BNC).unflatten(-1, (3, -1)) - target[:, None]).square().mean(2)
        return (error * self.to_come[: error.shape[1]]).mean()


class CodePrior(nn.Module):
    """Weights that tokens share by where their codes lie, added to the embedding and the head while training.

    A head of rows R phi(c), with phi the code's entries and their products, makes logits a quadratic form in the code: like
    codes get like probabilities before each token has been seen often enough to learn its own row. Saving folds the sum into
    plain weights, so the trained model is an ordinary one.
    """

    def __init__(self, codes_VE: Tensor, dim: int):
        super().__init__()
        E = codes_VE.shape[1]
        i, j = torch.triu_indices(E, E)
        products = codes_VE[:, i] * codes_VE[:, j]
        features = torch.cat([codes_VE, products], dim=1)
        features = (features - features.mean(0)) / features.std(0).clamp_min(1e-6)
        self.register_buffer("features", features, persistent=False)
        self.embedding = nn.Parameter(torch.randn(features.shape[1], dim) * 0.02)
        self.head = nn.Parameter(torch.zeros(features.shape[1], dim))

    def weights(self, model: LlamaGenTransformer) -> dict[str, Tensor]:
        """The summed weights, by parameter name."""
        return {
            "tok_embeddings.weight": model.tok_embeddings.weight + self.features @ self.embedding,
            "output.weight": model.output.weight + self.features @ self.head,
        }

    def folded(self, model: LlamaGenTransformer) -> dict[str, Tensor]:
        """The model's state dict with the sums in place."""
        with torch.no_grad():
            return {key: value.detach().clone() for key, value in {**model.state_dict(), **self.weights(model)}.items()}


def optimizers(model: LlamaGenTransformer, prior: CodePrior, recipe: GeneratorRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks and caption projection, AdamW for embeddings, head and norms; or AdamW for all."""
    inside = ("layers.", "cls_embedding.cap_proj.")
    blocks = [p for name, p in model.named_parameters() if name.startswith(inside) and p.dim() == 2]
    taken = {id(p) for p in blocks} if recipe.optimizer == "muon" else set()
    rest = [p for p in [*model.parameters(), *prior.parameters()] if id(p) not in taken]
    adamw = torch.optim.AdamW(rest, lr=recipe.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    if recipe.optimizer == "adamw":
        return [adamw]
    if recipe.optimizer != "muon":
        raise ValueError(f"optimizer must be 'muon' or 'adamw', got {recipe.optimizer!r}")
    return [Muon(blocks, lr=recipe.schedule.learning_rate, weight_decay=recipe.weight_decay), adamw]


@torch.no_grad()
def evaluate_generator(
    model: LlamaGenTransformer,
    store: TokenStore,
    indices: np.ndarray,
    data: EmojiDataset,
    features: CaptionFeatures,
    batch_size: int = 16,
) -> dict[str, float]:
    """Loss and mean entropy of the next-token laws on pictures `indices`, plainly captioned, both in nats per token."""
    model.eval()
    loss = entropy = count = 0.0
    amp = torch.autocast(features.device.type, torch.bfloat16, enabled=fast_dtype(features.device) == torch.bfloat16)
    for start in range(0, len(indices), batch_size):
        part = indices[start : start + batch_size]
        rows = store(part, np.zeros_like(part)).to(features.device)
        with amp:
            logits = model(rows, features([captions(data.records[i])[0] for i in part])).logits
        log_law = logits.log_softmax(-1)
        loss -= log_law.gather(-1, rows[..., None]).sum().item()
        entropy -= (log_law.exp() * log_law).sum().item()
        count += rows.numel()
    model.train()
    return {"held_out_loss": loss / count, "entropy": entropy / count}


def train_generator(
    recipe: GeneratorRecipe,
    data: EmojiDataset,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; weights land in `folder/transformer`.

    These are the best by held-out loss, mixed with as much of the last as does not make them worse.

    Args:
        tokenizer_folder: a saved `VQModel`. text_encoder_folder: holds `text_encoder/` and `tokenizer/`.

    Raises:
        ValueError: for a share of noise outside [0, 1], a negative weight or number of captions, captions without a weight,
            pictures, tokenizer and model that do not fit each other, or a run or tokens in `folder` that are damaged.

    Returns the held-out figures of these weights: `held_out_loss` and `entropy`, nats per token.
    """
    if not 0 <= recipe.token_noise <= 1:
        raise ValueError(f"token_noise must be a share from 0 to 1, got {recipe.token_noise}")
    if recipe.plan_weight < 0 or recipe.plan_captions < 0 or (recipe.plan_captions and not recipe.plan_weight):
        raise ValueError(
            f"plan_weight and plan_captions must be 0 or more, and captions need a weight above 0; got plan_weight "
            f"{recipe.plan_weight}, plan_captions {recipe.plan_captions}"
        )
    torch.manual_seed(recipe.seed)
    model = LlamaGenTransformer(**{"condition": "text", "dropout": recipe.dropout, **recipe.model}).to(device)
    vqvae = VQModel.from_pretrained(tokenizer_folder).to(device)
    check_fit(model, vqvae, data.images.shape[1])
    run = TrainingRun(
        folder, {"kind": "generator", "model": dict(recipe.model), "seed": recipe.seed}, recipe.schedule.steps
    )
    store = TokenStore(folder / "tokens.npz", data.images, vqvae, recipe, device)
    prior = CodePrior(vqvae.quantize.codebook().detach().float(), model.config.dim).to(device)
    evaluated = LlamaGenTransformer.from_config(model.config).to(device)  # the ordinary model that would be saved
    features = CaptionFeatures(text_encoder_folder, model.config.cls_token_num, device)
    held_out = data.indices("validation")
    sample = held_out[:: max(1, len(held_out) // 96)]  # for the curve; the final figures take all

    plan = Plan(model.config.dim, model.config.grid_size, math.gcd(8, model.config.grid_size)).to(device)

    steppers = [*optimizers(model, prior, recipe), torch.optim.AdamW(plan.parameters(), lr=recipe.adamw_learning_rate)]
    start, best = 0, float("inf")
    best_weights: dict[str, Tensor] = {}
    if state := run.resume(device, ("model", "prior", "optimizers")):
        model.load_state_dict(state["model"])
        prior.load_state_dict(state["prior"])
        if "plan" in state:  # a run begun without it has none
            plan.load_state_dict(state["plan"])
        for stepper, saved in zip(steppers, state["optimizers"], strict="plan" in state):
            stepper.load_state_dict(saved)
        start = state["step"]
        if state.get("tokens") == store.made_of:  # losses on other tokens say nothing
            best, best_weights = state["best"], state["best_weights"]
    batches = Batches(data, store, recipe)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)

    def save(step: int) -> None:
        store.save()
        saved = [stepper.state_dict() for stepper in steppers]
        run.checkpoint(
            step,
            model=model.state_dict(),
            prior=prior.state_dict(),
            plan=plan.state_dict(),
            optimizers=saved,
            tokens=store.made_of,
            best=best,
            best_weights=best_weights,
        )

    model.train()
    for step in run.progress(start):
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = stepper.defaults["lr"] * recipe.schedule.factor(step)
        torch.manual_seed(recipe.seed * 1_000_003 + step)  # dropout and noise, too, are functions of the step
        rows, texts, dropped, pixels = batches(step)
        rows = rows.to(device)
        condition = drop_captions(features(texts), model, dropped)
        given = noisy(rows, recipe.token_noise) if recipe.token_noise else rows
        with amp:
            output = torch.func.functional_call(model, prior.weights(model), (given, condition))
        loss = F.cross_entropy(output.logits.flatten(0, 1), rows.flatten())
        planned = plan(output.features.float(), pixels) if recipe.plan_weight else loss.new_zeros(())
        for stepper in steppers:
            stepper.zero_grad(set_to_none=True)
        (loss + recipe.plan_weight * planned).backward()
        for asked, drawn in batches.captions(step):
            with amp:  # one token, which nothing follows: the caption's rows alone go through the model
                alone = model(rows.new_zeros(len(asked), 1), features(asked)).features
            share = recipe.plan_weight * len(asked) / recipe.plan_captions
            (share * plan(alone.float(), drawn)).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *prior.parameters()], 1.0)
        for stepper in steppers:
            stepper.step()
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss.detach(), **({"plan": planned.detach()} if recipe.plan_weight else {}))
        if done % recipe.evaluate_every == 0 or done == recipe.schedule.steps:
            weights = prior.folded(model)
            evaluated.load_state_dict(weights)
            figures = evaluate_generator(evaluated, store, sample, data, features)
            run.log(done, **figures)
            if figures["held_out_loss"] < best:
                best, best_weights = figures["held_out_loss"], weights
        if done % recipe.checkpoint_every == 0 or done == recipe.schedule.steps:
            save(done)
    last = prior.folded(model)
    if best_weights and not torch.equal(best_weights["output.weight"], last["output.weight"]):
        # Weights of one run average well (Izmailov et al. 2018, arXiv:1803.05407). Between the best and the last the held-out
        # loss first falls, then rises to the last's, while training pictures are learned ever better: so the last weights, but
        # with as much of the best in them as it takes to lose nothing on held-out pictures.
        for share in _SHARES:
            mixed = {key: best_weights[key].lerp(value, share) for key, value in last.items()}
            evaluated.load_state_dict(mixed)
            held = evaluate_generator(evaluated, store, sample, data, features)["held_out_loss"]
            run.log(recipe.schedule.steps, share_of_last=share, mixed_held_out_loss=held)
            if held <= best:
                best_weights = mixed
                break
    evaluated.load_state_dict(best_weights or last)  # none yet: a finished run, opened with another tokenizer
    figures = evaluate_generator(evaluated, store, held_out, data, features)
    if not math.isfinite(figures["held_out_loss"]):
        raise ValueError(f"the run in {folder} diverged (held-out loss {figures['held_out_loss']}): lower the learning rates")
    run.log(recipe.schedule.steps, final_held_out_loss=figures["held_out_loss"], final_entropy=figures["entropy"])
    with whole_files(folder / "transformer") as staged:
        evaluated.eval().save_pretrained(staged)
    run.plot(("loss", "held_out_loss"), ("entropy",))
    logger.info("generator %s: %s", folder, figures)
    return figures

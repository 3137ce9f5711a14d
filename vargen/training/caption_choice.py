"""Does a model read its captions? A picture's likelihood under its own caption beside that under captions of other pictures.

Losses of all tokens hardly tell: most of them are texture. Every kind of generator is asked the same, of the same pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vargen.training.emoji import EmojiDataset, captions, is_held_out_cell
from vargen.training.focus import Focus


def spread(members: Sequence[int], count: int) -> list[int]:
    """At most `count` of them, evenly spread."""
    if len(members) <= count:
        return list(members)
    return [members[len(members) * place // count] for place in range(count)]


def evaluation_groups(data: EmojiDataset, focus: Focus, **counts: int) -> dict[str, list[int]]:
    """Pictures without skin tone, spread evenly over the data; groups that the data lacks are left out.

    `seen`: in training, of the kinds that it sees most. `styles`: held out, of concepts that it knows in other styles.
    `concepts`: one picture of each held-out concept, in the styles that training sees most by turns.

    Args:
        counts: most pictures of each group; 64 by default.
    """
    records = data.records
    plain = [i for i, record in enumerate(records) if not record["skin_tone"]]
    known = [i for i in plain if records[i]["split"] == "train" and not is_held_out_cell(records[i])]
    most = max((focus.factor(records[i]) for i in known), default=0.0)
    of_concept: dict[str, list[int]] = {}
    for i in plain:
        if records[i]["split"] == "validation":
            of_concept.setdefault(records[i]["concept"], []).append(i)
    concepts = []
    for turn, members in enumerate(of_concept.values()):
        best = max(focus.factor(records[i]) for i in members)
        usual = [i for i in members if focus.factor(records[i]) == best]
        concepts.append(usual[turn % len(usual)])
    groups = {
        "seen": [i for i in known if focus.factor(records[i]) == most],
        "styles": [i for i in plain if is_held_out_cell(records[i])],
        "concepts": concepts,
    }
    return {name: spread(members, counts.get(name, 64)) for name, members in groups.items() if members}


def candidate_captions(data: EmojiDataset, members: Sequence[int], count: int) -> list[list[str]]:
    """For each picture `count` captions in its style, where there are so many: its own first, then those of others."""
    found = []
    step = max(1, len(members) // count)
    for n, i in enumerate(members):
        others = [members[(n + step * j) % len(members)] for j in range(1, min(count, len(members)))]
        style = data.records[i]["style"]
        found.append([captions({**data.records[j], "style": style})[0] for j in [i, *others]])
    return found


def choice(nats: Tensor) -> dict[str, float]:
    """Figures of pictures' nats under candidates `[n, candidates]`, the right one first.

    `rank`: share of pictures whose own caption is the likeliest. `gap`: by how many nats it is likelier than the others on
    average.
    """
    best = nats[:, :1] <= nats[:, 1:].amin(1, keepdim=True)
    return {"rank": best.float().mean().item(), "gap": (nats[:, 1:].mean() - nats[:, 0].mean()).item()}

"""`python -m hone.recipes.counting [--dir DIR] [--seed N]`: what the recipes `counting-sft` and
`counting-rl` start from. Pictures of coloured shapes, questions on how many have a colour, and
a tiny model of random weights that sees pictures. Needs pillow: `pip install 'pillow>=11.3'`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hone.data.arithmetic import write_jsonl
from hone.extras import import_extra
from hone.models.tiny_vision import make_tiny_vision_model, make_vision_tokenizer
from hone.recipes.inputs import write_inputs
from hone.recipes.turns import said

__all__ = ["Picture", "draw", "invent", "make_counting"]

NUM_TRAIN, NUM_HELD_OUT = 2000, 300
COLOURS = {"red": (220, 40, 40), "blue": (50, 80, 220), "green": (40, 160, 60)}
SHAPES = ("circles", "squares", "triangles")
GRID, CELL = 3, 32
"""A picture has 3 x 3 places of 32 x 32 pixels, each of which is one token of the model."""
MOST = 5
"""Most shapes of the colour that is asked for."""
OTHERS_SHARE = 0.6
"""Share of the remaining places with a shape of another colour."""
QUESTION = "<image>How many are {}?"


class Picture(NamedTuple):
    """What is drawn, and what is asked."""

    places: tuple[tuple[str, str, int, int, int] | None, ...]
    """By place: colour, shape, the centre and half the width in pixels; None for no shape."""
    asked: str
    """Colour of the question."""
    answer: int


def main() -> None:
    """Write the folder."""
    makers = {"counting": make_counting}
    write_inputs("hone.recipes.counting", __doc__, makers, drawn="weights and pictures")


def make_counting(folder: Path, seed: int) -> None:
    """Write a model, and pictures with a question and its answer each. No picture is in both the
    rows to train on and the held-out ones."""
    pictures = invent(NUM_TRAIN + NUM_HELD_OUT, seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "eval.jsonl", _rows(folder, "eval", pictures[:NUM_HELD_OUT]))
    write_jsonl(folder / "train.jsonl", _rows(folder, "train", pictures[NUM_HELD_OUT:]))
    words = ("How many are ", *COLOURS)
    make_tiny_vision_model(
        folder / "model",
        family="qwen3_vl",
        tokenizer=make_vision_tokenizer("qwen3_vl", "0123456789?", words),
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=128,
        initializer_range=0.06,  # at the usual 0.02 features of pictures are small at first
        seed=seed,
    )


def invent(number: int, seed: int) -> list[Picture]:
    """Different pictures. Answers from 0 to `MOST` are equally likely, whatever is asked."""
    generator = random.Random(f"pictures {seed}")
    found: dict[tuple[Any, ...], Picture] = {}
    while len(found) < number:
        picture = _invent(generator)
        found.setdefault(picture.places, picture)
    return [*found.values()]


def draw(picture: Picture) -> Any:
    """The picture as an image of pillow."""
    image_of, pen_of = (
        import_extra("PIL", needed_by="The recipe `counting`", module=f"PIL.{name}")
        for name in ("Image", "ImageDraw")
    )
    image = image_of.new("RGB", (GRID * CELL, GRID * CELL), "white")
    pen = pen_of.Draw(image)
    for place in filter(None, picture.places):
        colour, shape, x, y, half = place
        left, top, right, bottom = x - half, y - half, x + half, y + half
        if shape == "circles":
            pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        elif shape == "squares":
            pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        else:
            pen.polygon([(left, bottom), (right, bottom), (x, top)], fill=COLOURS[colour])
    return image


def _invent(generator: random.Random) -> Picture:
    asked, answer = generator.choice([*COLOURS]), generator.randint(0, MOST)
    others = [colour for colour in COLOURS if colour != asked]
    colours: list[str | None] = [asked] * answer
    while len(colours) < GRID**2:
        drawn = generator.random() < OTHERS_SHARE
        colours.append(generator.choice(others) if drawn else None)
    generator.shuffle(colours)
    places: list[tuple[str, str, int, int, int] | None] = []
    for number, colour in enumerate(colours):
        shape, half = generator.choice(SHAPES), generator.randint(9, 13)
        row, column = divmod(number, GRID)
        y, x = (CELL * n + generator.randint(half + 1, CELL - half - 2) for n in (row, column))
        places.append(None if colour is None else (colour, shape, x, y, half))
    return Picture(tuple(places), asked, answer)


def _rows(folder: Path, name: str, pictures: Sequence[Picture]) -> Iterator[dict[str, Any]]:
    """Rows with the path of a picture from the file of rows, as which it is written."""
    for number, picture in enumerate(pictures):
        path = Path("images", f"{name}-{number:04}.png")
        draw(picture).save(folder / path)
        question = QUESTION.format(picture.asked)
        yield {
            "images": [str(path)],
            "prompt": [said("user", question)],
            "answer": str(picture.answer),
        }


if __name__ == "__main__":
    main()

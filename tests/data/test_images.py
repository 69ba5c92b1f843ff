"""Images of rows: every form gives the same prompt, and bad rows are named."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.config.tree import PairsDataConfig, SFTDataConfig
from hone.data.given import GivenRows, given_rows
from hone.data.pairs import load_pairs
from hone.data.prompts import PromptData, load_prompts
from hone.data.reading import PromptReader
from hone.data.settings import ColumnsConfig, DataConfig, PairSourceConfig, SourceConfig
from hone.data.sft import load_sft
from hone.data.split import is_held_out
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.images.pixels import content_hash
from hone.model_input import ModelInput, prompt_digest
from hone.rollout.transcripts import Transcripts
from hone.types import Observation, Prompt, Sample, StopReason, Turn
from tests.data.support import char_tokenizer, write_rows
from tests.images.drawn import drawn, encoded
from tests.images.family import Family
from tests.tables import table

A, B = encoded(drawn(1, 64, 96)), encoded(drawn(2, 70, 40))
QUESTION = "<image> or <image>?"
PARTS: list[dict[str, Any]] = [
    {"type": "image"},
    {"type": "text", "text": " or "},
    {"type": "image"},
    {"type": "text", "text": "?"},
]
DIALOGUE = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "b.png").write_bytes(B)
    return tmp_path


def load(family: Family, path: Path | str, columns: Any = None, **settings: Any) -> PromptData:
    source = SourceConfig(path=str(path), columns=columns or {})
    cfg = DataConfig(train=(source,), shuffle=False, **settings)
    return load_prompts(cfg, family.tokenizer, images=family.reader(), keeps_messages=True)


def prompt_of(family: Family, folder: Path, row: dict[str, Any], **settings: Any) -> Prompt:
    path = write_rows(folder / "train.jsonl", [{"answer": "1", **row}])
    return load(family, path, **settings).known_rows()[0]


def expected(family: Family, *images: bytes, text: str = QUESTION) -> tuple[list[int], list[str]]:
    """Ids and hashes of a user's message, written by hand with the family's marks."""
    reader = family.reader()
    row = reader.read(list(images), None)
    marks = text.replace("<image>", reader.settings.bare)
    text = f"<|im_start|>{marks}<|im_end|><|im_start|>"
    hashes = [content_hash(image.file.digest, reader.settings, 0) for image in row]
    return family.ids(reader.expand(text, row, "")), hashes


def check(prompt: Prompt, reference: tuple[list[int], list[str]]) -> None:
    ids, hashes = reference
    assert list(prompt.token_ids) == ids
    assert [content.hash for content in prompt.model_input.contents] == hashes


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def inline(**first: Any) -> dict[str, Any]:
    """A message whose parts hold the images, the second as a path."""
    parts = [dict(part) for part in PARTS]
    parts[0] = {"type": "image", **first} if "image_url" not in first else {
        "type": "image_url",
        **first,
    }  # fmt: skip
    parts[2]["path"] = "b.png"
    return {"messages": [{"role": "user", "content": parts}]}


FORMS: dict[str, dict[str, Any]] = {
    "paths": {"images": ["a.png", "b.png"], "prompt": QUESTION},
    "geometry3k": {"images": ["a.png", "b.png"], "problem": QUESTION},
    "data URIs": {"images": [uri(A), uri(B)], "prompt": QUESTION},
    "a URI and a path": {"images": [uri(A), {"bytes": None, "path": "b.png"}], "prompt": QUESTION},
    "marks in a message": {"images": ["a.png", "b.png"], "messages": DIALOGUE},
    "marks in a part": {
        "images": ["a.png", "b.png"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
    },
    "empty parts": {
        "images": ["a.png", "b.png"],
        "messages": [{"role": "user", "content": PARTS}],
    },
    "one column, one part": {
        "images": ["b.png"],
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "a.png"}, *PARTS[1:]]}
        ],
    },
    "image": inline(image="a.png"),
    "url": inline(url=uri(A)),
    "path": inline(path="a.png"),
    "image_url": inline(image_url={"url": uri(A)}),
    "image_url, a text": inline(image_url=uri(A)),
}


@table("form", FORMS)
def test_every_form_gives_the_same_prompt(family: Family, folder: Path, form: str) -> None:
    check(prompt_of(family, folder, FORMS[form]), expected(family, A, B))


def test_binary_forms(family: Family, folder: Path) -> None:
    """The hub's feature in Parquet, a saved data set, and rows of a program."""
    import pyarrow as pa
    from pyarrow import parquet

    datasets = pytest.importorskip("datasets")
    feature = [{"bytes": A, "path": "x.png"}, {"bytes": B, "path": None}]
    columns = {"images": [feature], "problem": [QUESTION], "answer": ["1"]}
    parquet.write_table(pa.table(columns), folder / "train.parquet")
    check(load(family, folder / "train.parquet").known_rows()[0], expected(family, A, B))
    kinds = datasets.Features(
        images=datasets.Sequence(datasets.Image()),
        problem=datasets.Value("string"),
        answer=datasets.Value("string"),
    )
    saved = datasets.Dataset.from_dict(columns, features=kinds)
    saved.save_to_disk(folder / "saved")
    (prompt,) = load(family, folder / "saved").known_rows()
    check(prompt, expected(family, A, B))
    assert prompt.metadata["images"] == ["x.png", "<image>"]
    given = [{"images": [A, drawn(2, 70, 40)], "prompt": QUESTION, "answer": "1"}]
    file = GivenRows.of("train", given_rows(given, "data")).write(folder / "given")
    ids, (first, _) = expected(family, A, B)
    (prompt,) = load(family, file).known_rows()
    assert (list(prompt.token_ids), prompt.model_input.contents[0].hash) == (ids, first)
    assert prompt.metadata["images"] == ["<image>", "<image>"]


def test_paths_of_a_program_start_at_its_folder(
    family: Family, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    given = [{"images": ["a.png", Path("b.png")], "prompt": QUESTION}]
    file = GivenRows.of("train", given_rows(given, "data")).write(folder / "elsewhere")
    check(load(family, file).known_rows()[0], expected(family, A, B))


def test_images_without_a_mark_come_before_the_text(family: Family, folder: Path) -> None:
    whole = expected(family, A, B, text="<image><image>which?")
    images = {"images": ["a.png", "b.png"]}
    check(prompt_of(family, folder, {**images, "prompt": "which?"}), whole)
    dialogue = [{"role": "user", "content": "which?"}]
    check(prompt_of(family, folder, {**images, "messages": dialogue}), whole)
    check(
        prompt_of(family, folder, {"image": "a.png", "prompt": "?"}),
        expected(family, A, text="<image>?"),
    )
    mixed = {**images, "prompt": "which?"}
    check(prompt_of(family, folder, mixed, prompt_template="{prompt} <image> <image>"), expected(
        family, A, B, text="which? <image> <image>"
    ))  # fmt: skip


def test_without_a_chat_template_the_family_has_its_marks(family: Family, folder: Path) -> None:
    prompt = prompt_of(family, folder, FORMS["paths"], chat="never")
    ids, hashes = expected(family, A, B)
    check(prompt, (ids[1:-2], hashes))  # without the template's header and end


def test_a_row_without_images_is_text(family: Family, folder: Path) -> None:
    rows = [{"images": [], "prompt": "a"}, {"images": None, "prompt": "b"}, {"prompt": "<image>"}]
    path = write_rows(folder / "train.jsonl", [*rows, FORMS["paths"]])
    *texts, _ = load(family, path).known_rows()
    assert not any(prompt.model_input for prompt in texts)
    assert texts[2].text == "<|im_start|><image><|im_end|><|im_start|>"


def test_rewards_and_files_get_no_bytes(family: Family, folder: Path) -> None:
    prompt = prompt_of(family, folder, FORMS["a URI and a path"])
    assert prompt.metadata["images"] == ["<image>", {"bytes": None, "path": "b.png"}]
    prompt = prompt_of(family, folder, FORMS["url"])
    assert prompt.metadata["messages"] == [{"role": "user", "content": PARTS}]
    assert prompt.messages == ({"role": "user", "content": PARTS},)
    assert "base64" not in json.dumps([prompt.metadata, prompt.unrendered, prompt.text])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few marks": (
        {"images": ["a.png", "b.png"], "prompt": "<image>?"},
        r"train\.jsonl, line 2: 2 images in the row's column of images, and 1 place for them",
    ),
    "too many marks": (
        {"images": ["a.png"], "prompt": "<image><image>?"},
        r"line 2: 1 image in the row's column of images, and 2 places",
    ),
    "too few marks in messages": (
        {"images": ["a.png", "b.png"], "messages": [{"role": "user", "content": "<image>?"}]},
        r"line 2: 2 images in the row's column of images, and 1 place",
    ),
    "a part without an image": (
        {"messages": [{"role": "user", "content": PARTS}]},
        r"line 2: 0 images in the row's column of images, and 2 places",
    ),
    "missing file": (
        {"images": ["a.png", "nothing.png"], "prompt": "?"},
        r"line 2, column 'images': image 2 does not exist: .*nothing\.png.* data\.image_errors",
    ),
    "broken file": (
        {"image": uri(A[:-200]), "prompt": "?"},
        r"line 2, column 'image': image 1 cannot be decoded",
    ),
    "no image": ({"images": [7], "prompt": "?"}, r"line 2, column 'images': image 1 is a value of"),
    "URL": ({"image": "https://example.org/a.png", "prompt": "?"}, r"image 1 is the URL"),
    "too long": ({"image": uri(encoded(drawn(1, 2, 900))), "prompt": "?"}, r"image 1 is 900 x 2"),
    "of the assistant": (
        {"messages": [*DIALOGUE, {"role": "assistant", "content": PARTS}, *DIALOGUE]},
        r"line 2: message 2, of the assistant, has an image",
    ),
    "nobody asks": (
        {"images": ["a.png"], "messages": [{"role": "tool", "content": "?"}]},
        r"line 2: the row has images without a mark <image>, and no message of the user",
    ),
    "placeholder": (
        {"images": ["a.png"], "prompt": "<image><|image_pad|>"},
        r"line 2: the text of a message of the role 'user' has '<\|image_pad\|>'",
    ),
    "placeholder without an image": (
        {"images": None, "prompt": "<|image_pad|>"},
        r"line 2: the text of a message of the role 'user' has '<\|image_pad\|>'",
    ),
}


@table("case", BAD)
def test_a_bad_row_is_named(family: Family, folder: Path, case: str) -> None:
    row, message = BAD[case]
    good = {"prompt": "a"} if "prompt" in row else {"messages": [{"role": "user", "content": "a"}]}
    path = write_rows(folder / "train.jsonl", [good, row])
    with pytest.raises(UserError, match=message):
        load(family, path)


def test_an_image_in_the_answer(family: Family, folder: Path) -> None:
    rows = [{"messages": [*DIALOGUE, {"role": "assistant", "content": PARTS}]}]
    path = write_rows(folder / "train.jsonl", rows)
    cfg = SFTDataConfig(train=(SourceConfig(path=path),))
    with pytest.raises(UserError, match=r"line 1: the answer has an image"):
        load_sft(cfg, family.tokenizer, seed=0, images=family.reader())
    path = write_rows(folder / "train.jsonl", [{"prompt": "a", "completion": "<|image_pad|>"}])
    with pytest.raises(UserError, match=r"line 1: .* role 'assistant' has '<\|image_pad\|>'"):
        load_sft(cfg, family.tokenizer, seed=0, images=family.reader())


def test_rows_with_bad_images_are_dropped_and_counted(family: Family, folder: Path) -> None:
    rows = [FORMS["paths"], {"images": ["x.png"], "prompt": "?"}, {"prompt": "a"}]
    broken = {"image": uri(A[:-200]), "prompt": "?"}
    path = write_rows(folder / "train.jsonl", [{"answer": 1, **row} for row in rows])
    data = load(family, path, image_errors="drop")
    assert [prompt.id for prompt in data.known_rows()] == ["train:1", "train:3"]
    assert "2 of 3 rows kept" in data.report.summary(2)
    assert "1 dropped for an image: " in data.report.summary(2)
    assert "line 2, column 'images': image 1 does not exist" in data.report.summary(2)
    cfg = DataConfig(train=(SourceConfig(path=path),), image_errors="drop")
    reader = PromptReader(
        cfg, family.tokenizer, seed=0, max_prompt_tokens=400, images=family.reader()
    )
    read = [(row, prompt.id) for row, prompt in reader.read()]
    assert read == [(0, "train:1"), (2, "train:3")]
    path = write_rows(folder / "train.jsonl", [broken])
    with pytest.raises(UserError, match=r"none of the 1 rows has images .*cannot be decoded"):
        load(family, path, image_errors="drop")


def test_a_text_model_refuses_images(family: Family, folder: Path) -> None:
    path = write_rows(folder / "train.jsonl", [FORMS["paths"]])
    source = SourceConfig(path=path)
    with pytest.raises(UserError, match=r"line 1, column 'images': .* `columns\.images`"):
        load_prompts(DataConfig(train=(source,)), char_tokenizer())
    left_out = source.model_copy(update={"columns": ColumnsConfig(images="")})
    cfg = DataConfig(train=(left_out,))
    (prompt,) = load_prompts(cfg, family.tokenizer).known_rows()
    assert not prompt.model_input


def test_two_columns_of_images_are_ambiguous(family: Family, folder: Path) -> None:
    rows = [{"images": ["a.png"], "prompt": "?"}, {"image": "b.png", "prompt": "?"}]
    path = write_rows(folder / "train.jsonl", rows)
    with pytest.raises(UserError, match=r"any of the columns images, image\. .*columns\.images"):
        load(family, path)
    assert len(load(family, path, {"images": "image"}).known_rows()) == 2


def test_the_length_filter_counts_image_tokens(family: Family, folder: Path) -> None:
    ids, _ = expected(family, A, B)
    path = write_rows(folder / "train.jsonl", [FORMS["paths"], {"prompt": "a"}])
    assert len(load(family, path, max_prompt_tokens=len(ids)).known_rows()) == 2
    data = load(family, path, max_prompt_tokens=len(ids) - 1)
    assert [row.num_tokens for row in data.report.dropped] == [len(ids)]
    assert len(family.ids(QUESTION)) + 3 < len(ids) - 1


def test_a_template_that_writes_no_images_is_refused(family: Family, folder: Path) -> None:
    tokenizer = char_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    path = write_rows(folder / "train.jsonl", [FORMS["paths"]])
    cfg = DataConfig(train=(SourceConfig(path=path),))
    with pytest.raises(UserError, match=r"line 1: .* 0 x .* 2 images\. .*model\.chat_template"):
        load_prompts(cfg, tokenizer, images=family.reader())


def test_a_template_that_leaves_out_the_text_of_images(family: Family, folder: Path) -> None:
    whole = family.tokenizer.chat_template
    changed = replace_template(family, whole.replace("{{ part['text'] }}", ""))
    try:
        with pytest.raises(UserError, match=r"leaves out a text of message 1, of the role 'user'"):
            prompt_of(family, folder, FORMS["paths"])
    finally:
        replace_template(family, changed)


def replace_template(family: Family, template: str) -> str:
    before = family.tokenizer.chat_template
    family.tokenizer.chat_template = template
    return before


def test_prompts_with_other_images_are_other_prompts(family: Family, folder: Path) -> None:
    (folder / "c.png").write_bytes(encoded(drawn(3, 64, 96)))
    rows = [{"image": name, "prompt": "?"} for name in ("a.png", "c.png", "a.png")]
    path = write_rows(folder / "train.jsonl", rows)
    first, second, third = load(family, path).known_rows()
    assert first.token_ids == second.token_ids
    digests = [prompt_digest(x.token_ids, x.model_input) for x in (first, second, third)]
    assert digests[0] == digests[2] != digests[1]
    rows = [_Row(prompt.token_ids, prompt.model_input) for prompt in (first, second, third)]
    sides = [[is_held_out(row, seed=seed, fraction=0.5) for row in rows] for seed in range(40)]
    assert all(one == third for one, _, third in sides)
    assert any(one != other for one, other, _ in sides)


class _Row:
    is_cut = False

    def __init__(self, prompt_ids: Any, model_input: ModelInput) -> None:
        self.prompt_ids, self.model_input = prompt_ids, model_input


# --------------------------------------------------------------- demonstrations, preferences


def placed(family: Family, ids: Any, model_input: ModelInput, *images: bytes) -> None:
    """The contents are these images, at the runs of placeholders among the ids."""
    pad = family.reader().settings.placeholder_id
    places = [n for n, token in enumerate(ids) if token == pad]
    assert places
    assert [n for x in model_input.contents for n in range(x.start, x.stop)] == places
    hashes = expected(family, *images, text="<image>" * len(images))[1]
    assert [x.hash for x in model_input.contents] == hashes


def test_demonstrations(family: Family, folder: Path) -> None:
    rows = [
        {**FORMS["paths"], "completion": "both"},
        {"images": "b.png", "prompt": "?", "completion": "b"},
    ]
    path = write_rows(folder / "train.jsonl", rows)
    cfg = SFTDataConfig(train=(SourceConfig(path=path),), shuffle=False)
    first, second = load_sft(cfg, family.tokenizer, seed=0, images=family.reader()).known_rows()
    placed(family, first.token_ids, first.model_input, A, B)
    placed(family, second.token_ids, second.model_input, B)
    assert first.token_ids[: len(expected(family, A, B)[0])] == expected(family, A, B)[0]
    answer = [
        token for token, trained in zip(first.token_ids, first.loss_mask, strict=True) if trained
    ]
    assert family.tokenizer.decode(answer).startswith("both")
    dialogue = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "both"}]
    path = write_rows(
        folder / "train.jsonl", [{"images": ["a.png", "b.png"], "messages": dialogue}]
    )
    (row,) = load_sft(cfg, family.tokenizer, seed=0, images=family.reader()).known_rows()
    assert (row.token_ids, row.model_input) == (first.token_ids, first.model_input)


def test_preferences_and_transcripts_of_a_template_that_moves_the_prompt(
    family: Family, folder: Path
) -> None:
    """A reward model's row has its images where the template of a whole dialogue has them."""
    rows = [{**FORMS["paths"], "chosen": "both", "rejected": "none"}]
    path = write_rows(folder / "train.jsonl", rows)
    cfg = PairsDataConfig(train=(PairSourceConfig(path=path),))
    whole = family.tokenizer.chat_template
    moved = "{% if messages[-1]['role'] == 'assistant' %}done: {% endif %}" + whole
    replace_template(family, moved)
    try:
        for for_reward_model in (False, True):
            (pair,) = load_pairs(
                cfg,
                family.tokenizer,
                seed=0,
                for_reward_model=for_reward_model,
                images=family.reader(),
            ).known_rows()
            for row in pair.rows:
                placed(family, row.token_ids, row.model_input, A, B)
                text = family.tokenizer.decode(row.token_ids)
                assert text.startswith("done: ") == for_reward_model
    finally:
        replace_template(family, whole)


def test_a_reward_model_of_text_refuses_images(family: Family, folder: Path) -> None:
    prompt = prompt_of(family, folder, FORMS["paths"])
    cfg = DataConfig(train=())
    transcripts = Transcripts(char_tokenizer(), cfg, max_tokens=400, vocab_size=99, path="judge")
    with pytest.raises(UserError, match=r"row train:1 has an image, and the reward model reads te"):
        transcripts.check(prompt)


# --------------------------------------------------------------- turns


def sample_of(prompt: Prompt, said: list[int], text: str) -> Sample:
    number = len(said)
    sample = Sample(
        id="s", prompt=prompt, index=0, token_ids=said, logprobs=[0.0] * number,
        weight_versions=[0] * number, loss_mask=[True] * number,
        stop_reason=StopReason.STOP_STRING,
    )  # fmt: skip
    sample.turns.append(Turn(start=0, end=number, text=text, stop_reason=StopReason.STOP_STRING))
    return sample


def test_later_turns_append_text_alone(family: Family, folder: Path) -> None:
    prompt = prompt_of(family, folder, FORMS["paths"])
    cfg = DataConfig(train=())
    render = TurnRenderer(
        family.tokenizer, cfg, vocab_size=len(family.tokenizer), images=family.reader()
    )
    sample = sample_of(prompt, family.ids("hm"), "hm")
    text, _, ids, _ = render(sample, Observation("look again"))
    assert text == "<|im_end|><|im_start|>look again<|im_end|><|im_start|>"
    assert list(ids) == family.ids(text)
    with pytest.raises(ValueError, match=r"the environment says '<\|image_pad\|>'"):
        render(sample, Observation("what is <|image_pad|>?"))
    shown = [{"role": "user", "content": PARTS[:1]}]
    with pytest.raises(ValueError, match="shows an image part without an image"):
        render(sample, Observation(shown))


def test_a_session_opens_a_prompt_with_images(family: Family, folder: Path) -> None:
    prompt = prompt_of(family, folder, FORMS["paths"])
    render = TurnRenderer(
        family.tokenizer, DataConfig(train=()), vocab_size=len(family.tokenizer),
        images=family.reader(),
    )  # fmt: skip
    opened = render.opening(prompt, Observation(" Go."))
    check(opened, expected(family, A, B, text=f"{QUESTION} Go."))
    system = [{"role": "user", "content": "hello"}]
    later = render.opening(prompt, Observation(system))
    placed(family, later.token_ids, later.model_input, A, B)
    assert replace(later, token_ids=(), text="", messages=(), unrendered="") == replace(
        prompt, token_ids=(), text="", messages=(), unrendered=""
    )

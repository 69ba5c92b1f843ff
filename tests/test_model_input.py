"""What a sequence holds besides ids: identity, messages, and who refuses it."""

from __future__ import annotations

import copy
import pickle
from array import array
from dataclasses import replace
from hashlib import blake2b

import pytest

from hone.algorithms.preferences.kto import KTO
from hone.algorithms.settings import PreferenceConfig
from hone.data.chat import Rendered
from hone.data.split import is_held_out
from hone.model_input import TEXT, Content, InputSpec, ModelInput, prompt_digest, same_until
from hone.rollout.state import group_from_dict, group_to_dict, request_from_dict, request_to_dict
from hone.trainer.collating import check_rows
from hone.trainer.prefixes import shared_prefixes
from hone.types import Group, Preference, Prompt, Request, Row, SamplingParams
from tests.tables import table

IMAGE = Content(kind="image", hash="a", start=2, num_tokens=3, shape=(1, 1, 3))
OTHER = replace(IMAGE, hash="b")
LATER = Content(kind="image", hash="c", start=6, num_tokens=1)


def test_contents_come_in_order_and_take_tokens():
    assert ModelInput((IMAGE, LATER)).key == ((2, "a"), (6, "c"))
    for wrong in [(LATER, IMAGE), (IMAGE, OTHER), (replace(IMAGE, num_tokens=0),)]:
        with pytest.raises(ValueError, match="may start at"):
            ModelInput(wrong)


@table(
    "start, stop, key",
    [
        (0, 2, ()),
        (0, 3, ((2, "a"),)),
        (4, 6, ((2, "a"),)),
        (5, 6, ()),
        (4, 8, ((2, "a"), (6, "c"))),
        (7, 9, ()),
    ],
)
def test_a_stretch_of_tokens_has_the_key_of_the_contents_in_it(start, stop, key):
    assert ModelInput((IMAGE, LATER)).key_of(start, stop) == key


@table(
    "inputs, expected",
    [
        ((), 9),
        ((TEXT, TEXT), 9),
        ((ModelInput((IMAGE,)), ModelInput((IMAGE,))), 9),
        ((ModelInput((IMAGE,)), ModelInput((OTHER,))), 2),
        ((ModelInput((IMAGE,)), TEXT), 2),
        ((ModelInput((IMAGE, LATER)), ModelInput((IMAGE,))), 6),
        ((ModelInput((LATER,)), ModelInput((IMAGE, LATER))), 2),
    ],
)
def test_sequences_are_the_same_up_to_the_first_content_that_differs(inputs, expected):
    assert same_until(inputs, 9) == expected


def test_a_message_names_the_input_of_texts_once():
    requests = [
        Request(id=str(i), prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=1))
        for i in range(100)
    ]
    sent = pickle.dumps(requests, protocol=5)
    assert sent.count(b"model_input") == 1
    assert all(request.model_input is TEXT for request in pickle.loads(sent))
    assert copy.deepcopy(TEXT) is TEXT
    image = replace(requests[0], model_input=ModelInput((IMAGE,)))
    assert pickle.loads(pickle.dumps(image)) == image


def prompt(model_input: ModelInput = TEXT) -> Prompt:
    return Prompt(id="p", token_ids=(1, 2, 9, 9, 9, 3), text="", model_input=model_input)


def test_unfinished_samples_keep_their_input_in_a_checkpoint():
    group = Group(id="g", prompt=prompt(ModelInput((IMAGE,))), samples=[])
    assert group_from_dict(group_to_dict(group)) == group
    request = Request(
        id="r",
        prompt_ids=group.prompt.token_ids,
        sampling=SamplingParams(max_tokens=1),
        model_input=group.prompt.model_input,
    )
    assert request_from_dict(request_to_dict(request)) == request
    before = request_to_dict(request)
    del before["model_input"]  # as checkpoints have it that were written before there was one
    assert request_from_dict(before) == replace(request, model_input=TEXT)


def test_a_text_has_the_digest_of_its_ids_and_an_image_another():
    ids = (1, 2, 9, 9, 9, 3)
    assert prompt_digest(ids) == blake2b(array("q", ids), digest_size=16).digest()
    digests = {prompt_digest(ids, each) for each in (TEXT, *map(ModelInput, [(IMAGE,), (OTHER,)]))}
    assert len(digests) == 3


def test_prompts_with_other_images_are_held_out_one_by_one():
    def sides(seed: int) -> list[bool]:
        images = (replace(IMAGE, hash=str(number)) for number in range(10))
        rows = [Rendered("", (1, 9, 9, 9), model_input=ModelInput((image,))) for image in images]
        return [is_held_out(row, seed=seed, fraction=0.5) for row in rows]

    assert all(0 < sum(sides(seed)) < 10 for seed in range(5))
    assert sides(0) == sides(0)


def row(number: int, model_input: ModelInput) -> Row:
    return Row(
        id=str(number),
        group_id="g",
        token_ids=[1, 2, 9, 9, 9, 3, 4, 5, 10 + number],
        loss_mask=[False] * 8 + [True],
        model_input=model_input,
    )


def test_rows_share_no_token_of_another_image():
    images = [ModelInput((each,)) for each in (IMAGE, IMAGE, OTHER)]
    assert shared_prefixes([row(0, images[0]), row(1, images[1])]) == [8, 8]
    assert shared_prefixes([row(0, images[0]), row(1, images[2])]) == [2, 2]


def test_a_completion_about_another_image_answers_another_prompt():
    algorithm = KTO(PreferenceConfig(loss="kto"), max_tokens=20)
    rows = [row(number, ModelInput((each,))) for number, each in enumerate((IMAGE, OTHER))]
    batch = [Preference(id=each.id, rows=(each,), labels=(True,)) for each in rows]
    swapped = algorithm.rows(batch, 0)[2:]
    assert [(each.token_ids[-1], each.model_input) for each in swapped] == [
        (11, rows[0].model_input),
        (10, rows[1].model_input),
    ]


def test_what_a_model_does_not_take_is_refused_by_name():
    rows = [row(3, ModelInput((IMAGE,)))]
    with pytest.raises(ValueError, match="'3' has content of kind image, and only text can"):
        check_rows(rows)
    takes_images = InputSpec(kinds=frozenset({"image"}))
    check_rows(rows, takes_images)
    rows[0].token_ids, rows[0].loss_mask = [1, 2, 9, 9], [False] * 3 + [True]
    with pytest.raises(ValueError, match="up to token 5, but only 4 tokens"):
        check_rows(rows, takes_images)

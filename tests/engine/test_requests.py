"""What an engine refuses, and how large it makes its cache."""

from dataclasses import replace

import pytest

from hone.errors import UserError
from hone.model_input import Content, ModelInput
from hone.types import Completion, Request, SamplingParams, StopReason
from tests.engine.test_generation import run, tight_cache_gib
from tests.tables import table

IMAGE = ModelInput((Content(kind="image", hash="a", start=0, num_tokens=3),))
GOOD = Request(id="a", prompt_ids=(4, 5, 6), sampling=SamplingParams(max_tokens=4))


def sampling(**changes):
    return replace(GOOD, sampling=replace(GOOD.sampling, **changes))


def resumed(tokens, **changes):
    completion = Completion(
        request_id="a",
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        weight_versions=[0] * len(tokens),
        stop_reason=StopReason.ABORT,
    )
    return replace(GOOD, resumed=replace(completion, **changes))


@table(
    "request_, message",
    [
        (replace(GOOD, prompt_ids=()), "empty prompt"),
        (replace(GOOD, prompt_ids=(3, 40)), r"token id 40.*0\.\.39"),
        (replace(GOOD, prompt_ids=(3, -1)), r"token id -1"),
        (sampling(max_tokens=62), r"3 prompt tokens \+ max_tokens=62 exceed max_model_len=64"),
        (sampling(max_tokens=0), "max_tokens=0"),
        (sampling(temperature=-0.1), r"temperature=-0\.1"),
        (sampling(temperature=float("nan")), "temperature=nan"),
        (sampling(top_p=0.0), r"top_p=0\.0"),
        (sampling(top_k=-1), "top_k=-1"),
        (sampling(min_p=1.0), r"min_p=1\.0"),
        (sampling(stop=("x", "")), "no empty string"),
        (sampling(stop=("x",)), "needs a tokenizer"),
        (resumed([7, 8, 9, 10]), "leaves none to sample"),
        (resumed([7, 8], logprobs=[-1.0]), "2 tokens with 1 log-probabilities"),
        (resumed([7, 0]), "ended with stop id 0"),
        (resumed([7, 99]), "token id 99"),
        (replace(GOOD, model_input=IMAGE), "content of kind image, and only text can be computed"),
    ],
)
def test_bad_requests_are_refused_by_name_and_nothing_is_queued(models, request_, message):
    engine = models.engine(eos_token_ids=(0, 2))
    with pytest.raises(ValueError, match=f"'a'.*{message}"):
        engine.submit([replace(GOOD, id="fine"), request_])
    assert not engine.has_unfinished


def test_an_id_in_use_is_refused(models):
    engine = models.engine()
    with pytest.raises(ValueError, match="'a' is already in use"):
        engine.submit([GOOD, GOOD])
    run(engine, [GOOD])
    run(engine, [GOOD])


def test_the_longest_request_that_fits_runs_to_its_end(models):
    engine = models.engine(kv_cache_gib=tight_cache_gib(models, num_blocks=16))
    done = run(engine, [sampling(max_tokens=61, seed=4)])
    assert len(done["a"].token_ids) == 61


def test_a_cache_too_small_for_one_sequence_is_refused_with_numbers(models):
    gib = tight_cache_gib(models, num_blocks=15)
    with pytest.raises(ValueError, match=r"holds 60 tokens.*max_model_len=64 needs 16 blocks of 4"):
        models.engine(kv_cache_gib=gib)


def test_more_than_the_models_context_is_refused(models):
    with pytest.raises(ValueError, match=r"max_model_len=513 exceeds.* 512"):
        models.engine(max_model_len=513)


def test_without_a_size_the_cpu_cache_holds_all_sequences_at_full_length(models):
    engine = models.engine(max_num_seqs=3)
    assert engine._blocks.num_blocks == 3 * 16


def test_a_cache_larger_than_memory_is_refused(models):
    with pytest.raises(UserError, match=r"needs 1000000\.00 GiB"):
        models.engine(kv_cache_gib=1e6)

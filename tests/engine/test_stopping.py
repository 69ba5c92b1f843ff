"""R20, the engine's part: why a completion ended is recorded where it ended."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.engine.detokenizer import StopStringWatcher
from hone.engine.sequence import Sequence
from hone.models.tiny import make_bpe_tokenizer
from hone.types import SamplingParams, StopReason
from tests.engine.test_generation import make_requests, run

correct_append = Sequence.append
FREE = SamplingParams(max_tokens=24, seed=9)


@pytest.fixture
def free_run(models):
    """A completion that nothing stops, and a way to run its request with other settings."""
    request = replace(make_requests()[0], sampling=FREE)

    def rerun(eos_token_ids=(), **changes):
        engine = models.engine(eos_token_ids=eos_token_ids, with_tokenizer=True)
        changed = replace(request, sampling=replace(FREE, **changes))
        return run(engine, [changed])[request.id]

    return rerun(), rerun


def first_index(tokens, ids):
    return next(i for i, token in enumerate(tokens) if token in ids)


def check_stop_ids(free, rerun):
    assert free.stop_reason is StopReason.LENGTH
    assert len(free.token_ids) == FREE.max_tokens
    late, early = free.token_ids[15], free.token_ids[6]
    for eos, stop in (((late, early), ()), ((late,), (early,)), ((), (early,)), ((early,), ())):
        ended = rerun(eos, stop_token_ids=stop)
        end = first_index(free.token_ids, (*eos, *stop)) + 1
        assert ended.token_ids == free.token_ids[:end]
        assert ended.stop_reason is StopReason.EOS
        assert len(ended.logprobs) == len(ended.weight_versions) == end

    # At the limit, too, an end token is an end and not a truncation.
    assert rerun((early,), max_tokens=end).stop_reason is StopReason.EOS
    assert rerun((), max_tokens=end).stop_reason is StopReason.LENGTH


def test_R20_every_eos_id_and_stop_id_ends_the_completion_and_is_its_last_token(free_run):
    check_stop_ids(*free_run)


def test_R20_ignore_eos_samples_to_the_end(free_run):
    free, rerun = free_run
    eos = tuple(set(free.token_ids))
    assert rerun(eos, ignore_eos=True, stop=("a",)).token_ids == free.token_ids


def test_R20_stop_strings_end_where_the_text_first_contains_one(models, free_run):
    free, rerun = free_run
    stop = models.tokenizer.decode(free.token_ids[9:12])
    end = stops_at(free.token_ids, (stop,), models.tokenizer)
    ended = rerun(stop=("not in there", stop))
    assert ended.token_ids == free.token_ids[:end]
    assert ended.stop_reason is StopReason.STOP_STRING
    assert rerun(stop=(stop,), max_tokens=end).stop_reason is StopReason.STOP_STRING


def test_abort_returns_what_there_is(models):
    engine = models.engine(max_num_seqs=2)
    requests = make_requests()
    engine.submit(requests)
    engine.step()
    engine.step()
    running, waiting = engine.abort(["0", "5", "never submitted"])
    assert (running.stop_reason, waiting.stop_reason) == (StopReason.ABORT,) * 2
    assert (len(running.token_ids), waiting.token_ids) == (2, [])
    assert engine.abort(["0"]) == []
    assert set(run(engine, [])) == {"1", "2", "3", "4"}


def _full_means_truncated(self, token_id, logprob, weight_version):
    reason = correct_append(self, token_id, logprob, weight_version)
    full = len(self.logprobs) == self.request.sampling.max_tokens
    return StopReason.LENGTH if full else reason


def _only_the_first_id(self, token_id, logprob, weight_version):
    self.stop_ids = frozenset(sorted(self.stop_ids)[:1])
    return correct_append(self, token_id, logprob, weight_version)


def _drops_the_end_token(self, token_id, logprob, weight_version):
    reason = correct_append(self, token_id, logprob, weight_version)
    if reason is StopReason.EOS:
        self.token_ids.pop()
    return reason


@pytest.mark.parametrize("wrong", [_full_means_truncated, _drops_the_end_token, _only_the_first_id])
def test_R20_planted_bugs_are_caught(models, free_run, monkeypatch, wrong):
    monkeypatch.setattr(Sequence, "append", wrong)
    with pytest.raises(AssertionError):
        check_stop_ids(*free_run)


# Text token by token -----------------------------------------------------------------------------

TEXTS = ["the answer is 42 </answer>", "naïve café 日本語 🙂🙃 done", "Ünïcödé — “quotes” 한국어"]
TOKENIZER = make_bpe_tokenizer(TEXTS * 3, vocab_size=300)


def stops_at(token_ids, stop, tokenizer=TOKENIZER):
    """Number of tokens after which the whole decoded text first contains a stop string."""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=False).rstrip("\ufffd")
        if any(one in text for one in stop):
            return end
    return None


def watch(token_ids, stop):
    watcher = StopStringWatcher(TOKENIZER, stop)
    return next((i for i, token in enumerate(token_ids, 1) if watcher.push(token)), None)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab </answer>ïé日本🙂—한", max_size=30), st.data())
def test_stop_strings_are_found_at_the_same_token_as_in_the_whole_text(text, data):
    token_ids = TOKENIZER.encode(text)
    start = data.draw(st.integers(0, len(text)))
    inside = text[start : start + data.draw(st.integers(1, 6))]
    stop = tuple(one for one in (inside, "zz", "b日") if one)
    assert watch(token_ids, stop) == stops_at(token_ids, stop)


def test_stop_strings_across_bytes_that_are_no_text():
    draw = random.Random(0)
    for _ in range(100):
        token_ids = draw.choices(range(3, 259), k=20)
        text = TOKENIZER.decode(token_ids)
        readable = [i for i in range(len(text) - 1) if "\ufffd" not in text[i : i + 2]]
        if readable:
            at = draw.choice(readable)
            stop = (text[at : at + 2],)
            assert watch(token_ids, stop) == stops_at(token_ids, stop)


def test_special_tokens_are_text_to_stop_at():
    token_ids = TOKENIZER.encode("ab<|im_end|>ab")
    assert watch(token_ids, ("<|im_end|>",)) == stops_at(token_ids, ("<|im_end|>",))


def test_a_stop_string_may_begin_in_the_resumed_part(models, free_run):
    free, rerun = free_run
    stop = models.tokenizer.decode(free.token_ids[9:12])
    params = replace(FREE, stop=(stop,))
    part = replace(free, **{name: getattr(free, name)[:11] for name in PER_TOKEN})
    request = replace(make_requests()[0], sampling=params, resumed=part)
    resumed = run(models.engine(with_tokenizer=True), [request])["0"]
    assert resumed.token_ids == rerun(stop=(stop,)).token_ids
    assert resumed.stop_reason is StopReason.STOP_STRING


PER_TOKEN = ("token_ids", "logprobs", "weight_versions")

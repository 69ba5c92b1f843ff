"""An environment answers a turn whose reasoning the prompt has opened."""

import pytest

from hone.data.settings import DataConfig
from hone.data.template_check import RenderError
from hone.data.turns import TurnRenderer
from hone.types import Observation, Prompt, Sample, StopReason, Turn
from tests.data.support import char_tokenizer

ASKED = {"role": "user", "content": "1 + 1?"}
ANSWER = {"role": "tool", "content": "2"}
HEADER = "<|im_start|>assistant\n<think>\n"


def template(reasoning: str) -> str:
    """Writes reasoning in each of the assistant's turns after the last question, and none before
    it. `reasoning` sets `thought` and `said` from the message."""
    return (
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% set thought = '' %}{% set said = m.content %}"
        f"{reasoning}"
        "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        f"{{% if add_generation_prompt %}}{HEADER}{{% endif %}}"
    )


INLINE = template(
    "{% if '</think>' in m.content %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
)
"""Reasoning is in the content, as Qwen 3.5 and Nemotron 3 take it."""
FIELD = template("{% if m.reasoning_content %}{% set thought = m.reasoning_content %}{% endif %}")
"""Reasoning is a field of its own, as Qwen 3.8 takes it."""
DROPS = template("{% set said = m.content.split('</think>')[-1] %}")


def played(template: str, *turns: str):
    """A sample with these turns, each but the last answered, and what follows the last one."""
    tokenizer = char_tokenizer(template)
    render = TurnRenderer(tokenizer, DataConfig(train=()), vocab_size=len(tokenizer))
    text = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    sample = Sample(
        id="0", prompt=Prompt(id="f:1", token_ids=(1,), text=text, messages=(ASKED,)), index=0,
        token_ids=[], logprobs=[], weight_versions=[], loss_mask=[], stop_reason=StopReason.EOS,
    )  # fmt: skip
    observed = ""
    for turn in turns:
        start = len(sample.token_ids)
        sample.token_ids += [9, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        sample.turns.append(Turn(start=start, end=start + 2, text=turn, stop_reason=StopReason.EOS))
        said = render(sample, Observation((ANSWER,)))
        observed = sample.turns[-1].observed = said.text
        sample.turns[-1].messages = said.messages
    return tokenizer, sample, observed


EXPECTED = f"<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n{HEADER}"


@pytest.mark.parametrize("kind", [INLINE, FIELD])
def test_the_reasoning_of_earlier_turns_stays_as_it_was_sampled(kind):
    turns = ["so\n</think>\n\ncall", "then\n</think>\n\nagain"]
    tokenizer, sample, observed = played(kind, *turns)
    assert observed == EXPECTED
    thought, said = "reasoning_content", "content"
    history = [ASKED]
    for turn in turns:
        first, _, rest = turn.partition("\n</think>\n\n")
        message = {thought: first, said: rest}
        if kind == INLINE:
            message = {said: f"<think>\n{turn}"}
        history += [{"role": "assistant", **message}, ANSWER]
    whole = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    text = sample.prompt.text + "".join(f"{x.text}{x.observed}" for x in sample.turns)
    assert text == whole


@pytest.mark.parametrize(
    ("kind", "turn"), [(DROPS, "so\n</think>\n\ncall"), (INLINE, "never closed")]
)
def test_reasoning_that_the_template_would_change_stays_before_the_answer_of_a_tool(kind, turn):
    _, sample, observed = played(kind, turn, turn)
    assert observed == EXPECTED
    assert [one.observed for one in sample.turns] == [EXPECTED] * 2


def test_reasoning_that_a_user_makes_the_template_drop_fails_the_sample():
    tokenizer, sample, _ = played(INLINE, "so\n</think>\n\ncall")
    sample.turns[0].messages, sample.turns[0].observed = (), ""
    render = TurnRenderer(tokenizer, DataConfig(train=()), vocab_size=len(tokenizer))
    with pytest.raises(RenderError, match="writes the prompt anew"):
        render(sample, Observation(({"role": "user", "content": "and?"},)))

"""`hone COMMAND --help WORD` finds keys by name, help text and the names of other frameworks."""

from __future__ import annotations

import pytest

from hone.cli.help import print_help
from hone.cli.help_search import search_keys
from hone.config.base import Section
from hone.config.schema import fields, is_section
from hone.config.tree import TREES, RLConfig
from hone.errors import UserError
from tests.tables import check_rows

FIRST = {
    "lora": "model.lora.rank",
    "LoRA rank": "model.lora.rank",
    "kl": "algorithm.kl.coef",
    "system prompt": "data.system_prompt",
    "learning rate": "critic.lr",
    "ppo_mini_batch_size": "trainer.prompts_per_minibatch",
    "temperatures": "rollout.temperature",
    "group size": "rollout.n_samples_per_prompt",
    "max_staleness": "pipeline.max_staleness",
}


def test_the_first_key_is_the_one_that_is_meant() -> None:
    def check(text: str, key: str) -> None:
        assert search_keys(RLConfig, text)[0].field.key == key

    check_rows(FIRST.items(), check)


def test_names_come_before_names_of_others_and_these_before_help_texts() -> None:
    hits = search_keys(RLConfig, "gpu")
    keys = [hit.field.key for hit in hits]
    foreign = [hit.foreign for hit in hits]
    assert keys[0] == "engine.gpu_memory_utilization"
    first, last = foreign.index(next(filter(None, foreign))), len(foreign) - 1
    assert all("gpu" in key for key in keys[:first])
    assert not foreign[last], "the last ones have it in their help text"
    assert search_keys(RLConfig, "rate system") == [], "all words"


def test_a_key_is_among_the_first_for_its_name() -> None:
    def check(tree: type[Section]) -> None:
        for field in [*fields(tree)][::9]:  # each asks for all keys once more
            if not is_section(field.annotation):
                found = [hit.field.key for hit in search_keys(tree, field.path[-1])]
                assert found.index(field.key) < 15, field.key

    check_rows(TREES.values(), check)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert print_help("rl", ["--help", *words]) == 0
    return capsys.readouterr().out


def test_a_page_says_where_the_words_were_found(capsys: pytest.CaptureFixture[str]) -> None:
    page = printed(capsys, "ppo_mini_batch_size")
    assert page.startswith("1 key of `hone rl` for 'ppo_mini_batch_size':")
    assert "--trainer.prompts_per_minibatch" in page
    assert "elsewhere: actor.ppo_mini_batch_size (verl)" in page
    page = printed(capsys, "system", "prompt")
    assert "--data.system_prompt" in page


def test_what_has_no_key_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "num_gpus: nothing to set: --nproc N behind the command" in printed(capsys, "num_gpus")


def test_words_that_nothing_has_are_refused() -> None:
    with pytest.raises(UserError, match=r"no key of `hone rl` has to do with 'xyzzy'.*Sections: "):
        print_help("rl", ["--help", "xyzzy"])
    with pytest.raises(UserError, match=r"'temprature'.*Did you mean eval\.temperature"):
        print_help("rl", ["--help", "temprature"])

"""`hone serve` with a tiny model, as a command: answers, the same log-probabilities as a forward
pass, files of keys, and an end by Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.cli.serve import with_model
from hone.models.tiny import make_bpe_tokenizer, make_tiny_model

PATIENCE_S = 300.0


def make_model(folder: Path) -> Path:
    return make_tiny_model(
        folder,
        tokenizer=make_bpe_tokenizer(["the quick brown fox says hello to the world"], 300),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=512,
    )


def ask(url: str, key: str, body: Any) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_a_model_is_served_until_ctrl_c(tmp_path: Path) -> None:
    model, key_file = make_model(tmp_path / "model"), tmp_path / "key"
    words = [sys.executable, "-m", "hone", "serve", str(model), "--run.device", "cpu"]
    words += ["--serve.key-file", str(key_file), "--serve.model-name", "tiny"]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"at (http://127\.0\.0\.1:\d+) ", process.stdout.readline())
            assert found is not None, process.stderr and process.stderr.read()
            seen = serve(found[1], key_file.read_text().strip(), model)
        finally:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "the server has ended" in err
    assert "Traceback" not in err
    assert seen["key"] not in out + err, "a key that lies in a file is not printed"


def serve(url: str, key: str, model: Path) -> dict[str, Any]:
    session = ask(f"{url}/sessions", key, {"seed": 1})
    base, own = session["openai_base_url"], session["key"]
    messages = [{"role": "user", "content": "hello"}]
    options = {"max_tokens": 12, "return_token_ids": True, "logprobs": True}
    for text in ("to", "the world"):
        answer = ask(f"{base}/chat/completions", own, {"messages": messages, **options})
        messages += [answer["choices"][0]["message"], {"role": "user", "content": text}]
    with pytest.raises(HTTPError, match="401"):
        ask(f"{base}/chat/completions", "wrong", {"messages": messages})
    ended = ask(f"{session['base_url']}/end", own, {"return_paths": True})
    assert (ended["num_turns"], ended["bridged"]) == (2, 1)
    [path] = ended["paths"]
    ids = [*path["prompt_token_ids"], *path["token_ids"]]
    assert ids[: -len(answer["choices"][0]["token_ids"])] == answer["prompt_token_ids"]

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = whole(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    start = len(path["prompt_token_ids"]) - 1
    for place, flag in enumerate(path["loss_mask"]):
        expected = logprobs[start + place, path["token_ids"][place]].item() if flag else 0.0
        assert path["logprobs"][place] == pytest.approx(expected, abs=1e-4)
    return {"key": key}


def test_a_model_may_stand_in_the_place_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folder = str(tmp_path / "model")
    for words, expected in (
        ([folder, "--serve.port", "1"], ["--model.path", folder, "--serve.port", "1"]),
        (["org/name"], ["--model.path", "org/name"]),
        (["gsm8k"], ["gsm8k"]),
        (["recipes/mine.yaml"], ["recipes/mine.yaml"]),
        (["--model.path", "x"], ["--model.path", "x"]),
        ([], []),
    ):
        assert with_model(words) == expected

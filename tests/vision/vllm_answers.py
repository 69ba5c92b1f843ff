"""`python -m tests.vision.vllm_answers FILE DEVICE`: what vLLM samples greedily with images.

The file is JSON, a list of `{"folder", "stop", "prompts": [{"text", "images", "options"}]}`, where
`images` are paths. Prints JSON: for each model and prompt the prompt's ids, the sampled ids, and
their log-probabilities. A process of its own, since vLLM changes the one in which it runs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from hone.engine.vllm.setup import import_vllm

MAX_TOKENS = 8
ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {"kv_cache_memory_bytes": 64 << 20},
    "cuda": {"gpu_memory_utilization": 0.2},
}


def main(file: Path, device: str) -> None:
    vllm = import_vllm(torch.device(device))
    engine = ENGINES[device]
    found = [answers(vllm, engine, **asked) for asked in json.loads(file.read_text())]
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # an engine's end may hang


def answers(
    vllm: Any, options: dict[str, Any], folder: str, stop: int, prompts: list[dict[str, Any]]
) -> list[Any]:
    """Ids of the prompt, sampled ids, and their log-probabilities, of each prompt."""
    engine = vllm.LLM(
        model=folder,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 2},
        **options,
    )
    params = vllm.SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True, stop_token_ids=[stop]
    )
    done = engine.generate([request(**prompt) for prompt in prompts], params, use_tqdm=False)
    return [answer(each) for each in done]


def request(text: str, images: list[str], options: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": text,
        "multi_modal_data": {"image": [Image.open(name).convert("RGB") for name in images]},
        "mm_processor_kwargs": options,
    }


def answer(done: Any) -> tuple[list[int], list[int], list[float]]:
    (sampled,) = done.outputs
    ids = [*sampled.token_ids]
    logprobs = [
        by_token[token].logprob for token, by_token in zip(ids, sampled.logprobs, strict=True)
    ]
    return [*done.prompt_token_ids], ids, logprobs


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""Stands in for vLLM 0.24: one token a step for every request, statistics as its engine gives them.

`FAKE_VLLM` in the environment makes it misbehave: `fail` raises, `hang` never ends.
"""

import json
import os
import sys
import threading
import time
from types import SimpleNamespace

__version__ = "0.24.0"


class SamplingParams:
    def __init__(self, **fields):
        assert fields.pop("logprobs") == 0
        assert fields.pop("detokenize") is False
        assert fields["ignore_eos"] is True
        assert "seed" not in fields
        self.__dict__.update(fields)


class LLM:
    def __init__(self, **options):
        misbehaviour = os.environ.get("FAKE_VLLM")
        if misbehaviour == "fail":
            raise RuntimeError("no kernel for this device")
        if misbehaviour == "hang":
            time.sleep(1000)
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert options.pop("disable_log_stats") is False
        sys.stdout.write(f"options {json.dumps(options, sort_keys=True)}\n")
        self.llm_engine = SimpleNamespace(logger_manager=None)
        # A normal exit of the interpreter would wait for it.
        threading.Thread(target=time.sleep, args=(1000,)).start()

    def generate(self, prompts, params, *, use_tqdm):
        assert use_tqdm is False
        left = [one.max_tokens for one in params]
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        for number in range(max(left)):
            time.sleep(0.001)
            alive = [i for i, tokens in enumerate(left) if tokens > number]
            done = [i for i in alive if left[i] == number + 1]
            finished = [
                SimpleNamespace(num_prompt_tokens=lengths[i], num_generation_tokens=left[i])
                for i in done
            ]
            self.llm_engine.logger_manager.record(
                scheduler_stats=SimpleNamespace(
                    num_running_reqs=len(alive) - len(done), kv_cache_usage=len(alive) / 100
                ),
                iteration_stats=SimpleNamespace(
                    finished_requests=finished,
                    num_preempted_reqs=0,
                    num_generation_tokens=len(alive),
                    time_to_first_tokens_iter=[0.0] * len(alive) if number == 0 else [],
                ),
                mm_cache_stats=None,
            )
            self.llm_engine.logger_manager.log()
        return [SimpleNamespace(num_cached_tokens=1) for _ in prompts]

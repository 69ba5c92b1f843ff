"""SGLang as the engine, against a stand-in that speaks its protocol over a tiny model."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hone.config.tree import RLConfig
from hone.engine.settings import EngineConfig
from hone.engine.sglang import engine as engine_module
from hone.engine.sglang import facts
from hone.engine.sglang import server as server_module
from hone.engine.sglang.engine import SGLangEngine
from hone.engine.sglang.server import ServerProcess, arguments
from hone.engine.sglang.server_side import hone_sglang
from hone.engine.sglang.weights import RemoteWeights
from hone.errors import UserError
from hone.loops import reinforce
from hone.models.manifest import build_manifest, export_weights
from hone.types import Completion, EngineLostError, Request, SamplingParams, StopReason
from hone.weights.sync import WeightSync
from tests.engine.sglang_stand_in import StandIn
from tests.tables import check_rows, table
from tests.tiny_runs import write_inputs

CPU = torch.device("cpu")
EXACT = 5e-5
"""Float32 log-probabilities of one model, one token at a time and all at once."""


class ModuleTrainer:
    """The part of the Trainer protocol that a sync uses."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)


Start = Callable[..., tuple[SGLangEngine, StandIn]]


@pytest.fixture
def start(make_models: Any, tmp_path: Path) -> Iterator[Start]:
    """Makes an engine, over a server with the weights of the tiny model."""
    made: list[tuple[SGLangEngine, StandIn]] = []

    def make(
        family: str = "qwen3", *, model: PreTrainedModel | None = None, **fields: Any
    ) -> tuple[SGLangEngine, StandIn]:
        models = make_models(family)
        folder = tmp_path / str(len(made))
        folder.mkdir()
        cfg = EngineConfig(**{"backend": "sglang", "max_num_seqs": 4, **fields})
        engine = SGLangEngine(
            models.hone if model is None else model,
            cfg,
            eos_token_ids=(),
            tokenizer=models.tokenizer,
            max_model_len=64,
            device=CPU,
            start=partial(StandIn, folder=folder),
        )
        server: Any = engine._server
        made.append((engine, server))
        return engine, server

    yield make
    for engine, server in made:
        engine._streams.close()
        server.close()


def run(engine: SGLangEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def request(name: str, *prompt_ids: int, **params: Any) -> Request:
    params = {"max_tokens": 6, **params}
    return Request(id=name, prompt_ids=prompt_ids or (5, 6, 7), sampling=SamplingParams(**params))


@torch.no_grad()
def gap(model: PreTrainedModel, asked: Request, done: Completion, temperature: float) -> float:
    """Largest difference to the log-probabilities of the model."""
    token_ids = [*asked.prompt_ids, *done.token_ids]
    logits = model(torch.tensor([token_ids])).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    rows = torch.log_softmax(logits / temperature, -1)
    expected = rows.gather(1, torch.tensor(list(done.token_ids))[:, None])[:, 0]
    return float((expected - torch.tensor(list(done.logprobs))).abs().max())


@torch.no_grad()
def moved(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return other


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_R2_R4_it_samples_with_the_weights_that_were_delivered(
    family: str, start: Start, make_models: Any
) -> None:
    engine, server = start(family)
    plain = make_models(family).plain
    asked = [request(f"{i}", *range(3, 5 + i), temperature=0.7) for i in range(6)]
    done = run(engine, asked)
    assert max(gap(plain, r, done[r.id], 0.7) for r in asked) < EXACT
    assert server.seen.largest <= 4, "more than max_num_seqs at once"
    trained = moved(plain)
    report = WeightSync(ModuleTrainer(trained), engine).push(version=3)
    assert report.bytes == engine._weights.num_bytes
    done = run(engine, asked)
    assert max(gap(trained, r, done[r.id], 0.7) for r in asked) < EXACT
    assert {v for c in done.values() for v in c.weight_versions} == {3}


def test_R2_large_weights_go_in_pieces(start: Start, make_models: Any) -> None:
    engine, server = start()
    engine._weights = RemoteWeights(server, CPU, size=1000)
    trained = moved(make_models("qwen3").plain)
    WeightSync(ModuleTrainer(trained), engine).push(version=1)
    held = dict(hone_sglang.weights(server.holds))
    assert all(torch.equal(held[name], tensor) for name, tensor in export_weights(trained))


@table("fault", ["forgets", "skips_loader", "keeps_version"])
def test_R3_planted_weights_that_do_not_arrive_are_refused(
    fault: str, start: Start, make_models: Any
) -> None:
    engine, server = start()
    name = "model.layers.1.self_attn.k_proj.weight"
    setattr(server.faults, fault, name if fault == "forgets" else True)
    trainer: Any = ModuleTrainer(moved(make_models("qwen3").plain))
    sync = WeightSync(trainer, engine)
    expected = {"forgets": name, "skips_loader": "did not run", "keeps_version": "version '0'"}

    def sample() -> None:
        sync.push(version=2)
        run(engine, [request("a")])

    with pytest.raises(RuntimeError, match=expected[fault]):
        sample()
    if fault == "keeps_version":
        return  # with requests under way that are not what they say, such an engine is made anew
    assert engine.needs_weights
    with pytest.raises(RuntimeError, match="syncing"):
        engine.step()
    setattr(server.faults, fault, "" if fault == "forgets" else False)
    sync.push(version=4)
    assert list(run(engine, [request("b")])["b"].weight_versions) == [4] * 6


def test_the_server_computes_the_checksums_of_manifests() -> None:
    """It cannot import them; two definitions must be one."""

    def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        whole = torch.randn((2 * shape[0], *shape[1:])).to(dtype)
        tensor = whole[1 : 1 + shape[0]]
        expected = build_manifest([("x", tensor)], 0).tensors["x"].checksum
        assert hone_sglang.checksum(tensor) == expected
        tensor.view(-1)[-1] += 1
        assert hone_sglang.checksum(tensor) != expected

    shapes = [(1,), (3,), (7, 5), (300, 300), (16384,), (32768, 2)]
    check_rows([(s, d) for s in shapes for d in (torch.bfloat16, torch.float32)], check)
    large = torch.arange(257 * 16384, dtype=torch.int32)  # more rows than are summed at a time
    assert hone_sglang.checksum(large) == build_manifest([("x", large)], 0).tensors["x"].checksum


def test_the_packed_weights_of_a_server_have_the_names_of_the_checkpoint(start: Start) -> None:
    _, server = start()
    records = hone_sglang.describe(dict(hone_sglang.weights(server.holds)), has_checksums=False)
    assert records["lm_head.weight"]["tied_to"] == "model.embed_tokens.weight"
    assert records["model.layers.0.self_attn.v_proj.weight"]["shape"] == [16, 32]


# -- requests ------------------------------------------------------------------------------------


def test_R20_requests_end_as_they_ask(start: Start) -> None:
    engine, server = start()
    greedy = run(engine, [request("g", temperature=0.0, max_tokens=40)])["g"]
    assert (len(greedy.token_ids), greedy.stop_reason) == (40, StopReason.LENGTH)
    stop_id = greedy.token_ids[20]
    first = list(greedy.token_ids).index(stop_id) + 1
    ended = run(engine, [request("s", temperature=0.0, max_tokens=40, stop_token_ids=(stop_id,))])[
        "s"
    ]
    assert list(ended.token_ids) == list(greedy.token_ids)[:first]
    assert ended.stop_reason is StopReason.EOS
    assert engine._watch is not None
    tokenizer: Any = engine._watch.args[0]
    texts = [tokenizer.decode([token_id]) for token_id in greedy.token_ids]
    place = next(i for i, text in enumerate(texts) if len(text) == 1 and text.isalnum())
    cut = run(engine, [request("t", temperature=0.0, max_tokens=40, stop=(texts[place],))])["t"]
    assert cut.stop_reason is StopReason.STOP_STRING
    assert list(cut.token_ids) == list(greedy.token_ids)[: place + 1]
    body = server.seen.bodies[0]
    assert body["sampling_params"]["max_new_tokens"] == 40
    assert len({len(b["rid"]) for b in server.seen.bodies}) == 1, "names end each other"


@table("retracts", [False, True])
def test_an_aborted_request_keeps_its_tokens_and_goes_on(retracts: bool, start: Start) -> None:
    engine, server = start()
    server.faults.retracts = retracts
    engine.submit([request("a", temperature=0.0, max_tokens=50)])
    hold_after_first_message(engine, server)
    [aborted] = engine.abort(["a", "nobody"])
    assert aborted.stop_reason is StopReason.ABORT
    assert len(aborted.token_ids) == (1 if retracts else 5)
    assert len(aborted.logprobs) == len(aborted.weight_versions) == len(aborted.token_ids)
    server.release()
    resumed = Request(
        id="a",
        prompt_ids=(5, 6, 7),
        sampling=SamplingParams(max_tokens=50, temperature=0.0),
        resumed=aborted,
    )
    done = run(engine, [resumed])
    whole = run(engine, [request("c", temperature=0.0, max_tokens=50)])["c"]
    assert list(done["a"].token_ids) == list(whole.token_ids)
    assert np.allclose(list(done["a"].logprobs), list(whole.logprobs), atol=EXACT)


def test_a_sequence_may_have_all_of_its_length(start: Start) -> None:
    """SGLang leaves the last tokens of a context empty, and refuses prompts that end there."""
    engine, _ = start(kv_cache_gib=72 * 256 / 2**30)  # the smallest cache that is taken
    prompt = tuple(range(3, 23))
    whole = run(engine, [request("a", *prompt, temperature=0.0, max_tokens=44)])["a"]
    assert (len(whole.token_ids), whole.stop_reason) == (44, StopReason.LENGTH)
    longest = (*prompt, *whole.token_ids)[:63]
    last = run(engine, [request("b", *longest, temperature=0.0, max_tokens=1)])["b"]
    assert list(last.token_ids) == list(whole.token_ids)[-1:]
    with pytest.raises(UserError, match="room for 71 tokens, and a sequence of 64 needs 72"):
        engine_module._cache_tokens({"max_total_num_tokens": 71, "page_size": 1}, 64)
    with pytest.raises(UserError, match="room for 192 tokens, and a sequence of 64 needs 193"):
        engine_module._cache_tokens({"max_total_num_tokens": 192, "page_size": 64}, 64)


def hold_after_first_message(engine: SGLangEngine, server: StandIn) -> None:
    """Step until a request has its first token; the server stands still at its fifth."""
    server.faults.holds_at = 5
    while not any(sequence.logprobs for sequence in engine._sequences.values()):
        assert engine.step() == []
    server.wait_until_one_stands()


def test_weights_change_under_running_requests(start: Start, make_models: Any) -> None:
    """Each token has the version that sampled it, and the log-probability under these weights."""
    engine, server = start()
    plain = make_models("qwen3").plain
    engine.submit([request("a", max_tokens=40)])
    hold_after_first_message(engine, server)
    trained = moved(plain)
    WeightSync(ModuleTrainer(trained), engine).push(version=1)
    server.release()
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    versions = list(done[0].weight_versions)
    num_old = versions.count(0)
    assert versions == [0] * num_old + [1] * (40 - num_old)
    assert num_old == 5
    for model, part in ((plain, slice(0, num_old)), (trained, slice(num_old, 40))):
        token_ids = [5, 6, 7, *done[0].token_ids]
        rows = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, 2:-1].float(), -1)
        own = rows.gather(1, torch.tensor(list(done[0].token_ids))[:, None])[part, 0]
        assert (own - torch.tensor(list(done[0].logprobs)[part])).abs().max() < EXACT


def test_sleep_gives_up_weights_and_keeps_requests(start: Start, make_models: Any) -> None:
    engine, server = start(enable_sleep=True)
    engine.sleep()
    assert not server.memory
    engine.submit([request("a", temperature=0.0)])
    engine.wake()
    assert engine.needs_weights
    with pytest.raises(RuntimeError, match="syncing"):
        engine.step()
    plain = make_models("qwen3").plain
    WeightSync(ModuleTrainer(plain), engine).push(version=7)
    done: list[Completion] = []
    while not done:
        done = engine.step()
    assert gap(plain, request("a"), done[0], 1.0) < EXACT
    engine.submit([request("b", max_tokens=50)])
    hold_after_first_message(engine, server)
    with pytest.raises(RuntimeError, match="while 1 sequences run"):
        engine.sleep()
    server.release()


def test_an_engine_without_weights_waits_for_them(start: Start, make_models: Any) -> None:
    plain = make_models("qwen3").plain
    with torch.device("meta"):
        empty = type(plain)(plain.config)
    engine, _ = start(model=empty)
    assert engine.needs_weights
    WeightSync(ModuleTrainer(plain), engine).push(version=1)
    asked = request("a")
    assert gap(plain, asked, run(engine, [asked])["a"], 1.0) < EXACT


@table(
    "params",
    [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}],
)
def test_parts_of_the_distribution_are_refused(params: dict[str, Any], start: Start) -> None:
    engine, _ = start()
    with pytest.raises(ValueError, match="log-probabilities of the whole distribution"):
        engine.submit([request("a", **params)])
    assert not engine.has_unfinished


def test_requests_outlive_garbage_collection(start: Start) -> None:
    """An event loop knows its tasks and their sockets by weak references alone."""
    engine, server = start()
    engine.submit([request("a", max_tokens=40)])
    hold_after_first_message(engine, server)
    gc.collect()
    assert len(asyncio.all_tasks(engine._streams._loop)) == 1
    server.release()
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    assert [len(completion.token_ids) for completion in done] == [40]


# -- a server that fails -------------------------------------------------------------------------


@table(
    "fault, kind, text",
    [
        ("dies_after", EngineLostError, "the SGLang server is lost: it ended with code -9"),
        ("ends_early", RuntimeError, "after 2 of 6 tokens.*nobody asked for"),
        ("loses_tokens", RuntimeError, "has sampled 1 tokens of request 'a' and delivered 0"),
    ],
)
def test_planted_faults_of_a_server_are_named(
    fault: str, kind: type[Exception], text: str, start: Start
) -> None:
    engine, server = start()
    setattr(server.faults, fault, 3 if fault == "dies_after" else True)
    with pytest.raises(kind, match=text):
        run(engine, [request("a")])


def test_R4_planted_shifted_logprobs_are_far_from_the_models(
    start: Start, make_models: Any
) -> None:
    engine, server = start()
    server.faults.shift = True
    asked = request("a", max_tokens=20)
    assert gap(make_models("qwen3").plain, asked, run(engine, [asked])["a"], 1.0) > 0.1


def test_a_wrong_key_is_refused(start: Start) -> None:
    engine, server = start()
    server.key = "another"
    engine._streams._key = "wrong"
    with pytest.raises(EngineLostError, match="status 401"):
        run(engine, [request("a")])


def test_R4_a_run_trains_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and server agree on every step's samples, which newer weights sampled each time."""
    write_inputs(tmp_path)
    served = tmp_path / "served"
    served.mkdir()
    made: list[StandIn] = []

    def stand_in(*args: Any, **options: Any) -> StandIn:
        made.append(StandIn(*args, folder=served, **options))
        return made[-1]

    monkeypatch.setattr(engine_module, "ServerProcess", stand_in)
    data = {"train": [{"path": str(tmp_path / "train.jsonl")}], "chat": "never"}
    rollout = {"prompts_per_step": 2, "n_samples_per_prompt": 2, "max_completion_tokens": 4}
    cfg = RLConfig.model_validate({
        "run": {"dir": tmp_path / "run", "steps": 3, "device": "cpu"},
        "model": {"path": str(tmp_path / "model")},
        "data": data | {"max_prompt_tokens": 8},
        "rollout": rollout,
        "engine": {"backend": "sglang", "enable_sleep": True},
        "reward": {"functions": [{"fn": f"{tmp_path / 'rewards.py'}:even"}], "num_workers": 1},
        "trainer": {"optimizer": {"lr": 3e-3}},
        "checkpoint": {"every_n_steps": 0},
        "log": {"to": []},
    })  # fmt: skip
    reinforce.run(cfg)
    rows = [json.loads(line) for line in (cfg.run.dir / "metrics.jsonl").open()]
    assert rows[0]["off_policy/parity/kl"] < 1e-6
    assert rows[0]["off_policy/parity/max_difference"] < EXACT
    assert [row["rollout/weight_version/max"] for row in rows] == [0, 1, 2]
    trained = load_file(cfg.run.dir / "model" / "model.safetensors")
    held = dict(hone_sglang.weights(made[0].holds))
    assert trained.keys() <= held.keys()
    assert made[0].seen.paths.count("/release_memory_occupation") >= 2
    made[0].close()


def test_only_the_registry_names_it() -> None:
    """All that hone knows of this engine lies in its folder."""
    source = Path(engine_module.__file__).parents[2]
    names = re.compile(r"hone\.engine\.sglang|SGLangEngine|[\"']sglang[\"']")
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if names.search(path.read_text())
    }
    inside = {path for path in found if path.startswith("engine/sglang/")}
    assert "engine/sglang/engine.py" in inside
    registry = {"engine/settings.py", "engine/backend_rules.py", "engine/backends.py"}
    assert found - inside == registry


# -- its process ---------------------------------------------------------------------------------


def make_python(folder: Path, body: str, version: str = "0.5.15") -> Path:
    """A Python whose SGLang is `body`."""
    package = folder / "packages"
    (package / "sglang" / "srt").mkdir(parents=True)
    (package / f"sglang-{version}.dist-info").mkdir()
    (package / f"sglang-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )
    (package / "sglang" / "__init__.py").touch()
    (package / "sglang" / "srt" / "__init__.py").touch()
    (package / "sglang" / "srt" / "server_args.py").write_text(
        "def prepare_server_args(argv): return argv\n"
    )
    (package / "sglang" / "launch_server.py").write_text(body)
    # Stand-ins for what the file of hone imports: torch would take seconds.
    for name in ("torch", "numpy"):
        (package / f"{name}.py").write_text(
            "class Tensor: pass\ndef no_grad(): return lambda f: f\n"
        )
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{package}:$PYTHONPATH" exec {sys.executable} -S "$@"\n'
    )
    program.chmod(0o755)
    return program


SERVER = """
import http.server, json, os, sys

def run_server(argv):
    print("arguments", argv, flush=True)
    port = int(argv[argv.index("--port") + 1])
    key = argv[argv.index("--api-key") + 1]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/end":
                print("the last word", flush=True)
                os._exit(7)
            data = json.dumps({"pid": os.getpid(), "argv": sys.argv}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start_process(models: Any, python: Path, patch: pytest.MonkeyPatch) -> ServerProcess:
    patch.setenv(facts.PYTHON, str(python))
    cfg = EngineConfig(backend="sglang", max_num_seqs=3, kv_cache_gib=0.001, enable_sleep=True)
    return ServerProcess(models.hone, cfg, device=CPU, max_model_len=64)


def test_a_server_is_started_with_its_secret_hidden_and_ends_with_hone(
    make_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models("qwen3")
    server = start_process(models, make_python(tmp_path, SERVER), monkeypatch)
    found = server.call("/info")
    assert server.key not in Path(f"/proc/{found['pid']}/cmdline").read_text()
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    flags = json.loads((server.folder / "arguments.json").read_text())
    given = dict(zip(flags[::2], flags[1::2], strict=False))
    assert given["--host"] == "127.0.0.1"
    assert "--enable-memory-saver" in flags
    saved = json.loads((server.folder / "model" / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"]
    assert saved.get("eos_token_id") is None
    stdin: Any = server._process.stdin
    stdin.close()  # as when hone is gone
    assert server._process.wait(60) == -9
    with pytest.raises(EngineLostError, match="it ended with code -9"):
        server.call("/info")
    server.close()
    assert not server.folder.exists()


def test_a_server_that_ends_leaves_the_end_of_its_log(
    make_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make_models("qwen3")
    server = start_process(models, make_python(tmp_path / "a", SERVER), monkeypatch)
    with pytest.raises(EngineLostError):
        server.call("/end")
    server._process.wait(60)
    with pytest.raises(EngineLostError, match=r"(?s)code 7. The end of its log:.*the last word"):
        server.check()
    server.close()
    fails = make_python(tmp_path / "b", "raise SystemExit('no kernel for this GPU')")
    with pytest.raises(EngineLostError, match="no kernel for this GPU"):
        start_process(models, fails, monkeypatch)


@table("version", ["0.5.14", "0.6.0", "1.0.0", ""])
def test_versions_that_are_not_served_are_refused_before_anything_starts(
    version: str, make_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_python(tmp_path, SERVER, version) if version else tmp_path / "nobody"
    has = f"has SGLang {version}" if version else "has no SGLang"
    with pytest.raises(UserError, match=f"{has}; versions from 0.5.15"):
        start_process(make_models("qwen3"), python, monkeypatch)


def test_settings_become_arguments(make_models: Any) -> None:
    model = make_models("qwen3").hone
    cfg = EngineConfig(backend="sglang", max_num_seqs=3, max_num_batched_tokens=99)
    plain = arguments(model, cfg, device=CPU, max_model_len=64)
    assert plain["max-running-requests"] == 3
    assert plain["chunked-prefill-size"] == 99
    assert plain["context-length"] == 64 + 8
    others = {
        "enable_prefix_caching": "disable-radix-cache",
        "enforce_eager": "disable-cuda-graph",
        "enable_sleep": "enable-memory-saver",
    }
    for name, flag in others.items():
        changed = cfg.model_copy(update={name: not getattr(cfg, name)})
        found = arguments(model, changed, device=CPU, max_model_len=64)
        assert set(found) ^ set(plain) == {flag}, name
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, values, bytes
    sized = cfg.model_copy(update={"kv_cache_gib": 1.0})
    found = arguments(model, sized, device=CPU, max_model_len=64)
    assert found["max-total-tokens"] == 2**30 // per_token
    assert server_module._flags({"a": True, "b": 1}) == ["--a", "--b", "1"]


def test_the_environment_of_hone_stays_with_hone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/packages/of/hone")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    found = server_module._environment(tmp_path, CPU)
    assert not {"WORLD_SIZE", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & set(found)
    assert (Path(found["PYTHONPATH"]) / "hone_sglang.py").is_file()
    assert os.environ["WORLD_SIZE"] == "8"

"""Hub names where the hub cannot be reached: one line at once, and what is cached still loads."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hone import hub
from hone.cli.main import main
from hone.data.settings import SourceConfig
from hone.data.sources import read_source
from hone.errors import UserError
from hone.models.load import load_deferred, load_model
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from tests.tables import table
from tests.tiny_runs import write_inputs

NAME = "no-one/nothing"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None]:
    """An endpoint that refuses connections, an empty cache, no proxies."""
    hub.unreachable.cache_clear()
    unused = socket.socket()  # bound, so that nobody else can listen there
    unused.bind(("127.0.0.1", 0))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    # Whoever waits before another try, as the libraries do, has not been spared it.
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    yield
    unused.close()
    hub.unreachable.cache_clear()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def put_into_cache(model: Path) -> None:
    """Lay out `model` as huggingface_hub does what it has downloaded of `NAME`."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(model, repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")


def model_config(**keys: Any) -> ModelConfig:
    return ModelConfig(**{"path": NAME, "dtype": "float32"} | keys)


CASES = {
    "model.path": lambda folder: load_tokenizer(model_config()),
    "model.tokenizer": lambda folder: load_tokenizer(
        model_config(path=str(folder / "model"), tokenizer=NAME)
    ),
    "model.path=": lambda folder: load_model(model_config(), device="cpu", seed=0),
    "model.path='": lambda folder: load_deferred(model_config(init="random"), device="cpu", seed=0),
}


@pytest.mark.parametrize("named", CASES)
def test_a_model_that_is_nowhere_is_told_at_once(named: str, inputs: Path) -> None:
    with pytest.raises(UserError) as refused:
        CASES[named](inputs)
    told = str(refused.value)
    assert told.startswith(named)
    assert f"{constants.ENDPOINT} cannot be reached" in told
    assert "local cache" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"model.path": NAME, "data.eval.0.path": "{inputs}/eval.jsonl"}, f"model.path='{NAME}'"),
        ({"model.path": "{inputs}/model", "data.eval.0.path": NAME}, NAME),
    ],
)
def test_a_command_says_one_line(
    keys: dict[str, str],
    told: str,
    inputs: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if told == NAME:
        pytest.importorskip("datasets")
    keys |= {"data.max_prompt_tokens": "8", "eval.max_completion_tokens": "8"}
    flags = [f"--{key}={value.format(inputs=inputs)}" for key, value in keys.items()]
    with caplog.at_level(logging.WARNING):
        assert main(["eval", "--run.device=cpu", *flags]) == 2
    assert not [record.message for record in caplog.records if "etry" in record.message]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert lines[-1].startswith(f"error: {told}")
    assert "cannot be reached" in lines[-1]


@pytest.mark.parametrize("offline", [False, True])
def test_a_cached_model_loads(offline: bool, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    put_into_cache(inputs / "model")
    assert load_tokenizer(model_config()).vocab_size > 10
    expected = load_model(model_config(path=str(inputs / "model")), device="cpu", seed=0)
    loaded = load_model(model_config(), device="cpu", seed=0)
    for name, tensor in expected.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor)
    load_deferred(model_config(), device="cpu", seed=0)


def test_a_cached_data_set_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    cache = tmp_path / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    rows = [{"prompt": "1+1=", "answer": "2"}]
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(cache))
    # What was built from a folder lies where it would had it come from the hub.
    (built,) = (path for path in cache.iterdir() if path.is_dir())
    built.rename(cache / NAME.replace("/", "___"))
    for info in cache.rglob("dataset_info.json"):
        info.write_text(info.read_text().replace(built.name, "nothing"))
    for file in cache.rglob("*.arrow"):
        file.rename(file.with_name(f"nothing-{file.name.rpartition('-')[2]}"))
    assert [row.columns for row in read_source(SourceConfig(path=NAME))] == rows
    assert not constants.HF_HUB_OFFLINE


@table(
    "endpoint, environment, connected",
    [
        ("https://huggingface.co", {}, ("huggingface.co", 443)),
        ("http://mirror.example", {}, ("mirror.example", 80)),
        ("https://mirror.example:8443/hf", {}, ("mirror.example", 8443)),
        ("https://h.co", {"https_proxy": "http://proxy:3128"}, ("proxy", 3128)),
        ("https://h.co", {"HTTPS_PROXY": "proxy:3128"}, ("proxy", 3128)),
        ("https://h.co", {"all_proxy": "socks5://proxy"}, ("proxy", 1080)),
        ("https://h.co", {"http_proxy": "http://proxy:3128"}, ("h.co", 443)),
        ("https://h.co", {"https_proxy": "http://proxy", "no_proxy": "h.co"}, ("h.co", 443)),
        ("https://h.co", {"https_proxy": "http://proxy"}, ("proxy", 80)),
    ],
)
def test_whom_the_hub_is_reached_through(
    endpoint: str,
    environment: dict[str, str],
    connected: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.unreachable.cache_clear()
    asked: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(socket, "create_connection", connect)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub.unreachable() is None
    assert hub.locate_model(NAME, "model.path") == NAME
    assert asked == [connected]  # once in a process


def test_a_name_that_is_not_resolved_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def connect(*_: object) -> socket.socket:
        over.wait(600)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(hub, "_CONNECT_S", 0.05)
    begin = time.monotonic()
    assert "no answer in 0.05 s" in (hub.unreachable() or "")
    assert time.monotonic() - begin < 300
    over.set()


def test_folders_ask_nobody(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("asked the hub"))
    load_tokenizer(model_config(path=str(inputs / "model")))
    assert hub.locate_model("./not/here", "model.path") == "./not/here"


def test_R22_a_model_of_the_cache_is_checked_as_one_in_a_folder(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_cache(inputs / "model")
    flags = (f"--model.path={NAME}", f"--data.train=[{{path: {inputs / 'train.jsonl'}}}]")
    assert main(["check", *flags, "--data.max_prompt_tokens=99999", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["findings"]
    assert any("99999, no less than the context of the model" in x["message"] for x in found)

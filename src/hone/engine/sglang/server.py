"""The process of an SGLang server: its arguments, its start, its end, and how it is controlled."""

from __future__ import annotations

import copy
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.distributed.listening import LOOPBACK, listen
from hone.engine.settings import EngineConfig
from hone.engine.sglang.facts import (
    INSTALL,
    PYTHON,
    VERSIONS,
    installed_version,
    interpreter,
    is_served,
)
from hone.errors import UserError
from hone.families.shape import ModelShape
from hone.hardware import GIB
from hone.observe.disk import TEMPORARY, temporary_folder, writing
from hone.types import EngineLostError

__all__ = ["LOADER", "NAME", "RESERVED_TOKENS", "Server", "ServerProcess", "arguments"]

NAME = "the SGLang server"
LOADER = "hone_sglang.load"
_SERVER_SIDE = Path(__file__).parent / "server_side"
_FOLDER = "HONE_SGLANG_FOLDER"
_START_S = 1800.0
_CALL_S = 600.0
_LOG_LINES = 30
RESERVED_TOKENS = 8
"""SGLang refuses a prompt that comes within six tokens of the length that it is started with, and
cuts answers off two before it; hone's sequences may have all of theirs."""


class Server(Protocol):
    """A server that answers on this host."""

    port: int
    key: str
    """The secret that every request must show."""
    folder: Path
    """Folder of the files that its weight loader reads and writes."""

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request that controls the server: GET without `body`, else POST.

        Raises RuntimeError with the answer where the server refuses, and EngineLostError where it
        is gone.
        """
        ...

    def check(self) -> None:
        """Raise EngineLostError where the server has ended."""
        ...


def control(server: Server, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=_CALL_S)
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    try:
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def call(server: Server, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """`Server.call` over HTTP."""
    try:
        status, content = control(server, path, body)
    except (OSError, http.client.HTTPException) as error:
        server.check()
        raise EngineLostError(NAME, f"{path} was not answered: {error}") from error
    text = content.decode(errors="replace")
    if status != http.client.OK:
        raise RuntimeError(f"{NAME} refuses {path} with status {status}: {text[:2000]}")
    try:
        return json.loads(text)
    except ValueError:
        return text


class ServerProcess:
    """A server that this process has started, and that ends with it."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: EngineConfig,
        *,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        """Starts a server with the architecture and dtype of `model`, with weights of no meaning,
        and waits until it answers.

        Raises UserError where the Python that `HONE_SGLANG_PYTHON` names has no SGLang, or one of a
        version that is not served, and EngineLostError with the end of its log where it ends.
        """
        python = interpreter()
        version = installed_version(python)
        if version is None or not is_served(version):
            raise UserError(
                f"{python} has {'no SGLang' if version is None else f'SGLang {version}'}; versions "
                f"{VERSIONS} are served. Install one in an environment of its own ({INSTALL}), and "
                f"name its Python in {PYTHON}."
            )
        self.key = secrets.token_urlsafe(32)
        self.folder = temporary_folder("hone-sglang-")
        self.port = _free_port()
        self._log = self.folder / "server.log"
        argv = arguments(model, cfg, device=device, max_model_len=max_model_len)
        argv |= {"port": self.port, "api-key": self.key, "model-path": str(self.folder / "model")}
        file = self.folder / "arguments.json"
        with writing(self.folder, TEMPORARY):
            save_config(model.config, self.folder / "model")
            file.touch(mode=0o600)
            file.write_text(json.dumps(_flags(argv)))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(_SERVER_SIDE / "hone_sglang.py")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self.folder, device),
                start_new_session=True,
            )
        # It ends with this object, with hone's process, or by `close`, whichever comes first.
        self._end = weakref.finalize(self, _end, self._process, self.folder)
        self._wait_until_ready()

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """See `Server.call`."""
        return call(self, path, body)

    def check(self) -> None:
        """See `Server.check`."""
        if (code := self._process.poll()) is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            end = "\n".join(lines) or "nothing"
            raise EngineLostError(NAME, f"it ended with code {code}. The end of its log:\n{end}")

    def close(self) -> None:
        """End the server and remove its folder."""
        self._end()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.check()
            try:
                if control(self, "/health", None)[0] == http.client.OK:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.1)
        self.close()
        raise EngineLostError(NAME, f"it did not answer within {_START_S:.0f} s of its start")


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def arguments(
    model: PreTrainedModel, cfg: EngineConfig, *, device: torch.device, max_model_len: int
) -> dict[str, Any]:
    """The arguments of the server by their names, all but its place; True stands for a flag."""
    options: dict[str, Any] = {
        "host": LOOPBACK,
        "dtype": str(model.dtype).removeprefix("torch."),
        "load-format": "dummy",  # a sync fills it
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "context-length": max_model_len + RESERVED_TOKENS,
        "max-running-requests": cfg.max_num_seqs,
        "chunked-prefill-size": cfg.max_num_batched_tokens,
        "incremental-streaming-output": True,
        "custom-weight-loader": LOADER,
        "random-seed": 0,
        "log-level": "warning",
    }
    if not cfg.enable_prefix_caching:
        options["disable-radix-cache"] = True
    if cfg.enforce_eager:
        options["disable-cuda-graph"] = True
    if cfg.enable_sleep:
        options["enable-memory-saver"] = True
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # SGLang's share is of what is free when it starts, ours of the whole device.
        share = min(cfg.gpu_memory_utilization * total / free, 0.95)
        options["mem-fraction-static"] = round(share, 4)
    else:
        options["device"] = "cpu"
    if cfg.kv_cache_gib is not None:
        shape = ModelShape.from_config(model.config.to_dict())
        per_token = shape.kv_bytes_per_token(model.dtype.itemsize)
        options["max-total-tokens"] = int(cfg.kv_cache_gib * GIB) // per_token
    return options


def save_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write the `config.json` that the server reads. It names no end-of-sequence ids: those of each
    request come with it."""
    config = copy.deepcopy(config)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.eos_token_id = None
    config.save_pretrained(folder)


def _flags(options: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


def _environment(folder: Path, device: torch.device) -> dict[str, str]:
    """Variables of the server's process: without those that place hone's own process in a group of
    several, that lead to its packages, which are of other versions, or that change what the
    log-probabilities are of."""
    hidden = (
        *("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
    )
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment[_FOLDER] = str(folder)
    environment["PYTHONPATH"] = str(_SERVER_SIDE)
    # `RESERVED_TOKENS` may lead beyond the model's context, where no token comes.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        environment["CUDA_VISIBLE_DEVICES"] = f"GPU-{uuid}"
    return environment


def _free_port() -> int:
    with listen(LOOPBACK) as listener:
        return int(listener.getsockname()[1])

"""The command line: help, exit codes, messages, and no torch before it is needed."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

import hone
from hone.cli import command as commands
from hone.cli.command import conclude, take_nproc
from hone.cli.help import FIRST_PAGES
from hone.cli.main import main
from hone.config import schema
from hone.config.commands import COMMANDS
from hone.config.load import load_config, resolve_recipe
from hone.config.plan import RECIPE_TREES
from hone.config.recipe import recipe_names
from hone.config.rules.finding import Finding
from hone.config.run import RunConfig
from hone.config.tree import TREES, RLConfig
from hone.distributed.processes import HONE_LAUNCHER
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.hardware import Peaks, gpu_peaks
from hone.observe.console import Console
from hone.observe.resumed_run import save_config
from tests.config import workspace as files
from tests.config.rule_rows import ROWS
from tests.config.trees import WALKED
from tests.config.workspace import BASE
from tests.tables import check_rows, table


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def raising(error: BaseException) -> ModuleType:
    """A command that ends with this error."""

    def run(argv: Sequence[str]) -> int:
        raise error

    module = ModuleType("hone.cli.rl")
    module.run = run  # type: ignore[attr-defined]
    return module


# -- help ---------------------------------------------------------------------------------------


@table("argv", [[], ["--help"], ["-h"], ["help"]])
def test_hone_alone_teaches(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *argv)
    for command in COMMANDS:
        assert f"  {command} " in text
    assert "hone quickstart" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_list_of_commands_loads_nothing_heavy() -> None:
    program = "import sys; from hone.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split("\n")[-2].split()
    assert not {"torch", "transformers", "pydantic", "numpy", "rich"}.intersection(loaded)


def test_a_command_is_an_entry_and_a_module() -> None:
    """What reads a configuration has a first page, and is known to the tests of every tree."""
    for name, entry in COMMANDS.items():
        assert find_spec(f"hone.cli.{entry.module or name}") is not None, name
        assert not COMMANDS.keys() & set(entry.other_names), name
        assert name in TREES or not entry.has_recipes, name
    assert FIRST_PAGES.keys() == TREES.keys() == WALKED.keys()


def check_help(command: str, text: str) -> None:
    """Every key of the tree, with its allowed values, default and help text."""
    flat = " ".join(text.split())
    for field in schema.fields(RECIPE_TREES[command]):
        assert field.key in flat, field.key
        assert field.help in flat, field.key
        if not schema.is_section(field.annotation):
            assert f"--{field.key} {field.allowed}" in flat, field.key


@table("command", RECIPE_TREES)
def test_R22_help_explains_every_key(
    command: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, command, "--help", "all")
    check_help(command, text)
    assert "default: 64]" in text or "trainer" not in RECIPE_TREES[command].model_fields
    assert max(map(len, text.splitlines())) <= 80


def test_R22_help_planted(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.cli.help.fields", lambda tree: list(schema.fields(tree))[:-1])
    text = output(capsys, "generate", "--help", "all")
    with pytest.raises(AssertionError):
        check_help("generate", text)


def test_help_of_one_section(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "rl", "--help", "algorithm.kl")
    assert "--algorithm.kl.estimator  one of k1, k2, k3  [default: k3]" in text
    assert "--algorithm.loss" not in text
    assert "has to do with 'algoritm'" in output(capsys, "rl", "--help", "algoritm", code=2)
    assert "Did you mean algorithm?" in output(capsys, "rl", "--help", "algoritm", code=2)
    assert "no recipe is called so. Did you mean gsm8k?" in output(
        capsys, "rl", "gsm8", "--help", code=2
    )
    assert "--model.path  [required]" in output(capsys, "check", "rl", "--help")
    text = output(capsys, "rl", "--run.steps", "3", "--help", "trainer.recompute")
    values = "one of off, selective, full, auto, or uniform:N"
    assert text.startswith(f"  --trainer.recompute\n      {values}")


@table("command", FIRST_PAGES)
def test_the_first_page_of_a_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nearly everybody sets, examples that the command takes, all sections by name."""
    monkeypatch.setenv("COLUMNS", "80")
    page, tree = FIRST_PAGES[command], TREES[command]
    text = output(capsys, *command.split(), "--help", *["run"] * (command == "plan"))
    if command == "plan":
        return  # its page has the columns of its table instead
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 80
    for key in page.keys.split():
        assert schema.locate(tree, key.split(".")) is not None, key
        assert f"--{key} " in flat
    for section in tree.model_fields:
        assert f"\n  {section} " in text
    joined = page.examples.replace("\\\n", " ")
    for line in joined.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert (program, *words[: len(command.split())]) == ("hone", *command.split())
        assert all(len(part) <= 78 for part in page.examples.splitlines())
        words = words[len(command.split()) :]
        recipe = None if words[0].startswith("-") else words.pop(0)
        if recipe not in (None, "mine.yaml"):
            _, words = take_nproc(words)
            load_config(tree, resolve_recipe(str(recipe)), words)
    if command == "rl":
        assert len(page.keys.split()) == 15
        assert page.examples.count("hone rl") == 3


def test_help_of_a_recipe_has_its_values(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, "rl", "gsm8k", "--help")
    assert "--run.steps  [gsm8k: 200]  [default: 100]" in text
    assert "--reward.functions.0.fn  [gsm8k: math]  [default: exact_match]" in text
    assert "--trainer.optimizer.warmup_steps  [gsm8k: 5]  [default: 0]" in text
    assert "--data.train.0.answer_pattern  [gsm8k: ####\\s*(.+)]" in text
    (workspace / "mine.yaml").write_text("rollout: {temperature: 0.5}\nplan: {gpus: 2}")
    text = output(capsys, "rl", "mine.yaml", "--help", "rollout")
    assert "--rollout.temperature  number >= 0  [mine: 0.5]  [default: 1.0]" in text
    text = output(capsys, "eval", "gsm8k", "--help")
    assert "[gsm8k: 1024]" in text
    assert "--trainer" not in text


def test_a_sections_keys_stand_together(capsys: pytest.CaptureFixture[str]) -> None:
    """None stands behind the heading of another section."""
    heading = ""
    for line in output(capsys, "rl", "--help", "all").splitlines():
        word = line.strip().partition(" ")[0]
        if line and line[0] != " " and schema.locate(RLConfig, word.split(".")) is not None:
            heading = word
        elif line.startswith("  --"):
            key = word.removeprefix("--")
            if key in ("data.train", "data.eval", "reward.functions"):
                heading = key  # a list, with the keys of an entry
            else:
                assert key.rpartition(".")[0].removesuffix(".0") == heading, key


@pytest.mark.parametrize(
    ("env", "escapes"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals(env: dict[str, str], escapes: bool) -> None:
    program = (
        f"import pty; pty.spawn([{sys.executable!r}, '-m', 'hone', 'rl', '--help', 'pipeline'])"
    )
    base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "CI")}
    base |= {"TERM": "xterm-256color"} | env
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=base,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert "pipeline.max_staleness" in done.stdout
    assert ("\x1b[32m" in done.stdout) is escapes
    if not escapes:
        return
    piped = subprocess.run(
        [sys.executable, "-m", "hone", "rl", "--help", "pipeline"],
        capture_output=True,
        text=True,
        env=base,
        check=True,
    )
    assert "\x1b" not in piped.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--version") == f"hone {hone.__version__}\n"


# -- exit codes ---------------------------------------------------------------------------------


@table(
    "error, text",
    [
        (UserError("too bad"), "error: too bad\n"),
        (ValueError("odd"), "error: odd\n(HONE_TRACEBACK=1 shows where)\n"),
        (FileNotFoundError(2, "No such file", "x"), "error: [Errno 2] No such file: 'x'"),
    ],
)
def test_mistakes_exit_with_2_and_no_traceback(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hone.cli.rl", raising(error))
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    found = output(capsys, "rl", code=2)
    assert found.startswith(text)
    assert "Traceback" not in found
    monkeypatch.setenv("HONE_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["rl"])


HOSTILE = "row 3: \x1b[31mred\x1b[0m \x07\r\x9b2J \u202eback\n\x00"
HARMLESS = "row 3: \\x1b[31mred\\x1b[0m \\x07\\r\\x9b2J \\u202eback\n\\x00"


def test_control_characters_of_data_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: Sequence[str]) -> int:
        logging.getLogger("hone").warning("warning: %s", HOSTILE)
        Console(3).warn(HOSTILE)
        raise UserError(HOSTILE)

    module = ModuleType("hone.cli.rl")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hone.cli.rl", module)
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own
        text = output(capsys, "rl", code=2)
    assert text.count(HARMLESS) == 3
    assert not set(text) & set("\x1b\x07\r\x9b\u202e\x00")


def test_each_of_several_errors_says_so(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*BASE["rl"], "--run.resume=100", "--data.prompt_template=x"]
    lines = output(capsys, "rl", *flags, code=2).splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 2


@table("name", ["LostPeerError", "WorkersLostError", "StaleWeightsError"])
def test_errors_that_explain_themselves_exit_with_1_and_no_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    error = type(name, (RuntimeError,), {})("so it is")
    monkeypatch.setitem(sys.modules, "hone.cli.rl", raising(error))
    assert output(capsys, "rl", code=1) == "error: so it is\n"


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hone.cli.rl", raising(KeyError("x")))
    with pytest.raises(KeyError):
        main(["rl"])


def test_ctrl_c_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hone.cli.rl", raising(KeyboardInterrupt()))
    assert output(capsys, "rl", code=130) == (
        "interrupted; the same command goes on from the last checkpoint, or starts over without "
        "one\n"
    )


@table("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@table("launcher", ["hone", "torchrun", None])
def test_the_exit_code_names_the_signal_that_stopped_a_run(
    number: signal.Signals, launcher: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of hone's own launcher all exit alike: it knows which signal came."""
    if launcher is not None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
    if launcher == "hone":
        monkeypatch.setenv(HONE_LAUNCHER, "1")
    code = conclude(RunConfig(), steps=3, stopped_by=number)
    assert code == (130 if launcher == "hone" else 128 + number)
    assert conclude(RunConfig(), steps=3, stopped_by=None) == 0


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean `hone generate`?" in output(capsys, "generat", code=2)
    assert "Commands: quickstart, rl" in output(capsys, "xyz", code=2)
    assert "no such file" in output(capsys, "check", "no_such_recipe", code=2)


def test_a_closed_pipe_is_silent(workspace: Path) -> None:
    program = "from hone.cli.main import main; raise SystemExit(main())"
    command = f"{sys.executable} -c '{program}' rl --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


# -- hone check ---------------------------------------------------------------------------------


def test_check_prints_settings_numbers_and_findings(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, "check", *BASE["rl"], "--trainer.prompts-per-minibatch=16")
    flat = " ".join(text.split())
    assert "prompts_per_minibatch: 16" in flat
    assert "max_completion_tokens:" not in flat
    assert "samples_per_step 512 64 prompts x 8 samples" in flat
    assert "parameters" in flat
    assert "errors: 0, warnings: 0" in flat
    assert max(map(len, text.splitlines())) <= 80
    assert "Derived numbers" in text
    text = output(capsys, "check", "rl", *BASE["rl"], "--rollout.temperature=0", code=2)
    assert "rollout.temperature is 0" in text
    bad_layout = ("--nproc=4", "--trainer.parallel.ring_size=3")
    text = output(capsys, "check", *BASE["rl"], *bad_layout, code=2)
    assert "which does not divide" in " ".join(text.split())
    assert "Derived numbers" not in text


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("command", ["rl", "sft", "eval", "generate"])
def test_a_run_says_that_it_loads_torch_before_it_does(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hone")
    for module in ("hone.loops", "hone.loops.evaluation", "hone.loops.generation"):
        monkeypatch.setitem(sys.modules, module, None)  # would load torch
    for known in (True, False):
        caplog.clear()
        if known:
            monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
        else:
            monkeypatch.delitem(sys.modules, "torch", raising=False)
        with pytest.raises(ImportError):
            import_module(f"hone.cli.{command}").run(BASE[command])
        assert ("loading torch and transformers" in caplog.messages) != known


@pytest.mark.usefixtures("workspace")
@table(
    "gpu, flags, finds",
    [
        ("H100", (), True),
        ("A100", (), False),
        ("H100", ("--model.dtype=float32",), False),
        ("H100", ("--gpu=h100",), False),
        ("H100", ("--run.device=cpu",), False),
    ],
)
def test_check_finds_an_attention_library_that_training_could_not_import(
    gpu: str,
    flags: tuple[str, ...],
    finds: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "_num_gpus", lambda: 1)
    monkeypatch.setattr(commands, "installed_gpu", lambda: gpu_peaks(gpu))
    monkeypatch.setattr("hone.extras.is_installed", lambda name: True)
    monkeypatch.setattr("hone.flash4.is_installed", lambda: True)
    monkeypatch.setattr("hone.flash4.import_problem", lambda: "flash-attn-4 is broken")
    told = output(capsys, "check", *BASE["rl"], "--nproc=1", *flags, code=2 if finds else 0)
    assert ("error: flash-attn-4 is broken" in told) == finds


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_R22_a_run_that_cannot_fit_never_starts(
    nproc: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In `hone rl` as in `hone check`, and only where this host has the GPU."""
    small = Peaks("Small", 1e12, 1e14, "datasheet", memory_gib=1)
    monkeypatch.setattr("hone.cli.command.installed_gpu", lambda: small)
    monkeypatch.setattr("hone.cli.command.max_gpus", lambda visible: 2)
    monkeypatch.setattr("hone.extras.is_installed", lambda name: True)
    monkeypatch.setattr("hone.cli.command.spawn", lambda command, nproc: 0)
    monkeypatch.setitem(sys.modules, "hone.loops", ModuleType("hone.loops"))  # would load torch
    argv = (*BASE["rl"], "--nproc", nproc)
    if nproc == "2":
        told = output(capsys, "rl", *argv, code=2)
    else:
        told = output(capsys, "rl", *BASE["rl"], code=2)
    assert "by prediction the run does not fit into the 1 GiB of a GPU (Small)" in told
    assert "train takes 1." in told
    told = " ".join(output(capsys, "check", *argv, code=2).split())
    assert "generate_peak_gib" in told
    assert "does not fit into the 1 GiB" in told
    undecided = output(capsys, "check", *BASE["rl"])  # other numbers of processes may
    assert "errors: 0" in undecided
    monkeypatch.setattr("hone.cli.command.max_gpus", lambda visible: 0)
    assert "errors: 0" in output(capsys, "check", *argv)


def test_an_engine_in_a_thread_is_planned_within_the_trainers_process(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = (
        "--run.device=cpu",
        "--nproc=1",
        "--pipeline.max_staleness=1",
        "--algorithm.correction.kind=tis",
    )
    assert "errors: 0" in output(capsys, "check", *BASE["rl"], *ahead)


# -- --nproc ------------------------------------------------------------------------------------


def test_R22_processes_that_a_key_asks_for_are_told_by_the_key(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside engines `cluster.num_trainers` says how many there are."""
    monkeypatch.setattr("hone.cli.command.spawn", lambda command, nproc: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("hone.cli.command.available_host_bytes", lambda: 1 << 50)
    engines = ("--run.device=cpu", "--cluster.num_engines=2", "--cluster.num_trainers=16")
    told = output(capsys, "rl", *BASE["rl"], *engines, code=2)
    assert "cluster.num_trainers is 16, and run.device is cpu: this host has 2 CPU cores" in told
    assert "Set cluster.num_trainers to at most 2" in told
    assert "--nproc" not in told


def test_trainers_that_torchrun_starts_on_several_nodes_beside_engines_need_a_cluster(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 4), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    engines = ("--run.device=cpu", "--cluster.num_engines=2", "--cluster.num_trainers=4")
    told = output(capsys, "rl", *BASE["rl"], *engines, code=2)
    assert "the run's Ray would be of one node alone" in told
    assert "Name the Ray cluster that all nodes have joined" in told


def test_nproc_is_given_once_and_not_to_benchmarks(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--nproc is given 2 times" in output(
        capsys, "rl", *BASE["rl"], "--nproc", "2", "--nproc=3", code=2
    )
    for name in ("engine", "train"):
        told = output(capsys, "bench", name, "--nproc=2", code=2)
        assert f"torchrun --nproc-per-node N -m hone bench {name}" in told


@table(
    "host, said",
    [
        (("cpu", 3, 0), None),
        (
            ("cpu", 2, 8),
            "--nproc is 3, and run.device is cpu: this host has 2 CPU cores. Set --nproc to at",
        ),
        (("auto", 2, 0), "this host has 2 CPU cores and no GPU. Set --nproc to at most 2."),
        (
            ("auto", 1, 2),
            "each process takes a GPU, and this host has 2. Set --nproc to at most 2.",
        ),
        (
            ("cuda", 1, 1),
            "each process takes a GPU, and this host has 1. Set --nproc to at most 1.",
        ),
        (("cuda", 8, 0), "this host has none. Leave --nproc out, and set run.device to cpu."),
        (("auto", 1, 3), None),
        (("auto", 1, None), None),
        (("cuda", 1, None), None),
    ],
)
def test_R22_more_processes_than_the_host_can_serve_are_refused(
    host: tuple[str, int, int | None],
    said: str | None,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`host`: run.device, cores, and the most GPUs there can be."""
    device, num_cores, max_gpus = host
    started: list[int] = []

    def spawn(command: Sequence[str], nproc: int, on_death: object) -> int:
        started.append(nproc)
        return 0

    monkeypatch.setattr("hone.cli.command.spawn", spawn)
    monkeypatch.setattr("hone.cli.command.max_gpus", lambda visible: max_gpus)
    monkeypatch.setattr("hone.extras.is_installed", lambda name: True)
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    argv = ("rl", *BASE["rl"], f"--run.device={device}", "--nproc", "3")
    told = output(capsys, *argv, code=0 if said is None else 2)
    assert started == ([3] if said is None else [])
    assert (said or "") in told
    # That plans for other hosts too, but for a run on a CPU, which is this one.
    is_refused = device == "cpu" and said is not None
    told = output(capsys, "check", *argv[1:], code=2 if is_refused else 0)
    assert f"errors: {is_refused:d}" in told


@table("command", RECIPE_TREES)
def test_check_as_json(command: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = json.loads(output(capsys, "check", command, *BASE[command], "--json"))
    assert outcome["findings"] == []
    assert outcome["derived"]["max_sequence_tokens"] > 0
    assert outcome["config"]["model"]["path"] == "model"


def test_check_reads_recipes_and_usage(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workspace / "r.yaml").write_text("model: {path: model}\ndata: {train: [{path: train.jsonl}]}")
    assert "errors: 0, warnings: 0" in output(capsys, "check", "r.yaml")
    assert "errors: 0, warnings: 0" in output(capsys, "check", "rl", "r.yaml")
    assert "usage: hone check" in output(capsys, "check")
    assert "unknown key (r.yaml, line" not in output(capsys, "check", "sft", "r.yaml")
    text = output(capsys, "check", "sft", "r.yaml", "--model=3", code=2)
    assert "model: got 3 (flag --model=3)" in text


@table(
    "command, flag, said",
    [
        ("rl", "--reward.functions=[{fn: exact_match, args: {patern: x}}]", "no setting 'patern'"),
        ("eval", "--reward.functions=[{fn: overlong, args: {buffer_tokens: 9999}}]", "9999, more"),
        ("rl", "--data.train.0.columns.prompt=text", "data.train.0.path: train.jsonl"),
        ("sft", "--data.train=[{path: scores.jsonl}]", "no column for the completion"),
        ("generate", "--data.train=[{path: scores.jsonl, max_rows: 9}]", "line 2: not valid JSON"),
    ],
)
def test_R22_rewards_and_first_rows_are_looked_at_before_a_run(
    command: str, flag: str, said: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = '{"prompt": "1+1="}\n' + ("{" if command == "generate" else "")
    (workspace / "scores.jsonl").write_text(rows)
    for argv in (("check", command), (command,)):
        assert said in " ".join(output(capsys, *argv, *BASE[command], flag, code=2).split())


def test_prompts_that_the_tokenizer_cannot_write_are_told_before_a_run(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "?"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    held = {"version": "1.0", "added_tokens": [], "model": tokenizer, "pre_tokenizer": split}
    (workspace / "model" / "tokenizer.json").write_text(json.dumps(held))
    rows = [{"prompt": "ab", "answer": "a", "completion": "b"}]
    (workspace / "train.jsonl").write_text(json.dumps(rows[0]))
    assert "errors: 0" in output(capsys, "check", "rl", *BASE["rl"])
    rows.append({"prompt": "abc", "answer": "a"})
    (workspace / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = "train.jsonl, line 2: the tokenizer cannot encode 'abc'"
    for argv in (("check", "rl"), ("rl",)):
        assert said in " ".join(output(capsys, *argv, *BASE["rl"], code=2).split())
    (workspace / "train.jsonl").write_text('{"prompt": "ab", "completion": "ac"}')
    told = " ".join(output(capsys, "check", "sft", *BASE["sft"], code=2).split())
    assert "cannot encode 'ac'" in told
    pairs = [{"prompt": "ab", "chosen": "a", "rejected": each} for each in ("b", "bc")]
    (workspace / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for command in ("dpo", "reward-model"):
        told = " ".join(output(capsys, "check", command, *BASE[command], code=2).split())
        assert "pairs.jsonl, line 2: the tokenizer cannot encode 'bc'" in told


def test_errors_stand_last_and_are_named_before_the_numbers(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--rollout.temperature=0", "--reward.max_failure_rate=1")
    text = output(capsys, "check", "rl", *BASE["rl"], *flags, code=2)
    before, _, behind = text.partition("Derived numbers")
    assert "errors: 1, of rollout.temperature; they stand below the numbers\n" in before
    assert text.rstrip().splitlines()[-1].startswith("errors: 1, warnings: ")
    assert behind.index("Planned for") < behind.rindex("warning: ") < behind.index("error: ")


def test_a_model_that_is_refused_has_no_sizes(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model.path=mixtral", "--data.train.0.path=train.jsonl", "--gpu=4090")
    outcome = json.loads(output(capsys, "check", "rl", *flags, "--json", code=2))
    assert "samples_per_step" in outcome["derived"]
    assert not {"parameters", "total_gib", "kv_bytes_per_token"} & outcome["derived"].keys()
    (found,) = (x["message"] for x in outcome["findings"] if x["level"] == "error")
    assert "is of the family mixtral" in found


def test_a_check_takes_a_public_shape_in_place_of_a_model(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--data.train.0.path=train.jsonl", "--gpu=h100", "--json")
    by_name, by_shape = (
        json.loads(output(capsys, "check", "rl", given, *flags))
        for given in ("--model.path=Qwen/Qwen3-0.6B", "--model.shape=qwen3-0.6b")
    )
    assert by_shape["derived"] == by_name["derived"]
    assert any("a run needs a model in model.path" in note for note in by_shape["notes"])
    main(["check", "rl", "--model.shape=qwen3-06b", *flags])
    assert "did you mean qwen3-0.6b?" in capsys.readouterr().err


@table(
    "argv, command",
    [
        ("", "rl"),
        ("rl", "rl"),
        ("sft", "sft"),
        ("plan.yaml", "rl"),
        ("plan.yaml --engine.enable_sleep true", "rl"),
    ],
)
def test_a_check_without_data_has_numbers_of_training_beside_the_error(
    argv: str, command: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "--model.shape=qwen3-0.6b", "--plan.gpus=1", "--output=plan.yaml"])
    words = [*argv.split(), "--model.shape=qwen3-0.6b", "--gpu=h200", "--nproc=1"]
    capsys.readouterr()
    told = " ".join(output(capsys, "check", *words, code=2).split())
    assert f"Checked for `hone {command}`." in told
    found = json.loads(output(capsys, "check", *words, "--json", code=2))
    assert found["derived"]["train_peak_gib" if command == "rl" else "training_peak_gib"] > 5
    messages = [x["message"] for x in found["findings"] if x["level"] == "error"]
    assert messages == ["data.train is empty. Name at least one source."]


def test_a_check_without_a_model_says_what_gives_the_numbers(
    workspace: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hint = "Without a model the numbers come from a public one of its sizes: --model.shape"
    with caplog.at_level("INFO"):
        assert (
            main(["plan", "--model.shape=qwen3-0.6b", "--plan.gpus=1", "--output=plan.yaml"]) == 0
        )
    assert "plan.yaml, once model.path and data.train are set in it" in caplog.text
    for words in (["plan.yaml"], ["rl", "--data.train.0.path=train.jsonl"]):
        assert main(["check", *words]) == 2
        assert hint in capsys.readouterr().err
    assert main(["check", "rl", "--model.path=model", "--run.steps=x"]) == 2
    assert hint not in capsys.readouterr().err


@table(
    "flags, said",
    [
        ("--data.train=3", "data.train: got 3"),
        ("--data.train.0.weight=2", "data.train.0.path: required"),
        ("--run.steps=x", "data.train: required"),
    ],
)
def test_a_check_of_data_that_are_no_sources_names_them(
    flags: str, said: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "rl", "--model.path=model", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_of_pairs_is_known_by_its_columns(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = workspace / "r.yaml"
    recipe.write_text("{model: {path: model}, data: {train: [{path: pairs.jsonl}]}}")
    flags = ("r.yaml", "--trainer.optimizer.lr=1e-6")
    assert "Checked for `hone dpo`." in output(capsys, "check", *flags)
    source = "{path: train.jsonl, columns: {chosen: prompt, rejected: answer}}"
    recipe.write_text(f"{{model: {{path: model}}, data: {{train: [{source}]}}}}")
    main(["check", *flags])
    assert "Checked for `hone dpo`." in capsys.readouterr().out


def test_a_name_that_the_hub_refuses_is_told_with_what_is_near(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(name: str, file: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise LocalEntryNotFoundError("not here")
        raise RepositoryNotFoundError("404", response=Mock())

    monkeypatch.setattr("huggingface_hub.hf_hub_download", answer)
    monkeypatch.setattr("hone.hub.unreachable", lambda: None)
    flags = ("--model.path=Qwen/Qwen3-06B", "--data.train.0.path=train.jsonl")
    for argv in (("check", "rl"), ("rl",)):
        told = " ".join(output(capsys, *argv, *flags, code=2).split())
        assert "model.path 'Qwen/Qwen3-06B' is no folder here" in told
        assert "there is no such model" in told
        assert "Did you mean qwen3-0.6b?" in told
    config = str(workspace / "mixtral" / "config.json")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: config)
    flags = ("--model.path=mistralai/Mixtral-8x7B-v0.1", flags[1])
    told = " ".join(output(capsys, "check", "rl", *flags, code=2).split())
    assert "is of the family mixtral" in told


def test_a_prompt_that_fills_the_context_is_told_once(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves no room to completions of training, nor to those of evaluations."""
    evaluates = ("--data.eval=[{path: train.jsonl}]", "--eval.every_n_steps=5")
    flags = (*BASE["rl"], *evaluates, f"--data.max_prompt_tokens={files.CONTEXT}")
    told = " ".join(output(capsys, "check", "rl", *flags, code=2).split())
    assert told.count("no less than the context of the model") == 1


def test_R22_a_run_that_cannot_go_on_is_told_by_hone_check(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*BASE["rl"], "--run.dir=run"]
    save_config(load_config(RLConfig, None, flags))
    (workspace / "run" / "checkpoints" / "step_1").mkdir(parents=True)
    assert "errors: 0" in output(capsys, "check", *flags)
    for command, flag, said in (
        ("rl", "--run.resume=never", "run.resume is never"),
        ("rl", "--model.init=random", "holds a run that trains another model"),
        ("sft", "", "holds a run of `hone rl`"),
    ):
        argv = [*BASE[command], "--run.dir=run", *flag.split()]
        assert said in " ".join(output(capsys, "check", command, *argv, code=2).split())


LIGHT = """
import json, os, resource, sys, time
from hone.cli.main import main

def cpu_s(who):
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime

found, start_s = [], cpu_s(resource.RUSAGE_SELF)
for argv in json.load(sys.stdin):
    before_s, said = cpu_s(resource.RUSAGE_CHILDREN), os.memfd_create("said")
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.dup2(said, 1), os.dup2(said, 2)
            code = main(argv)
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            print("HEAVY", sorted({"torch", "transformers"} & set(sys.modules)))
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.lseek(said, 0, os.SEEK_SET)
    text = open(said, encoding="utf-8").read()
    found.append((code, text, start_s + cpu_s(resource.RUSAGE_CHILDREN) - before_s))
json.dump(found, sys.stdout)
"""


def run_hone(rows: Sequence[Sequence[str]]) -> list[tuple[int, str, float]]:
    """Exit code, output and seconds of computing of a fresh `hone` for each row of arguments.

    The rows are forked from one process that has just imported the command line, whose seconds are
    counted to each. Seconds of computing, as on a busy machine a process waits for a core besides.
    """
    done = subprocess.run(
        [sys.executable, "-c", LIGHT],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(rows)
    return [tuple(one) for one in found]


def test_nothing_heavy_is_imported(workspace: Path) -> None:
    pages = [[command, "--help"] for command in ("rl", "report", "quickstart")]
    rows = [["--help"], *pages, ["check", *BASE["rl"]]]

    def check(argv: list[str], found: tuple[int, str, float]) -> None:
        code, text, seconds = found
        assert (code, "HEAVY []" in text) == (0, True), text
        assert seconds < 15

    check_rows(zip(rows, run_hone(rows), strict=True), check, minimum=5)


def test_R22_errors_come_within_5_s_without_torch(workspace: Path) -> None:
    firsts = list({row[0]: row for row in reversed(ROWS)}.values())  # of each command
    said = run_hone(
        [["check", command, *BASE[command], *flags.split()] for command, flags, *_ in firsts]
    )

    def check(row: tuple[str, ...], found: tuple[int, str, float]) -> None:
        (_, _, level, _), (code, text, seconds) = row, found
        assert code == (2 if level == "error" else 0)
        assert f"{level}: " in text
        assert "HEAVY []" in text
        assert seconds < 15

    check_rows(zip(firsts, said, strict=True), check, minimum=9)


def test_commands_refuse_before_they_load_torch(workspace: Path) -> None:
    sections = {"rl": "train", "sft": "train", "eval": "eval", "generate": "train"}
    said = run_hone(
        [[name, *BASE[name], f"--data.{section}=[]"] for name, section in sections.items()]
    )

    def check(section: str, found: tuple[int, str, float]) -> None:
        code, text, _ = found
        assert code == 2
        assert "error: " in text
        assert f"data.{section}" in text
        assert "HEAVY []" in text

    rows = zip(sections.values(), said, strict=True)
    check_rows(dict(zip(sections, rows, strict=True)), check)


OVER = {
    "--log.samples_per_step=1": (0, "holds a run of 4: nothing is left to train"),
    "--run.steps=3": (0, "holds a run of 4: nothing is left to train"),
    "--trainer.optimizer.lr=0.5": (2, "settings have changed since: trainer.optimizer.lr is"),
    "--run.seed=7": (2, "run.seed is 7, was 0"),
}
"""What a run of four steps that is over says to a flag, and its exit code."""


def test_a_run_that_is_over_says_so_without_torch(workspace: Path) -> None:
    flags = [*BASE["rl"], "--run.dir=run", "--run.steps=4"]
    save_config(commands.load_arguments(RLConfig, flags)[0])
    for file, text in {
        "checkpoints/step_4/hone_manifest.json": "{}",
        "model/config.json": "{}",
        "model/hone_manifest.json": '{"content": {"metadata": {"step": 4}}}',
        "events.jsonl": '{"kind": "finished", "timestamp_s": 1.0}\n',
    }.items():
        (workspace / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (workspace / "run" / file).write_text(text)
    found = run_hone([["rl", *flags, flag] for flag in OVER])

    def check(expected: tuple[int, str], found: tuple[int, str, float]) -> None:
        (code, words), (got, text, _) = expected, found
        assert (got, words in " ".join(text.split()), "HEAVY []" in text) == (code, True, True), (
            text
        )

    rows = zip(OVER.values(), found, strict=True)
    check_rows(dict(zip(OVER, rows, strict=True)), check)


@table("name", recipe_names())
def test_shipped_recipes_load(name: str) -> None:
    """Every recipe in the package fills the tree of at least one command."""
    from hone.config.load import load_config, resolve_recipe

    path = resolve_recipe(name)
    loaded: list[str] = []
    problems: list[str] = []
    for command, tree in RECIPE_TREES.items():
        try:
            load_config(tree, path, ["--model.path=m"])
            loaded.append(command)
        except UserError as error:
            problems.append(f"{command}: {error}")
    assert loaded, "\n".join(problems)


@table(
    "num_gpus, flag, told",
    [
        (
            0,
            "--run.device=auto",
            "Planned for this host's CPU, where a run would be: no GPU is here. --gpu NAME",
        ),
        (1, "--run.device=auto", "Planned for the GPUs of this host"),
        (0, "--run.device=cpu", "Planned for this host's CPU (run.device cpu)."),
        (0, "--run.device=cuda", "Planned for GPUs (run.device cuda), though this host has none"),
    ],
)
def test_check_says_for_what_hardware_it_plans(
    num_gpus: int,
    flag: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "_num_gpus", lambda: num_gpus)
    monkeypatch.setattr(commands, "installed_gpu", lambda: None)
    main(["check", *BASE["rl"], flag])
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_check_warns_where_a_gpu_is_as_good_as_full(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no effect on the exit code, and hides nothing that is said of the host."""
    size = "--nproc=64 --trainer.parallel.zero_stage=3 --engine.tensor_parallel_size=4"
    room = "--engine.enable_sleep=true --trainer.max_tokens_per_microbatch=2048"
    gpu = ("--gpu=h100", "--model.shape=llama-3.1-70b", *size.split(), *room.split())
    said = Finding("warning", ("run.dir",), "the host is full")
    monkeypatch.setattr(commands, "check_host", lambda plan: [said])
    told = " ".join(output(capsys, "check", "rl", *BASE["rl"], *gpu).split())
    assert "warning: by prediction the run hardly fits into the 79 GiB of a GPU (H100)" in told
    assert "Set trainer.offload to optimizer." in told
    assert "warning: the host is full" in told
    told = output(capsys, "check", "rl", *BASE["rl"], *gpu, "--trainer.offload=optimizer")
    assert "hardly fits" not in told


@table(
    "command, flags, number",
    [
        ("rl", "", 1),
        ("rl", "--trainer.parallel.ulysses_size=2 --engine.tensor_parallel_size=4", 4),
        ("sft", "--trainer.parallel.pipeline_parallel_size=2", 2),
        ("eval", "--engine.tensor_parallel_size=2", 2),
        ("rl", "--cluster.num_trainers=2 --cluster.num_engines=1", 3),
    ],
)
def test_on_named_gpus_a_check_without_processes_is_for_the_fewest(
    command: str, flags: str, number: int, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = ("--gpu=4090", "--model.path=Qwen/Qwen3-32B")
    told = output(capsys, "check", command, *BASE[command], *gpu, *flags.split(), code=2)
    flat = " ".join(told.split())
    assert f"Planned for {number} x RTX 4090 of 24 GiB." in flat
    assert "add --nproc N" not in flat
    assert "error: by prediction the run does not fit into the 24 GiB of a GPU" in flat


def test_a_check_for_the_fewest_processes_asks_no_oftener_for_the_model(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one with their number does, on the hub where the model has no folder here."""
    asked, known = list[str](), ModelFacts.known

    def recorded(path: str, *, may_fetch: bool = False) -> ModelFacts | None:
        asked.append(path)
        return known(path, may_fetch=may_fetch)

    monkeypatch.setattr(ModelFacts, "known", recorded)
    words = ("check", *BASE["rl"], "--gpu=h200", "--model.path=Qwen/Qwen3-0.6B")
    size = "--trainer.parallel.ulysses_size=2"
    assert "Planned for 2 x H200" in output(capsys, *words, size)
    number = len(asked)
    assert "Planned for 2 x H200" in output(capsys, *words, size, "--nproc=2")
    assert len(asked) == 2 * number


def test_check_refuses_more_processes_than_this_host_has_cores_for(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `hone rl` would; of GPUs, and of a device that is not named, others may have more."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for device, is_refused in (("cpu", True), ("auto", False)):
        main(["check", *BASE["rl"], f"--run.device={device}", "--nproc=3"])
        told = " ".join(capsys.readouterr().out.split())
        assert ("--nproc is 3, and run.device is cpu: this host has 2 CPU cores" in told) == (
            is_refused
        )


@table(
    "path, is_told",
    [("someone/else-7b", True), ("Qwen/Qwen3-0.6B", False), ("model", False), ("./none", False)],
)
def test_check_says_where_sizes_are_not_known(
    path: str, is_told: bool, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--model.path={path}", "--data.train.0.path=train.jsonl", "--gpu", "h100")
    for form in ([], ["--json"]):
        main(["check", *flags, *form])
        told = " ".join(capsys.readouterr().out.split())
        assert (f"sizes of model.path '{path}' are not known here, so memory was not" in told) == (
            is_told
        )
        assert (f"`hf download {path} config.json`" in told) == is_told


def test_check_says_which_file_lacks_sizes(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    (workspace / "model" / "config.json").write_text(json.dumps(config))
    flags = ("--model.path=model", "--data.train.0.path=train.jsonl", "--gpu", "h100")
    main(["check", *flags])
    told = " ".join(capsys.readouterr().out.split())
    assert "The configuration of the gpt2 model lacks 'hidden_size'. So memory was not" in told
    assert "checked for model.path 'model'" in told


def test_check_tells_whose_recipe_it_is_and_what_it_chose(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "r.yaml").write_text("data: {max_tokens: 64, train: [{path: train.jsonl}]}")
    flags = ("r.yaml", "--model.path=model", "--trainer.optimizer.lr=1e-5")
    assert "Checked for `hone sft`." in output(capsys, "check", *flags)
    (workspace / "r.yaml").write_text(
        "{model: {path: model}, data: {train: [{path: train.jsonl}]}, run: {steps: 3},"
        " trainer: {optimizer: {warmup_steps: 5}}}"
    )
    small = files.MODEL_CONFIG | {"max_position_embeddings": 64}
    (workspace / "model" / "config.json").write_text(json.dumps(small))
    told = " ".join(output(capsys, "check", "r.yaml").split())
    assert "Checked for `hone rl`. data.max_prompt_tokens 32, rollout.max_completion_tokens" in told
    assert "warning: trainer.optimizer.warmup_steps is 5, more than the optimizer steps of" in told
    assert "errors: 0, warnings: 1" in told
    told = " ".join(output(capsys, "check", "generate", "r.yaml").split())
    assert "`hone generate` leaves out of r.yaml: run.steps, trainer" in told
    assert json.loads(output(capsys, "check", "r.yaml", "--json"))["notes"][0].startswith("data.m")

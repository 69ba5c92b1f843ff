"""Shares of the hardware limit: known napkin numbers, and none where the limit is not known."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.loops.conftest import MakeConfig
from tests.tiny_runs import lines
from tests.tools.bench.fakes import SHAPE

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.run import LogConfig
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.mesh import Mesh
from hone.families.model_facts import ModelFacts
from hone.families.vision.spec import TowerCost
from hone.hardware import GIB, GPUS
from hone.loops import reinforce, supervised
from hone.loops.launch import plan_run
from hone.loops.recorder import Limits, Recorder, max_mismatch_kl
from hone.loops.run import Run
from hone.model_input import Content, ModelInput
from hone.models.settings import LoraConfig
from hone.observe.alarms import Alarms
from hone.observe.console import Console
from hone.observe.device_memory import DeviceMemory, Reading
from hone.observe.gpu_use import GPUUse
from hone.observe.loggers import RunLog
from hone.observe.metrics import Last, Metrics, Sum, to_scalars
from hone.observe.spans import Spans
from hone.planner.roofline import RowPasses, generation_time_s, training_flops
from hone.types import NOT_SAMPLED, Branch, Column, Group, Prompt, Row, Sample, StopReason, Turn

LIMITS = Limits(
    shape=SHAPE,
    peaks=GPUS[0],
    num_devices=2,
    num_engines=2,
    devices_per_engine=1,
    overlaps=False,
    bytes_per_value=2,
    kv_bytes_per_value=2,
    packs_rows=False,
    shares_prefixes=True,
    max_num_seqs=8,
    passes=[RowPasses(SHAPE)],
    encodes_again=False,
)
SECONDS = {"generate": 3.0, "experience": 0.5, "train": 1.5, "step": 6.0}


def make_group(index: int) -> Group:
    prompt = Prompt(id=f"p{index}", token_ids=(1, 2, 3), text="")
    sample = Sample(
        id=f"s{index}",
        prompt=prompt,
        index=0,
        token_ids=[4] * 5,
        logprobs=[0.0] * 5,
        weight_versions=[0] * 5,
        loss_mask=[True] * 5,
        stop_reason=StopReason.EOS,
        turns=[Turn(start=0, end=5, text="", stop_reason=StopReason.EOS)],
    )
    return Group(id=f"g{index}", prompt=prompt, samples=[sample])


def make_episodes() -> Group:
    """Samples of three turns with observations of 7 and 3 tokens, and of one: 9 and 4 sampled."""
    group, spans = make_group(0), [(0, 5), (12, 14), (17, 19)]
    versions = [NOT_SAMPLED] * 19
    for start, end in spans:
        versions[start:end] = [0] * (end - start)
    long = replace(
        group.samples[0],
        token_ids=[4] * 19,
        logprobs=[0.0] * 19,
        weight_versions=versions,
        loss_mask=[version == 0 for version in versions],
        turns=[Turn(start=s, end=e, text="", stop_reason=StopReason.EOS) for s, e in spans],
    )
    short = replace(
        group.samples[0],
        id="s1",
        token_ids=[4] * 4,
        logprobs=[0.0] * 4,
        weight_versions=[0] * 4,
        loss_mask=[True] * 4,
        turns=[Turn(start=0, end=4, text="", stop_reason=StopReason.EOS)],
    )
    return replace(group, samples=[long, short])


GROUPS = [make_group(index) for index in range(4)]
ROWS = [
    Row(id=f"r{index}", token_ids=[1] * 8, loss_mask=[False] * 3 + [True] * 5) for index in range(4)
]


def test_measured_times_are_compared_with_the_limits() -> None:
    """Each of two engines has two of the four samples; two devices share the rows."""
    generate_s = generation_time_s(
        SHAPE,
        GPUS[0],
        [3, 3],
        [5, 5],
        max_num_seqs=8,
        prefill_lengths=[3, 3],
        bytes_per_value=2,
        kv_bytes_per_value=2,
    )
    train_s = training_flops(SHAPE, [8] * 4, num_head_tokens=20) / GPUS[0].flops_per_s / 2
    of_data_sheet = {"perf/mfu": pytest.approx(train_s / 2.0 * 790 / 989)}
    assert LIMITS.ratios(GROUPS, ROWS, SECONDS) == of_data_sheet | {
        "perf/R_gen": pytest.approx(generate_s / 3.0),
        "perf/R_train": pytest.approx(train_s / 2.0),
        "perf/R_step": pytest.approx((generate_s + train_s) / 6.0),
    }
    assert replace(LIMITS, overlaps=True).ratios(GROUPS, ROWS, SECONDS) == of_data_sheet | {
        "perf/R_train": pytest.approx(train_s / 2.0),
        "perf/R_step": pytest.approx(max(generate_s, train_s) / 6.0),
    }
    unknown = replace(LIMITS, peaks=replace(GPUS[0], datasheet_flops_per_s=None))
    assert "perf/mfu" not in unknown.ratios(GROUPS, ROWS, SECONDS)


def test_the_limit_encodes_each_image_of_a_step_once() -> None:
    """One image is in two groups; each of the two others in one."""
    tower = TowerCost(
        num_params=1,
        flops_per_patch=1e9,
        attention_flops_per_pair=1e6,
        patches_per_token=4,
    )
    limits = replace(LIMITS, num_engines=1, shape=replace(SHAPE, tower=tower))
    seconds = {**SECONDS, "generate": 1e-3}
    without = limits.ratios(GROUPS, ROWS, seconds)["perf/R_gen"]
    groups = []
    for group, images in zip(GROUPS, (["a"], ["a"], ["b", "c"], []), strict=True):
        contents = [
            Content(kind="image", hash=name, start=place, num_tokens=1)
            for place, name in enumerate(images)
        ]
        prompt = replace(group.prompt, model_input=ModelInput(tuple(contents)))
        sample = replace(group.samples[0], prompt=prompt)
        groups.append(replace(group, prompt=prompt, samples=[sample]))
    expected = 3 * (4 * 1e9 + 16 * 1e6) / GPUS[0].flops_per_s
    found = limits.ratios(groups, ROWS, seconds)["perf/R_gen"]
    assert found - without == pytest.approx(expected / 1e-3)


def test_what_an_environment_says_is_read_and_not_generated(tmp_path: Path) -> None:
    """Each turn is sampled behind all before it; answers of the environment are read once."""
    limits, groups = replace(LIMITS, num_engines=1), [make_episodes()]
    generate_s = generation_time_s(
        SHAPE,
        GPUS[0],
        [3, 3 + 12, 3 + 17, 3],
        [5, 2, 2, 4],
        max_num_seqs=8,
        prefill_lengths=[3, 7, 3],
        bytes_per_value=2,
        kv_bytes_per_value=2,
    )
    assert limits.ratios(groups, ROWS, SECONDS)["perf/R_gen"] == pytest.approx(generate_s / 3.0)

    spans = Spans(clock=iter([0.0, 0.0, 3.0, 6.0]).__next__)
    with RunLog(tmp_path, LogConfig(to=())) as log, Console(9) as console:
        recorder = Recorder(Mesh.alone("cpu"), spans, Alarms(), log, console)
        with spans.span("generate"):
            pass
        recorder.record(1, {}, groups=groups, rows=ROWS)
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert row["perf/generated_tokens_per_s"] == (9 + 4) / 3.0
    (written,) = map(json.loads, (tmp_path / "histograms.jsonl").open())
    assert (written["completion_tokens"]["low"], written["completion_tokens"]["high"]) == (4, 9)
    samples = [*map(json.loads, (tmp_path / "samples.jsonl").open())]
    assert [sample["num_tokens"] for sample in samples] == [9, 4]


def make_rewritten() -> Group:
    """A sample of two paths, the second one behind 2 of the first one's 3 + 5 tokens and 4 new
    ones, and a sample with a prompt of 6 tokens of its own."""
    group = make_group(0)
    (plain,) = group.samples
    branch = Branch(
        prompt_ids=plain.prompt.token_ids,
        token_ids=plain.token_ids,
        logprobs=plain.logprobs,
        weight_versions=plain.weight_versions,
        loss_mask=plain.loss_mask,
        turns=plain.turns,
    )
    context = (*plain.prompt.token_ids[:2], 7, 7, 7, 7)
    rewritten = replace(plain, prompt=replace(plain.prompt, token_ids=context), branches=[branch])
    opened = replace(plain, id="s1", prompt=replace(plain.prompt, token_ids=(9,) * 6))
    return replace(group, samples=[rewritten, opened])


def test_what_differs_in_a_rewritten_history_is_read_again() -> None:
    """And each opening of a group's episodes once."""
    limits = replace(LIMITS, num_engines=1)
    generate_s = generation_time_s(
        SHAPE,
        GPUS[0],
        [3, 6, 6],
        [5, 5, 5],
        max_num_seqs=8,
        prefill_lengths=[3, 6, 4],
        bytes_per_value=2,
        kv_bytes_per_value=2,
    )
    ratios = limits.ratios([make_rewritten()], ROWS, SECONDS)
    assert ratios["perf/R_gen"] == pytest.approx(generate_s / 3.0)


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        (("--model.dtype=bfloat16",), 1e-2),
        (("--model.dtype=float32",), 1e-4),
        ((), 1e-4),  # of a CPU
        (("--model.dtype=float32", "--engine.kv_cache_dtype=fp8"), 1e-2),
        (("--model.dtype=float32", "--engine.weight_dtype=int8"), 1e-2),
    ],
)
def test_the_limit_of_the_mismatch_is_that_of_the_format_that_computes(
    flags: tuple[str, ...], limit: float
) -> None:
    """Of bfloat16 experts 1.3e-4 is usual; several trainers hold float32 masters all the same."""
    cfg = load_config(RLConfig, None, ["--model.path=m", "--data.train=[{path: t}]", *flags])
    found = max_mismatch_kl(plan_run(cfg, "cpu", world_size=1))
    assert found == limit
    names = [alarm.name for alarm in Alarms(max_mismatch_kl=found).check(1, MISMATCH)]
    assert names == ([] if limit == 1e-2 else ["mismatch_kl"])


MISMATCH = {"off_policy/mismatch_kl": 1.3e-4}


def test_a_prompt_that_rows_share_counts_once_in_the_limit_of_training() -> None:
    rows = [replace(row, group_id="g", id=f"r{n}") for n, row in enumerate(ROWS)]
    whole, prompts = (
        training_flops(SHAPE, lengths, num_head_tokens=head) / GPUS[0].flops_per_s / 2
        for lengths, head in (([8] * 4, 20), ([3] * 3, 0))
    )
    for shares, expected in ((True, whole - prompts), (False, whole)):
        found = replace(LIMITS, shares_prefixes=shares).ratios(GROUPS, rows, SECONDS)
        assert found["perf/R_train"] == pytest.approx(expected / 2.0)


def plan_of(*flags: str, **others: ModelFacts) -> RunPlan:
    cfg = load_config(RLConfig, None, ["--model.path=m", "--data.train=[{path: t}]", *flags])
    return resolve(cfg, None, Devices(), world_size=1, others=others)


def test_adapters_are_trained_alone_and_count_in_passes_of_the_policy() -> None:
    """The reference is the policy without them."""
    flags = ("--model.lora.rank=4", "--algorithm.kl.coef=0.1", "--trainer.num_epochs=2")
    limits = Limits.of(plan_of(*flags), SHAPE, GPUS[0])
    lora = LoraConfig(rank=4)
    assert limits.passes == [
        RowPasses(SHAPE, lora=lora, num_scorings=1, num_epochs=2),
        RowPasses(SHAPE, num_scorings=0, num_epochs=0),  # the engine
        RowPasses(SHAPE, num_scorings=1, num_epochs=0),
    ]
    whole = Limits.of(plan_of("--trainer.num_epochs=2"), SHAPE, GPUS[0])
    assert whole.passes[0] == RowPasses(SHAPE, num_scorings=1, num_epochs=2)
    flops = training_flops(SHAPE, [8] * 4, num_head_tokens=20, lora=lora)
    found = replace(LIMITS, passes=[RowPasses(SHAPE, lora=lora)]).ratios(GROUPS, ROWS, SECONDS)
    expected = flops / 2 / (GPUS[0].datasheet_flops_per_s or 0.0) / 2.0
    assert found["perf/mfu"] == pytest.approx(expected)


def test_a_critic_gives_values_and_each_model_counts_with_its_size() -> None:
    """A teacher of unknown size does not count: it may have any."""
    flags, larger = ("--algorithm.advantage=gae", "--critic.path=b"), replace(SHAPE, num_layers=9)
    passes = Limits.of(plan_of(*flags), SHAPE, GPUS[0]).passes
    critic = RowPasses(SHAPE, num_scorings=1, num_epochs=1, has_head=False)
    assert critic in passes
    known = Limits.of(plan_of(*flags, b=ModelFacts.of_shape(larger)), SHAPE, GPUS[0]).passes
    assert replace(critic, shape=larger) in known
    teacher = RowPasses(larger, num_scorings=1, num_epochs=0)
    for facts, number in (({}, 0), ({"c": ModelFacts.of_shape(larger)}, 1)):
        found = Limits.of(plan_of("--teacher.path=c", **facts), SHAPE, GPUS[0]).passes
        assert [one.shape for one in found].count(larger) == number
        assert found.count(teacher) == number


def test_a_trainer_that_has_a_tower_of_its_own_encodes_each_image_once_more() -> None:
    tower = TowerCost(
        num_params=1, flops_per_patch=1e9, attention_flops_per_pair=1e6, patches_per_token=4
    )
    image = Content(kind="image", hash="a", start=0, num_tokens=1)
    rows = [replace(row, model_input=ModelInput((image,))) for row in ROWS]
    shape = replace(SHAPE, tower=tower)
    shared = replace(LIMITS, shape=shape).ratios(GROUPS, rows, SECONDS)
    own = replace(LIMITS, shape=shape, encodes_again=True).ratios(GROUPS, rows, SECONDS)
    encode_s = (4 * 1e9 + 16 * 1e6) / GPUS[0].flops_per_s / 2
    assert own["perf/R_train"] - shared["perf/R_train"] == pytest.approx(encode_s / 2.0)
    assert Limits.of(plan_of("--model.lora.rank=4"), SHAPE, GPUS[0]).encodes_again
    assert not Limits.of(plan_of(), SHAPE, GPUS[0]).encodes_again


def test_nothing_is_compared_with_a_limit_that_is_not_known() -> None:
    assert replace(LIMITS, peaks=None).ratios(GROUPS, ROWS, SECONDS) == {}
    assert LIMITS.ratios(GROUPS, [], SECONDS) == {}


@pytest.mark.parametrize(
    ("busy_s", "counted_s", "share"),
    [(9.0, None, 0.75), (9.0, 5.0, 0.9), (12.6, 6.3, 1.0), (5.1, 2.5, 1.0)],
    ids=["in turns", "ahead", "through an evaluation", "a report that is late"],
)
def test_engines_are_at_work_for_a_share_of_the_time_in_which_they_are_counted(
    tmp_path: Path, busy_s: float, counted_s: float | None, share: float
) -> None:
    """Two engines, in a step of six seconds."""
    spans = Spans(clock=iter([0.0, 0.0, 3.0, 6.0]).__next__)
    with RunLog(tmp_path, LogConfig(to=())) as log, Console(9) as console:
        recorder = Recorder(Mesh.alone("cpu"), spans, Alarms(), log, console, LIMITS)
        with spans.span("generate"):
            pass
        metrics: Metrics = {"perf/engine_busy_s": Sum(busy_s)}
        if counted_s is not None:
            metrics["perf/engine_counted_s"] = Last(counted_s)
        recorder.record(1, metrics, groups=GROUPS, rows=ROWS)
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert row["time/step_s"] == 6.0
    assert row["perf/engine_busy_share"] == pytest.approx(share)


@pytest.mark.parametrize(("overlaps", "for_weights"), [(False, 0.5), (True, 0.25)])
def test_who_waits_for_whom(tmp_path: Path, *, overlaps: bool, for_weights: float) -> None:
    """Of six seconds three are for samples. In turns engines stand still in the other three; ahead
    of the training two engines are at work for nine of the twelve that they have."""
    spans = Spans(clock=iter([0.0, 0.0, 3.0, 6.0]).__next__)
    limits = replace(LIMITS, overlaps=overlaps)
    with RunLog(tmp_path, LogConfig(to=())) as log, Console(9) as console:
        recorder = Recorder(Mesh.alone("cpu"), spans, Alarms(), log, console, limits)
        with spans.span("generate"):
            pass
        untrained = replace(ROWS[0], loss_mask=[False] * 8)
        metrics: Metrics = {"perf/engine_busy_s": Sum(9.0)}
        recorder.record(1, metrics, groups=GROUPS, rows=[*ROWS, untrained])
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert row["perf/wait_for_samples_share"] == 0.5
    assert row["perf/wait_for_weights_share"] == pytest.approx(for_weights)
    assert row["perf/samples_per_s"] == pytest.approx(4 / 6), "one was not trained"


def test_use_of_a_gpu_is_read_until_it_is_asked_for() -> None:
    readings = iter([0.5, None, 1.0])
    done = threading.Event()

    def read() -> float | None:
        try:
            return next(readings)
        except StopIteration:
            done.set()
            return None

    use = GPUUse(read, interval_s=0.001)
    assert done.wait(120)
    use.close()
    assert (use.take(), use.take()) == ([0.5, 1.0], [])
    assert GPUUse.of(torch.device("cpu")) is None


def test_the_advantage_of_a_sample_is_the_mean_of_its_tokens(tmp_path: Path) -> None:
    row = replace(ROWS[0], id="s0", columns={"advantages": Column(torch.tensor([1.0] * 4 + [6]))})
    with RunLog(tmp_path, LogConfig(to=())) as log, Console(9) as console:
        recorder = Recorder(Mesh.alone("cpu"), Spans(), Alarms(), log, console)
        with recorder.spans.span("generate"):
            pass
        recorder.record(1, {}, groups=GROUPS, rows=[row])
    written = [json.loads(line)["advantage"] for line in (tmp_path / "samples.jsonl").open()]
    assert written == [2.0, None, None, None]


def test_the_rows_of_an_episode_are_one_sample(tmp_path: Path) -> None:
    """Its advantage is the mean over the tokens of all rows; its shown tokens are of each row."""
    group = make_rewritten()
    rewritten, opened = group.samples
    rows: list[Row] = []
    for row_id, values in (("s0#1", [1.0] * 5), ("s0", [4.0] * 2), ("s1", [])):
        mask = [False] * 3 + [True] * len(values)
        advantages = Column(torch.tensor(values))
        rows.append(
            Row(id=row_id, episode=row_id[:2], token_ids=[1] * len(mask), loss_mask=mask,
                columns={"advantages": advantages})
        )  # fmt: skip
    spans = Spans(clock=iter([0.0, 0.0, 2.0, 4.0]).__next__)
    with RunLog(tmp_path, LogConfig(to=())) as log, Console(9) as console:
        recorder = Recorder(Mesh.alone("cpu"), spans, Alarms(), log, console, num_shown=2)
        recorder.sampled(1, [group])
        assert recorder.shown_ids == {"s0#1", "s0", "s1"}
        with spans.span("generate"):
            pass
        recorder.record(1, {}, groups=[group], rows=rows)
    written = [json.loads(line)["advantage"] for line in (tmp_path / "samples.jsonl").open()]
    assert written == [pytest.approx((5 * 1.0 + 2 * 4.0) / 7), None]
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").open())
    assert row["perf/samples_per_s"] == 1 / 4.0
    assert row["perf/generated_tokens_per_s"] == 15 / 2.0
    assert (rewritten.id, opened.id) == ("s0", "s1")


class FakeDevice:
    """A GPU of 100 GiB whose cache sleeps, read as torch and the driver are."""

    def __init__(self) -> None:
        self.tensors = self.cache = self.peak = 0

    def hold(self, tensors: int) -> None:
        self.tensors = tensors
        self.peak = max(self.peak, tensors)

    def read(self, device: torch.device) -> Reading:
        peak, self.peak = self.peak, self.tensors
        return Reading(100 * GIB - self.tensors - self.cache, self.cache, peak)


@pytest.mark.parametrize(("sleeps", "peak"), [(True, 37), (False, 57)])
def test_a_cache_that_sleeps_while_the_trainer_works_is_no_part_of_its_peak(
    sleeps: bool, peak: int
) -> None:
    """A cache of 20 GiB beside 10 of weights, and 37 in training; in the next step no more."""
    gpu = FakeDevice()
    memory = DeviceMemory(torch.device("cuda"), read=gpu.read)
    for _ in range(2):
        gpu.cache = 20 * GIB
        gpu.hold(10 * GIB)  # engines generate
        if sleeps:
            memory.end_phase()
            gpu.cache = 0
        gpu.hold(37 * GIB)
        gpu.hold(10 * GIB)
        if sleeps:
            memory.end_phase()
            gpu.cache = 20 * GIB
        taken = to_scalars(memory.take())
        assert taken == {"mem/gpu_free_gib": 70.0, "mem/gpu_peak_gib": peak}


def test_engines_that_need_most_are_the_peak() -> None:
    gpu = FakeDevice()
    memory = DeviceMemory(torch.device("cuda"), read=gpu.read)
    gpu.cache = 60 * GIB
    gpu.hold(10 * GIB)
    memory.end_phase()
    gpu.cache = 0
    gpu.hold(37 * GIB)
    assert to_scalars(memory.take())["mem/gpu_peak_gib"] == 70.0
    memory = DeviceMemory(torch.device("cpu"), read=gpu.read)
    memory.end_phase()
    assert memory.take() == {}


def test_the_first_step_on_a_gpu_says_that_it_compiles() -> None:
    told: list[tuple[str, str]] = []
    for device in ("cpu", "cuda"):
        run: Any = SimpleNamespace(
            launch=SimpleNamespace(
                steps_done=3,
                total_steps=5,
                watch=SimpleNamespace(begin_step=lambda step: None),
                mesh=SimpleNamespace(device=torch.device(device)),
            ),
            recorder=SimpleNamespace(
                waiting=lambda text, device=device: told.append((device, text))
            ),
        )
        assert list(Run.steps(run)) == [4, 5]
    assert told == [("cuda", "the first step also compiles kernels")]


def test_an_idle_gpu_of_a_run_without_engines_is_not_laid_on_its_mode(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice that a run of `hone sft` cannot follow sends people to `hone plan`, which knows only
    `hone rl`. The probe is faked: there is no GPU."""
    probe = lambda _: GPUUse(lambda: 0.4, interval_s=0.01)  # noqa: E731
    monkeypatch.setattr(GPUUse, "of", probe)
    longer = sft_config.run.model_copy(update={"steps": 8})
    supervised.run(sft_config.model_copy(update={"run": longer}))
    events = lines(sft_config.run.dir / "events.jsonl")
    (message,) = (x["message"] for x in events if x.get("name") == "low_gpu_utilization")
    assert "hone plan" not in message
    assert "trainer.max_tokens_per_microbatch" in message


def test_an_alarm_of_failures_says_what_failed(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def score(completion, answer):\n"
        "    if len(completion) % 2:\n"
        "        raise KeyError('price')\n"
        "    return 1.0\n"
    )
    function = {"fn": f"{tmp_path / 'broken.py'}:score"}
    cfg = make_config(
        run={"steps": 1},
        reward={"functions": [function], "max_failure_rate": 1.0},
        data={"eval": []},
    )
    reinforce.run(cfg)
    events = lines(cfg.run.dir / "events.jsonl")
    (message,) = (x["message"] for x in events if x.get("name") == "failed_samples")
    assert "broken.py:3: KeyError: 'price'" in message
    failed = [
        row["failure_detail"] for row in lines(cfg.run.dir / "samples.jsonl") if row["failure"]
    ]
    assert any("KeyError" in detail for detail in failed)

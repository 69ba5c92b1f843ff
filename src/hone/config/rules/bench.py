"""Rules of `hone bench` and `hone plan` alone."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from hone.config.bench import WORKLOADS
from hone.config.planning import GPUS_UNSET
from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, needs, unused, with_facts
from hone.config.rules.view import Details, Fact

__all__ = ["RULES"]

_BENCH = ("bench engine", "bench train")
_PLAN = ("plan",)


class BenchFacts(Facts):
    """The facts that rules of benchmarks and of the simulation compare."""

    @cached_property
    def scorer_devices(self) -> Fact[int]:
        """Devices of frozen models and of a critic apart."""
        cluster = self["cluster"]
        how = " + ".join(role.keys[0] for role in cluster.others)
        critic = " and the critic" if cluster.num_critics else ""
        noun = f"the number of devices of frozen models{critic}"
        return Fact(cluster.num_others, noun, how)

    @cached_property
    def devices_how(self) -> str:
        """The settings that say how many devices are needed."""
        needed = self.devices_needed
        return f"{needed.how} = {needed.value}"

    @cached_property
    def has_other_suffix(self) -> bool:
        """Whether numbers are to be written into something else than a .json file."""
        served = (".json", ".yaml", ".yml") if self.command == "plan" else (".json",)
        return self["output"] is not None and self["output"].suffix not in served

    @cached_property
    def gpus(self) -> Fact[int]:
        """GPUs of the simulation."""
        return Fact(self["plan.gpus"] or GPUS_UNSET, "the number of GPUs", "plan.gpus")


def _bad_workload(view: BenchFacts) -> Iterator[Details]:
    workload = view["workload"]
    if workload not in WORKLOADS and not Path(workload).is_file():
        near = get_close_matches(workload, WORKLOADS, 1)
        yield {"near": f"did you mean '{near[0]}'?" if near else ""}


RULES = with_facts(
    BenchFacts,
    # The model and the output.
    error("model.path = unset", "model.shape = unset", only=_BENCH,
          fix="name a folder (or hub name) in model.path | a public shape such as qwen3-0.6b in "
          "model.shape"),
    error("model.path != unset", "model.shape != unset", only=_BENCH,
          why="there is one model", fix="remove model.path | remove model.shape"),
    error("@has_other_suffix", only=(*_BENCH, "plan"),
          says="output is '{output}'",
          fix="give the path of a .json file, such as bench.json"),
    # The engine.
    error(each=_bad_workload, only=("bench engine",),
          says="workload is '{workload}'",
          why=f"it is a file of requests, or one of {', '.join(WORKLOADS)}", fix="{near}"),
    unused("decode.*", "workload != decode", instead="workload = decode"),
    error("decode.batch > engine.max_num_seqs", given=("workload = decode",),
          why="no more sequences run at once",
          fix="raise engine.max_num_seqs | lower decode.batch"),
    error("decode.context >= @context_length", given=("workload = decode",),
          fix="lower decode.context"),
    error("against", "engine.tensor_parallel_size > 1",
          why="the two are compared on one GPU", fix="remove against"),
    error("against", "engine.weight_dtype = int8",
          why="vLLM would have weights of the model's own format, and read twice the bytes",
          fix="remove against | engine.weight_dtype = auto"),
    needs("vllm", "against = vllm", by="against=vllm", instead="leave against unset"),
    # The trainer.
    unused("trainer.(prompts_per_minibatch|num_epochs|enable_sleep|parity)", only=("bench train",),
           why="a step of the benchmark is one optimizer step"),
    error("trainer.recompute = auto", only=("bench train",),
          why="that is chosen for the memory of a run, and a measurement is of what it names",
          fix="trainer.recompute = off | trainer.recompute = full"),
    error("@longest > @context_length", only=("bench train",),
          fix="use rows of at most {context_length} tokens"),
    # The simulation.
    error("plan.lengths.distribution = file", "plan.lengths.path = unset", only=_PLAN,
          fix="name the file in plan.lengths.path"),
    unused("plan.lengths.path", "plan.lengths.distribution != file", only=_PLAN,
           instead="plan.lengths.distribution = file"),
    error("@scorer_devices >= @gpus", given=("cluster.num_engines = 0", "@scorer_devices > 0"),
          only=_PLAN, why="that leaves none to trainers and engines",
          fix="raise plan.gpus | give fewer to them"),
    error("plan.gpus != @devices_needed", only=_PLAN,
          given=("cluster.num_engines", "plan.gpus"),
          says="plan.gpus is {plan.gpus}, and {devices_needed} GPUs are needed",
          why="{devices_how}",
          fix="leave out plan.gpus | cluster.num_engines = 0, which tries all splits"),
    unused("cluster.(num_nodes|devices_per_node)", only=_PLAN,
           why="any two GPUs are linked alike in the simulation, whatever their hosts"),
)  # fmt: skip

"""Rules on advantages, losses, the KL term, corrections, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from hone.algorithms.advantages import GROUP_ESTIMATORS
from hone.algorithms.settings import USED_BY, PreferenceConfig
from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused, warning, with_facts
from hone.config.rules.view import Details, Fact, differs, required
from hone.config.tree import SUPERVISED

__all__ = ["RULES"]

_TRAINING = ("rl", *SUPERVISED)
_GROUPS = f"algorithm.advantage = {'|'.join(sorted(GROUP_ESTIMATORS))}"
_WHOLE_SEQUENCES = "algorithm.advantage = grpo|dr_grpo|rloo"
_KIND = "algorithm.correction.kind"
_OPTIMIZER = "trainer.optimizer"
_LARGE_LR = 0.01
"""Above which no language model is trained."""


class AlgorithmFacts(Facts):
    """What rules on advantages, losses and the optimizer compare."""

    @cached_property
    def optimizer_steps(self) -> Fact[int]:
        """Optimizer steps of the whole run."""
        batch = required(self.plan.batch, "optimizer_steps")
        how = "run.steps x optimizer steps of each"
        return Fact(batch.optimizer_steps, "the optimizer steps of the run", how)

    @cached_property
    def optimizer_steps_per_rollout(self) -> Fact[int]:
        """Optimizer steps that the samples of a step are used for."""
        batch = required(self.plan.batch, "optimizer_steps_per_rollout")
        number = batch.optimizer_steps_per_rollout
        how = "trainer.prompts_per_minibatch, trainer.num_epochs"
        return Fact(number, "the number of optimizer steps a rollout", how)

    @cached_property
    def resumes_samples(self) -> bool:
        """Whether samples go on under other weights than those that began them."""
        pipeline = self["pipeline"]
        return pipeline.resumes_samples or self["rollout.oversample_prompts"] > 0

    @cached_property
    def beta_out_of_range(self) -> bool:
        """Whether a decay of the optimizer's moments lies outside [0, 1)."""
        return not all(0 <= beta < 1 for beta in self["trainer.optimizer.betas"])

    @cached_property
    def has_exo_pair(self) -> bool:
        """Whether exo_pair is the loss of preferences, or one of them."""
        cfg = self["algorithm"]
        return isinstance(cfg, PreferenceConfig) and "exo_pair" in cfg.losses


def _unused_by_losses(view: AlgorithmFacts) -> Iterator[Details]:
    """Keys that were set and act on none of the losses, with those that they act on."""
    cfg: PreferenceConfig = view["algorithm"]
    for name in differs(cfg, *USED_BY):
        if USED_BY[name].isdisjoint(cfg.losses):
            yield {"key": f"algorithm.{name}", "losses": ", ".join(sorted(USED_BY[name]))}


RULES = with_facts(
    AlgorithmFacts,
    error(_GROUPS, "rollout.n_samples_per_prompt = 1", given=("@learns_from_rewards",),
          why="it compares the samples of a prompt, so that every advantage would be 0",
          fix="raise rollout.n_samples_per_prompt | algorithm.advantage = reinforce_pp"),
    warning("algorithm.advantage = dr_grpo", "algorithm.aggregation = sequence_mean",
            why="a mean within each sequence brings back the length bias that dr_grpo removes",
            fix="algorithm.aggregation = constant"),
    error("algorithm.dual_clip", "algorithm.loss != ppo_clip",
          why="only ppo_clip has a second bound",
          fix="remove algorithm.dual_clip | algorithm.loss = ppo_clip"),
    unused("algorithm.(clip_low|clip_high)", "algorithm.loss = sapo",
           why="its gate is smooth, without a range", instead="algorithm.loss = ppo_clip"),
    warning("algorithm.loss = gspo", "algorithm.clip_low > 0.05", "algorithm.clip_high > 0.05",
            why="gspo clips the mean ratio of a sequence, which stays within a few thousandths of "
            "1, so that these bounds never act",
            fix="use those of its paper, algorithm.clip_low 3e-4 and algorithm.clip_high 4e-4"),
    warning("algorithm.loss = gspo|gmpo", "algorithm.aggregation != sequence_mean",
            why="this loss is defined on whole sequences, and a mean of another kind weighs long "
            "ones more",
            fix="algorithm.aggregation = sequence_mean"),
    warning("algorithm.clip_high < algorithm.clip_low",
            why="unlikely tokens can fall faster than they can rise",
            fix="swap the two"),
    warning("algorithm.clip_low >= 1", given=("algorithm.loss = ppo_clip|gmpo",),
            why="ratios are never below 0, so that nothing is clipped from below",
            fix="use a value below 1; 0.2 is usual"),
    warning("@optimizer_steps_per_rollout > 1", "algorithm.clip_high >= 1",
            why="it hardly clips, and the policy may run away from its samples",
            fix="use 0.2 to 0.3"),
    warning("algorithm.entropy_coef < 0",
            why="a negative bonus drives the policy towards one answer",
            fix="use 0 or above"),
    # The critic.
    *(unused(keys, "algorithm.advantage != gae",
             why="there is no critic", instead="algorithm.advantage = gae")
      for keys in ("critic.(path|lr|optimizer|value_clip|warmup_steps|recompute|offload)",
                   "critic.(max_tokens_per_microbatch|max_tokens_per_forward)",
                   "algorithm.(gamma|lam)")),
    error("critic.warmup_steps >= run.steps", given=("algorithm.advantage = gae",), only=("rl",),
          why="the policy would never learn",
          fix="lower critic.warmup_steps | raise run.steps"),
    unused("critic.(max_tokens_per_microbatch|max_tokens_per_forward)", "trainer.micro_batch_size",
           given=("algorithm.advantage = gae",),
           why="that counts sequences in place of tokens",
           instead="remove trainer.micro_batch_size"),
    warning("critic.lr = 0", given=("algorithm.advantage = gae",),
            why="the critic learns nothing", fix="use 1e-5, which is usual"),
    # The teacher.
    unused("teacher.(reward_coef|loss|top_k|max_tokens_per_forward)", "teacher.path = unset",
           why="advantages come from rewards alone", instead="name a model in teacher.path"),
    unused("teacher.max_tokens_per_forward", "trainer.micro_batch_size", given=("teacher.path",),
           why="that counts sequences in place of tokens",
           instead="remove trainer.micro_batch_size"),
    unused("teacher.top_k", "teacher.loss = policy_gradient", given=("teacher.path",),
           why="it is of the sampled token alone", instead="teacher.loss = reverse_kl"),
    unused("algorithm.(loss|clip_low|clip_high|dual_clip)", "teacher.loss != policy_gradient",
           given=("not @learns_from_rewards",),
           why="nothing but the divergence is trained on", instead="set teacher.reward_coef"),
    unused("algorithm.advantage", "teacher.path", given=("not @learns_from_rewards",),
           why="the teacher alone makes advantages", instead="set teacher.reward_coef"),
    error("teacher.path", "algorithm.advantage = gae",
          why="the critic learns what is to be earned, and a teacher credits each token by itself",
          fix="algorithm.advantage = grpo | remove teacher.path"),
    error("teacher.path", "algorithm.kl.coef", "algorithm.kl.placement = reward",
          given=("not @learns_from_rewards",),
          why="no rewards are trained on, from which the penalty could be subtracted",
          fix="algorithm.kl.placement = loss | set teacher.reward_coef"),
    warning("teacher.path", "rollout.dynamic_sampling", given=("not @learns_from_rewards",),
            why="it drops prompts whose samples earn the same, and a teacher scores those as well",
            fix="rollout.dynamic_sampling = false"),
    # The KL term.
    unused("algorithm.kl.(placement|estimator)", "algorithm.kl.coef = 0",
           why="no KL term is computed", instead="set algorithm.kl.coef"),
    error("algorithm.kl.estimator = k1", "algorithm.kl.placement = loss",
          given=("algorithm.kl.coef",),
          why="its expected gradient is zero: it would cost a reference pass and do nothing",
          fix="algorithm.kl.estimator = k3 | algorithm.kl.placement = reward"),
    warning("algorithm.kl.placement = reward", "algorithm.kl.estimator != k1",
            given=("algorithm.kl.coef",),
            why="that biases the gradient; in the reward k1 is the estimator of the reverse KL",
            fix="algorithm.kl.estimator = k1"),
    *(error("algorithm.kl.placement = reward", _WHOLE_SEQUENCES, masked,
            given=("algorithm.kl.coef", *given),
            why="masked tokens pay no KL penalty, so that penalised samples would be compared with "
            "spared ones",
            fix="algorithm.kl.placement = loss | algorithm.advantage = reinforce_pp_baseline")
      for masked, given in (("rollout.truncated_samples = mask", ()),
                            ("rollout.mask_off_policy_tokens", ("@resumes_samples",)))),
    # The correction.
    unused("algorithm.correction.(low|high)", f"{_KIND} = none",
           why="nothing is corrected", instead=f"{_KIND} = icepop"),
    unused("algorithm.correction.low", f"{_KIND} = tis",
           why="tis only cuts at algorithm.correction.high", instead=f"{_KIND} = icepop"),
    error("algorithm.correction.low >= algorithm.correction.high",
          given=(f"{_KIND} = icepop|sequence_mask",),
          why="no ratio lies between",
          fix="lower algorithm.correction.low"),
    *(error(bound, given=(f"{_KIND} = {kinds}", "algorithm.correction.low < "
                          "algorithm.correction.high"),
            why="algorithm.correction.low to algorithm.correction.high excludes 1, the ratio of "
            "samples that are exactly on-policy",
            fix="use a range around 1, such as algorithm.correction.low 0.5 to "
            "algorithm.correction.high 2")
      for bound, kinds in (("algorithm.correction.high < 1", "tis|icepop|sequence_mask"),
                           ("algorithm.correction.low > 1", "icepop|sequence_mask"))),
    warning("rollout.oversample_prompts", f"{_KIND} = none",
            why="the gradient of what older weights have sampled is biased "
            "(rollout.mask_off_policy_tokens leaves out what was sampled before an interruption, "
            "not samples that waited for their group)",
            fix=f"{_KIND} = tis | {_KIND} = icepop"),
    warning("pipeline.max_staleness", f"{_KIND} = none",
            why="the gradient of what older weights have sampled is biased "
            "(rollout.mask_off_policy_tokens leaves out what was sampled before an interruption, "
            "not what is old)",
            fix=f"{_KIND} = tis"),
    *(warning(rounded, f"{_KIND} = none",
              why="samples come from a slightly different policy than the trainer's",
              fix=f"{_KIND} = tis")
      for rounded in ("engine.kv_cache_dtype = fp8", "engine.weight_dtype = int8",
                      "trainer.matmul_precision = fp8")),
    error("algorithm.routing_replay", "not @has_experts", only=("rl",),
          says="algorithm.routing_replay is on, and {the_model} has no experts",
          why="there are no routes that could be replayed",
          fix="algorithm.routing_replay = false"),
    # Preferences.
    warning(each=_unused_by_losses, only=("dpo",),
            says="{key} is set and has no effect, since algorithm.loss is {algorithm.loss}",
            why="it is a setting of {losses}", fix="remove {key}"),
    error("not algorithm.loss", says="algorithm.loss names no loss",
          why="nothing would be learnt", fix="algorithm.loss = sigmoid"),
    error("@has_exo_pair", "algorithm.label_smoothing = 0",
          says="algorithm.loss is {algorithm.loss}, and algorithm.label_smoothing is 0",
          why="exo_pair compares with smoothed labels, and is infinite without",
          fix="algorithm.label_smoothing = 0.001"),
    error("algorithm.loss = kto", "data.examples_per_step = 1", only=("dpo",),
          why="its divergence is estimated by completions of a step's other rows",
          fix="data.examples_per_step = 64 | another loss"),
    # The optimizer.
    warning(f"{_OPTIMIZER}.lr = 0", only=_TRAINING,
            why="nothing is learnt", fix="use 1e-6, which is usual for RL, or what you need"),
    warning(f"{_OPTIMIZER}.lr <= 1e-6", given=(f"{_OPTIMIZER}.lr > 0",),
            only=("sft", "reward-model"),
            why="that is a rate for RL", fix="use 1e-5 to 1e-4, which is usual here"),
    *(warning(f"{_OPTIMIZER}.muon_lr is default", f"{key} = muon", only=_TRAINING,
              why="that is a rate for pre-training",
              fix="use 1e-4 to 1e-3, which is usual for fine-tuning")
      for key in (f"{_OPTIMIZER}.name", "critic.optimizer")),
    *(unused(f"{_OPTIMIZER}.muon_lr", f"{_OPTIMIZER}.name != muon", only=commands, given=given,
             instead=f"{_OPTIMIZER}.name = muon")
      for commands, given in ((SUPERVISED, ()), (("rl",), ("critic.optimizer != muon",)))),
    unused(f"{_OPTIMIZER}.min_lr_ratio", f"{_OPTIMIZER}.schedule = constant", only=_TRAINING,
           why="it is the end of a falling schedule", instead=f"{_OPTIMIZER}.schedule = linear"),
    *(warning(f"{key} > {_LARGE_LR}", given=given,
              why="AdamW moves each weight by about that much in a step, and those of language "
              "models are about 0.02: training diverges", fix=f"{key} = 1e-5 | lower it")
      for key, given in ((f"{_OPTIMIZER}.lr", ()),
                         ("critic.lr", ("algorithm.advantage = gae",)))),
    error("@beta_out_of_range",
          says=f"{_OPTIMIZER}.betas is {{{_OPTIMIZER}.betas}}",
          why="both must be at least 0 and below 1",
          fix=f"{_OPTIMIZER}.betas = [0.9, 0.95]"),
    warning(f"{_OPTIMIZER}.warmup_steps > @optimizer_steps",
            why=f"{_OPTIMIZER}.lr is never reached, which is no matter in a trial",
            fix=f"{_OPTIMIZER}.warmup_steps = {{optimizer_steps}}"),
)  # fmt: skip

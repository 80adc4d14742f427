"""The table of all alarms: name, what it finds, what causes that, what to do, thresholds with their source."""

from __future__ import annotations

from collections.abc import Iterable

from klamp.diagnostics import alarms_kl as kl
from klamp.diagnostics import alarms_run as run
from klamp.diagnostics import alarms_teacher as teacher
from klamp.diagnostics import alarms_tokens as tokens
from klamp.diagnostics import causes
from klamp.diagnostics.alarm import Alarm
from klamp.errors import check_name

KL = "kl/k3|kl/exact|kl/k1"

ALARMS: dict[str, Alarm] = {
    alarm.name: alarm
    for alarm in (
        Alarm(
            name="step-zero-kl",
            text="KL is not 0 before the first update",
            means="Policy and reference differ before any training: dropout in one of them, an adapter that is not "
            "zero at the start, another data type or kernel, other weights, or a mask that covers the prompt.",
            next_step="Score one batch twice with the policy (the two must agree), then once with the reference; put "
            "both into eval(), load both in one dtype, and compare tokens, mask and temperature.",
            rule=kl.step_zero,
            needs=(KL,),
            limits=(kl.STEP_ZERO, kl.STEP_ZERO_OTHERS),
        ),
        Alarm(
            name="reference-differs",
            text="the chosen reference is far from the model that is trained",
            means="The reference is another model than the one that training starts from: an older checkpoint, a wrong "
            "path, another chat template or precision. The KL then pulls the policy away from its own start, from the "
            "first step on.",
            next_step="Check that path. Leave the reference out to hold the policy where it starts; if the distance is "
            "meant, set target_kl above it.",
            rule=kl.reference_differs,
            needs=("kl/k3|kl/exact",),
            limits=(kl.REFERENCE_DIFFERS,),
        ),
        Alarm(
            name="negative-k1",
            text="the KL is negative beyond chance",
            means="The mean of log policy - log ref estimates a KL, which is never negative, if the policy sampled the "
            "tokens. So something else did (an old sampler, another temperature), the mask is wrong, or the signs are "
            "swapped. A k3 is never below 0 at all: what was logged as one is a k1, or wrong.",
            next_step="Compare the sampler's log-probabilities with the trainer's on the same tokens; check that the "
            "mask covers the completion only and that the log-ratio is policy - reference.",
            rule=kl.negative_k1,
            needs=("kl/k1|kl/k1_sequence|kl/k3|completions",),
            limits=(kl.NEGATIVE_STEPS, kl.NEGATIVE_FEW, kl.NEGATIVE_K1, kl.NEGATIVE_AT_ONCE, tokens.SURPRISE),
        ),
        Alarm(
            name="k3-far-above-k1",
            text="k3 is far above k1",
            means="Both estimate the same KL. k3 grows with ref/policy, so a few tokens that the reference finds far "
            "likelier than the policy dominate it: padding or masked tokens that are counted, a shift by one, or a "
            "vocabulary that the policy has cut.",
            next_step="Look at the tokens named here. If they are padding, end tokens or always at the same place, fix "
            "the mask; if they are real, bound the log-ratio (kl_max_log_ratio) or measure the exact KL.",
            rule=kl.k3_far_above_k1,
            needs=("kl/k1", "kl/k3"),
            limits=(kl.K3_FAR, kl.FAR_AT_ONCE),
        ),
        Alarm(
            name="kl-spike",
            text="the KL jumped",
            means="Where it stays, one update moved the policy far: the learning rate is too high, a batch had an "
            "extreme reward or advantage, or gradients were not clipped. Where it is back in the next step, a few "
            "tokens carried all of it.",
            next_step="Look at the tokens named here and at the step's rewards; where those fell, go back to a "
            "checkpoint from before. Where it stays, lower the learning rate or max_grad_norm, raise beta, or set "
            "kl_lr_guard or kl_early_stop.",
            rule=kl.kl_spike,
            needs=(KL,),
            limits=(kl.SPIKE, kl.SPIKE_FLOOR),
            later=kl.after_spike,
        ),
        Alarm(
            name="reward-collapse",
            text="the reward collapsed",
            means="The policy has lost what earned it the reward. Mostly the learning rate is too high: the policy "
            "left what it knew within a few steps, and where no completion earns anything, nothing brings it back.",
            next_step="Go back to a checkpoint from before the fall. Lower the learning rate first; then hold the KL "
            "(target_kl, kl_lr_guard).",
            rule=run.reward_collapse,
            needs=("reward",),
            limits=(run.COLLAPSE,),
        ),
        Alarm(
            name="kl-far",
            text="the policy is far from its reference",
            means="Each token is e times likelier than the reference finds it, or more. At that distance a policy has "
            "mostly given up its language for the reward: words repeat, other skills go.",
            next_step="Read completions, and ask the policy something else than the task. Lower the learning rate, "
            "raise beta, or hold a target_kl.",
            rule=kl.kl_far,
            needs=(KL, "length/mean"),
            limits=(kl.FAR, kl.FAR_COMPLETION),
        ),
        Alarm(
            name="kl-growing",
            text="the KL goes on growing, and the reward does not",
            means="The policy moves away from its reference without being paid for it: noise that the optimizer adds "
            "up, or a reward that is full already.",
            next_step="End the run at the step where the reward stopped rising, lower the learning rate, or hold a "
            "target_kl.",
            rule=kl.kl_growing,
            needs=(KL, "reward"),
            limits=(kl.GROWING,),
        ),
        Alarm(
            name="length-exploited",
            text="completions grow because the reward pays for length",
            means="Within a group the longer completions earn more, so length is learned: filler, repetition, lists. "
            "A higher limit only gives it more room.",
            next_step="Read the longest completions. Score the answer alone, take something off for length, or hold "
            "the KL of a whole completion (a budget with a frozen reference length).",
            rule=run.length_exploited,
            needs=("length/mean", "length/reward_correlation"),
            limits=(run.LONGER, causes.PAYS),
        ),
        Alarm(
            name="repetition",
            text="completions repeat themselves",
            means="The policy has fallen into a word or a phrase that the reward likes, and says it over and over; "
            "its entropy is gone, so sampling finds no way out.",
            next_step="Go back to a checkpoint from before. Let the reward count a thing once, raise beta or hold a "
            "target_kl, and watch prompts that are not of the task.",
            rule=run.repetition,
            needs=("length/repeated",),
            limits=(causes.REPEATED, run.MORE_REPEATED),
        ),
        Alarm(
            name="saturated",
            text="nothing is left to learn: groups have equal rewards",
            means="Advantages are 0, so the reward has no gradient: what still moves the policy is the KL, and noise.",
            next_step="If the task is learned, end here. If all fail, make it easier or mend the reward; if all say "
            "the same, go back and hold the KL.",
            rule=run.saturated,
            needs=("groups/saturated",),
            limits=(run.SATURATED,),
        ),
        Alarm(
            name="dilution",
            text="the KL per token falls while completions grow",
            means="Completions got longer with tokens that cost no KL: the mean per token falls, the KL of a whole "
            "completion does not.",
            next_step="Read some completions for filler. Watch the KL per completion; hold that one (kl_horizon="
            "'sequence', a budget with a frozen reference length), or keep the KL out of a per-token mean.",
            rule=kl.dilution,
            needs=(KL, "length/mean"),
            limits=(kl.DILUTION, kl.DILUTION_KEPT),
        ),
        Alarm(
            name="detached-reference",
            text="the KL is about 0 although the policy should have moved",
            means="Nothing trains the policy; or one so near could not have changed its reward so much: the reference "
            "follows it (shared weights, an adapter that is not switched off), or a resume made it of the "
            "checkpoint; or the log-probabilities come from another model than the one that samples (an adapter that "
            "is not synced).",
            next_step="After a resume, give it the model that training started from. Else change one "
            "weight of the policy by hand: the reference's log-probabilities must not move, the policy's and the "
            "sampler's must.",
            rule=kl.detached_reference,
            needs=(KL,),
            limits=(kl.DETACHED, kl.STILL, kl.FELL),
        ),
        Alarm(
            name="not-trained",
            text="nothing trains the policy",
            means="No step moves its weights: the learning rate is 0, its gradient is 0, or no token counts.",
            next_step="Print the learning rate, the parameters with requires_grad and their gradients, and the sum of "
            "the loss mask, in one step.",
            rule=run.not_trained,
            needs=("train/grad_norm|train/learning_rate|completions",),
            limits=(run.IDLE,),
        ),
        Alarm(
            name="advantage-scale",
            text="advantages are out of scale",
            means="The policy gradient is as large as the advantages: a reward that is not of order 1, a division by a "
            "standard deviation that is only rounding, or a signal in groups that have none. "
            "beta then means something else than it says.",
            next_step="Print rewards and advantages of one group. Scale the reward to order 1, give groups without "
            "variance the advantage 0, or leave the division out (scale_rewards='none').",
            rule=run.advantage_scale,
            needs=("reward_std|advantage/max|completions",),
            limits=(run.ADVANTAGE, run.NOISE),
        ),
        Alarm(
            name="mask-on-prompt",
            text="the loss mask covers tokens that the model did not write",
            means="Prompt tokens or a tool's answers are trained on: they carry the group's advantage and a KL, though "
            "nobody chose them.",
            next_step="Decode one sequence with its mask. True must begin at the first token of the completion.",
            rule=tokens.mask_on_prompt,
            needs=("completions", "sampler_logprobs"),
            limits=(tokens.PROMPT,),
        ),
        Alarm(
            name="end-token-lost",
            text="the loss mask leaves out the end token",
            means="Nothing teaches the model when to stop, so length drifts; usual where the end token is also the "
            "padding token, and a mask is made by comparing with it.",
            next_step="Make the mask from lengths, and let it include the first end token.",
            rule=tokens.end_token_lost,
            needs=("completions",),
            limits=(tokens.END_TOKEN,),
        ),
        Alarm(
            name="truncated",
            text="many completions are cut at the length limit",
            means="The reward judges answers that were not finished, and the KL misses what would have followed. They "
            "grew, or the limit was too low from the start.",
            next_step="Read some. If they grow by filler, mend the reward; if answers need the room, raise "
            "max_completion_length, or leave such completions out (mask_truncated_completions).",
            rule=run.truncated,
            needs=("length/truncated",),
            limits=(run.TRUNCATED, run.MORE_TRUNCATED),
        ),
        Alarm(
            name="sampler-mismatch",
            text="sampler and trainer disagree about the sampled tokens",
            means="The model that samples is not the one that is trained: weights or an adapter that were not synced, "
            "other kernels or data types, top-p or top-k, another temperature. Every estimate takes the tokens for the "
            "policy's own.",
            next_step="Look at k1 and k3 both: k1 can cancel where k3 shows a single bad token. Sync the weights, "
            "sample from the whole distribution, or correct for it (kl_off_policy).",
            rule=tokens.sampler_mismatch,
            needs=("sampler/k3|sampler/k1|sampler/abs",),
            limits=(causes.MISMATCH, tokens.OTHER_KERNELS, tokens.UNSEEN),
        ),
        Alarm(
            name="beta-runaway",
            text="beta grew until the KL outweighs the reward",
            means="The controller goes on raising beta because the KL stays above its target: the target is below what "
            "the reward needs, or the KL does not answer to beta (a clip whose free budget lies above the target). "
            "Every advantage is then small against the pull to the reference, and what was learned is given up.",
            next_step="Raise target_kl to the KL at which the reward had risen, take a fixed beta, or bound it "
            "(beta_max); `klamp explain` says whether the configuration's KL can reach its target.",
            rule=kl.beta_runaway,
            needs=("beta", "beta/price", "kl/k3_sequence", "reward"),
            limits=(kl.RUNAWAY,),
        ),
        Alarm(
            name="kl-dominates",
            text="the KL outweighs the reward",
            means="beta is so high that even the best policy stays at the reference: nothing can be learned. Often the "
            "reward is smaller than it was thought to be, or beta was taken from a loss that divides differently.",
            next_step="Lower beta until its price is below the spread of the rewards within groups, or set target_kl, "
            "which finds it.",
            rule=kl.kl_dominates,
            needs=("beta/price", "reward_std"),
            limits=(kl.DOMINATES,),
        ),
        Alarm(
            name="kl-inert",
            text="the KL does nothing",
            means="A reference is scored and nothing comes of it: beta is too low to matter beside the reward, or the "
            "clip's free budget is larger than any completion's KL.",
            next_step="Raise beta, lower kl_clip_threshold, or hold a target_kl; or set beta=0 and save the "
            "reference's pass (kl_monitor still measures it).",
            rule=kl.kl_inert,
            needs=("beta/price|kl/over_budget", "reward_std|kl/over_budget"),
            limits=(kl.INERT,),
        ),
        Alarm(
            name="huge-values",
            text="values a thousand times too large, or not finite",
            means="The KL or the gradient exploded: k3 is exponential in how far a token is below the reference. "
            "Clipping the gradient then hides it: of a norm of 1e5 clipped to 0.1 nothing is left of the reward.",
            next_step="Find the first step. Lower the learning rate, bound the log-ratio, compute the ratio in "
            "float32, check that the same tokens reach both models.",
            rule=run.huge_values,
            needs=("|".join((*run.WATCHED, "completions")),),
            limits=(run.HUGE,),
        ),
        Alarm(
            name="dr-grpo-with-kl",
            text="beta above 0 under dr_grpo with a rule-based verifier",
            means="Dr. GRPO leaves the KL out: a rule is right however far the policy goes, so the KL only holds it "
            "back, and is one more source of large gradients.",
            next_step="Set beta=0, or say why the skills of the reference must be kept and watch them.",
            rule=run.dr_grpo_with_kl,
            needs=("settings.loss_type", "settings.verifier"),
            limits=(),
        ),
        Alarm(
            name="retention",
            text="a held-out score fell",
            means="Of a skill that is not trained: old knowledge is forgotten, and the forward KL on the new task "
            "predicts it (arXiv 2509.04259). Of the task itself: the policy learns its training prompts, or games the "
            "reward.",
            next_step="Raise beta or lower target_kl, train fewer steps, or mix the old skill into the prompts.",
            rule=run.retention,
            needs=("evaluations",),
            limits=(run.DROPPED,),
        ),
        Alarm(
            name="teacher-silent",
            text="the teacher gives many tokens no number, or all the same one",
            means="Its server fails or cuts, its numbers are lost on the way, or they are placeholders.",
            next_step="Ask it for one completion by hand.",
            rule=teacher.silent,
            needs=("teacher/unscored",),
            limits=(teacher.UNSCORED, teacher.CONSTANT),
        ),
        Alarm(
            name="teacher-not-reached",
            text="the policy does not come nearer to its teacher",
            means="The learning rate is too low, the policy is too small, or the numbers belong to other tokens.",
            next_step="Score one completion with teacher_model set to the policy itself: the KL must be 0.",
            rule=teacher.not_reached,
            needs=(teacher.KL, "teacher/coef"),
            limits=(teacher.REACHED,),
        ),
        Alarm(
            name="teacher-outside-head",
            text="the head misses the teacher: most of its mass, or more and more of its likeliest tokens",
            means="The tail must say what the teacher would: noise, or a bias. With the overlap, the policy leaves it.",
            next_step="Raise teacher_top_k, set teacher_head='union' and teacher_tail='sampled'; look at teacher/kl.",
            rule=teacher.head_misses,
            needs=("teacher/teacher_mass",),
            limits=(teacher.INSIDE, teacher.OVERLAP),
        ),
        Alarm(
            name="teacher-inert",
            text="the teacher does nothing",
            means="It is the policy itself, its KL is not in the loss, or the reward outweighs it.",
            next_step="Check its path and its adapter; raise teacher_coef.",
            rule=teacher.inert,
            needs=(f"{teacher.KL}|settings.teacher_coef",),
            limits=(teacher.SAME, teacher.STILL, kl.INERT),
        ),
        Alarm(
            name="teacher-drowns-reward",
            text="the teacher outweighs the reward",
            means="Even the best policy stays at its teacher, whatever that earns.",
            next_step="Lower teacher_coef below the spread of the rewards, or set reward='none' if that is meant.",
            rule=teacher.drowns_reward,
            needs=("teacher/coef", "reward_std"),
            limits=(kl.DOMINATES,),
        ),
        Alarm(
            name="teacher-prefers-wrong",
            text="the teacher prefers completions that earn less",
            means="On the policy's own tokens it is worse than the policy, or it sees another prompt than was meant.",
            next_step="Read the teacher's answers; take another, or lower teacher_coef.",
            rule=teacher.prefers_wrong,
            needs=("teacher/reward_correlation",),
            limits=(teacher.WRONG,),
        ),
        Alarm(
            name="teacher-ends-elsewhere",
            text="the teacher does not end where the policy does",
            means="Their end tokens differ: the teacher pulls the policy's end away, and answers grow.",
            next_step="Give both the same end token and chat template.",
            rule=teacher.ends_elsewhere,
            needs=("teacher/end",),
            limits=(teacher.ENDS,),
        ),
        Alarm(
            name="kl-high",
            text="KL above 0.2, a tutorial's warning sign",
            means="The GRPO tutorial takes it for drifting too much (docs/sources.md). By itself it is not: a language "
            "model was best at 0.5, its other skills kept; digits are learned at 0.1.",
            next_step="Read completions and look at the retained skills. If both are well, leave it.",
            rule=kl.kl_high,
            needs=(KL,),
            limits=(kl.HIGH,),
            level="note",
        ),
        Alarm(
            name="kl-low",
            text="KL below 0.01, a tutorial's sign of not learning enough",
            means="Near the reference after 20 steps; right where the reward is high, else the updates are small.",
            next_step="Look at the reward. If it stands still, raise the learning rate or lower beta.",
            rule=kl.kl_low,
            needs=(KL,),
            limits=(kl.LOW,),
            level="note",
        ),
    )
}
"""Name of an alarm -> the alarm."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no alarm has.

    Raises:
        UnknownNameError: names the nearest alarm.
    """
    for name in names:
        check_name("alarm", name, ALARMS)

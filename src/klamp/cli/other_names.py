"""Names that TRL, verl and others have for fields of klamp: for errors that name klamp's field and the difference.

What klamp takes without a word is a field's own name and its aliases (`klamp.config.ALIASES`). These names differ from
it in a unit, in what they count, or by their letters alone, and the sentence says which.
"""

from __future__ import annotations

from collections.abc import Mapping

SAME = "it means the same, in the same unit"
GROUP = "num_generations is the number of completions of each prompt, the group that advantages are formed in"
STEPS = "max_steps counts steps, each with a rollout of prompts_per_step prompts, whatever num_iterations is"
EPOCHS = "klamp counts steps, not passes over the data: one pass is (prompts of the task) / prompts_per_step steps"
PROMPTS = (
    "prompts_per_step counts the prompts of a step over all processes and micro-batches; num_generations completions "
    "are sampled of each"
)
COMPLETIONS = (
    "it counts completions on one device; klamp's prompts_per_step counts prompts over all devices, so that a step has "
    "prompts_per_step x num_generations completions"
)
COEFFICIENT = "beta is the coefficient of the KL, in loss or reward per nat; kl_placement says where it enters"
TOKENS = "max_completion_length is the longest completion in tokens, without its prompt"
RATIO = "epsilon bounds the probability ratio to 1 - epsilon and 1 + epsilon; epsilon_high sets the upper bound apart"
VALUE = "kl_estimator names the value (verl's kl is k1, mse is k2, low_var_kl is k3), kl_gradient the gradient"
EVERY = "it counts steps; 0 switches it off"
PRECISION = "dtype is the type of the weights, float32, bfloat16 or float16; master_weights is what they are trained on"

_ROWS = (
    ("learning_rate", "lr actor_lr peak_lr", SAME),
    ("max_steps", "steps num_steps train_steps total_steps total_training_steps", STEPS),
    ("max_steps", "epochs num_epochs num_train_epochs total_epochs", EPOCHS),
    ("prompts_per_step", "batch_size train_batch_size global_batch_size rollout_batch_size", PROMPTS),
    ("prompts_per_step", "per_device_train_batch_size", COMPLETIONS),
    (
        "prompts_per_step",
        "generation_batch_size",
        "it counts completions; prompts_per_step counts prompts, num_generations times fewer",
    ),
    (
        "gradient_accumulation_steps",
        "micro_batch_size ppo_micro_batch_size_per_gpu grad_accum num_minibatches",
        "it is the number of parts that a process's share of a step is computed in, not the size of one; the result "
        "does not depend on it",
    ),
    ("num_generations", "n group_size num_samples n_samples samples_per_prompt n_samples_per_prompt rollout_n", GROUP),
    ("max_completion_length", "max_new_tokens max_tokens max_length response_length max_response_length", TOKENS),
    (
        "num_iterations",
        "mu ppo_epochs num_ppo_epochs update_epochs",
        "num_iterations is the number of updates that one rollout is used for, each with all of its completions",
    ),
    ("beta", "kl kl_coeff kl_weight kl_lambda init_kl_coef", COEFFICIENT),
    (
        "beta",
        "kl_loss_coef",
        "verl's coefficient weighs the KL as its loss_agg_mode averages it, klamp's as kl_normalizer does: by default "
        "as the policy loss; kl_placement says where it enters",
    ),
    (
        "target_kl",
        "kl_target desired_kl",
        "target_kl is the KL to hold in nats per token, the unit of the metric kl/k3",
    ),
    (
        "kl_controller",
        "kl_ctrl kl_ctrl_type adap_kl_ctrl adaptive_kl",
        "kl_controller names the rule: fixed, hold, step, proportional (that of Ziegler et al. and verl), dual or pid",
    ),
    ("kl_estimator", "kl_loss_type kl_type kl_penalty_type", VALUE),
    ("epsilon", "clip_range cliprange clip_ratio clip_eps eps_clip clip_param", RATIO),
    ("epsilon_high", "clip_ratio_high eps_clip_high", RATIO),
    (
        "scale_rewards",
        "norm_adv_by_std_in_grpo normalize_advantages std_normalization",
        "scale_rewards takes std or none, for advantages divided by the group's standard deviation or not",
    ),
    ("loss_type", "loss_agg_mode loss", "loss_type names a published loss: grpo, bnpo, dr_grpo or dapo"),
    ("model", "model_name_or_path model_name model_path base_model pretrain", SAME),
    (
        "ref_model",
        "ref_model_path reference_model ref_model_name_or_path",
        "it means the same: a folder or a hub id; without it the reference is the model before training",
    ),
    ("lora_r", "lora_rank lora", "lora_r is the rank of the adapter; 0 trains all weights"),
    ("dtype", "bf16 fp16 torch_dtype precision mixed_precision", PRECISION),
    (
        "task",
        "dataset dataset_name data train_file train_files",
        "task is a data file, reasoning_gym:NAME, or a built-in task",
    ),
    ("reward", "reward_funcs reward_fn reward_function", "reward names one function"),
    ("max_grad_norm", "grad_clip clip_grad max_norm", "max_grad_norm is a norm; 0: no clipping"),
    (
        "warmup_steps",
        "warmup warmup_ratio lr_warmup_steps",
        "warmup_steps counts steps; it is no share of the run",
    ),
    ("lr_scheduler_type", "lr_scheduler lr_schedule scheduler", "it is constant, linear or cosine"),
    ("save_every", "save_steps save_freq save_interval", EVERY),
    ("eval_every", "eval_steps test_freq eval_freq eval_interval", EVERY),
    ("keep_checkpoints", "save_total_limit", SAME),
    (
        "report_to",
        "wandb tensorboard logger log_with tracker",
        "report_to names trackers: tensorboard, wandb, or another that accelerate knows",
    ),
    ("output_dir", "output out out_dir save_dir", "output_dir is the folder of the run"),
    (
        "resume",
        "resume_from_checkpoint",
        "resume is a switch: it continues output_dir from its newest checkpoint",
    ),
    ("cpu", "use_cpu no_cuda", "cpu is a switch: the run stays there even beside an accelerator"),
)
"""A field, what others call it, and the difference."""

OTHER_NAMES: Mapping[str, tuple[str, str]] = {
    name: (field, difference) for field, names, difference in _ROWS for name in names.split()
}
"""Another trainer's name -> klamp's field that comes nearest to it, and how the field differs, in a sentence."""
